"""A gateway as a process of its own, for the tests that kill it."""

from __future__ import annotations

import functools
import socket
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from rollmill.chat.formats.compact import CompactFormat
from rollmill.chat.tokenizer import Tokenizer
from rollmill.gateway.access.keys import KeyStore
from rollmill.gateway.app import make_app
from rollmill.gateway.config import EngineEndpoint, GatewayConfig
from rollmill.gateway.gateway_parts import GatewayInputs
from rollmill.gateway.recording.workers_log import move_sessions
from rollmill.gateway.replicas import Gateways
from rollmill.gateway.workers import Workers
from rollmill.launch.gateway_workers import run_workers
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.trajectory_store import TrajectoryStore

ADMIN, LIVE = "admin-secret", "production-secret"


class GatewayServer(TestServer):
    """Serves as the role does: what runs for a client that disconnects is not cancelled, and a stop waits a second."""

    async def _make_runner(self, **options: Any) -> web.BaseRunner[web.Request]:
        return await super()._make_runner(**{**options, "handler_cancellation": False, "shutdown_timeout": 1.0})


def main(directory: Path, port: int, engine: str, count: int = 1, *ports: int) -> None:
    """`ports`: those of all gateways of the run, if there are several."""
    tokenizer = Tokenizer.load(directory / "tokenizer.json")
    finders = [functools.partial(str.format, "http://127.0.0.1:{}", each) for each in ports]
    gateways = Gateways(ports.index(port), finders, ADMIN) if ports else None
    log = directory / (f"gateway-{ports.index(port) + 1}" if ports else "gateway")

    def build(workers: Workers) -> web.Application:
        objects = Objects.open(directory / "store")
        database = open_database(f"sqlite:///{directory}/mill.db")
        given = GatewayInputs(
            GatewayConfig(health_interval_s=0.02),
            CompactFormat(tokenizer),
            tokenizer,
            TrajectoryStore(database, objects),
            objects,
            log,
            ADMIN,
            [EngineEndpoint(engine, "home")],
            LIVE,
            keys=KeyStore(database, "run"),
        )
        return make_app(given, workers)

    if count == 1:
        move_sessions(log, 1)
        web.run_app(build(Workers(gateways=gateways)), host="127.0.0.1", port=port, print=None, access_log=None)
        return
    with socket.create_server(("127.0.0.1", port)) as listening:
        run_workers(build, listening, log, count, gateways=gateways)
