"""The gateway of `benchmarks.gateway`, in front of a stub engine.

    python -m benchmarks.gateway_served PORT STUB_URL DIRECTORY WORKERS [PLACES QUEUE]

The directory holds tokenizer.json. PLACES and QUEUE are how many requests the engine gets at once, and may wait for it.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from aiohttp import web

from benchmarks.gateway_stub import ADMIN, KEY
from rollmill.chat.formats.choice import format_of
from rollmill.chat.tokenizer import Tokenizer
from rollmill.gateway.app import make_app
from rollmill.gateway.config import EngineEndpoint, GatewayConfig
from rollmill.gateway.workers import Workers
from rollmill.launch.gateway_workers import BACKLOG, run_workers
from rollmill.launch.roles.gateway import prepare_process
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.trajectory_store import TrajectoryStore


def gateway(port: int, engine: str, directory: Path, count: int, places: int = 4096, queue: int = 4096) -> None:
    tokenizer = Tokenizer.load(directory / "tokenizer.json")
    form = format_of(tokenizer)

    def build(workers: Workers) -> web.Application:
        objects = Objects.open(directory / "store")
        trajectories = TrajectoryStore(open_database(f"sqlite:///{directory}/mill.db"), objects)
        config = GatewayConfig(engine_requests=places, queue_requests=queue)
        endpoints = [EngineEndpoint(engine, "home")]
        log = directory / "gateway"
        app = make_app(config, form, tokenizer, endpoints, trajectories, objects, log, ADMIN, KEY, workers=workers)
        prepare_process()
        return app

    if count == 1:
        web.run_app(build(Workers()), host="127.0.0.1", port=port, print=None, access_log=None, backlog=BACKLOG)
        return
    with socket.create_server(("127.0.0.1", port), backlog=BACKLOG) as listening:
        run_workers(build, listening, directory / "gateway", count)


if __name__ == "__main__":
    gateway(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))
