"""A gateway process for the crash tests: python -m tests.gateway.serve DIRECTORY PORT ENGINE_URL"""

from __future__ import annotations

import sys
from pathlib import Path

from aiohttp import web

from rollmill.chat.formats.compact import CompactFormat
from rollmill.chat.tokenizer import Tokenizer
from rollmill.gateway.app import make_app
from rollmill.gateway.config import EngineEndpoint, GatewayConfig
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.store import TrajectoryStore

ADMIN, LIVE = "admin-secret", "production-secret"


def main(directory: Path, port: int, engine: str) -> None:
    tokenizer = Tokenizer.load(directory / "tokenizer.json")
    objects = Objects.open(directory / "store")
    trajectories = TrajectoryStore(open_database(f"sqlite:///{directory}/mill.db"), objects)
    config = GatewayConfig(health_interval_s=0.02)
    endpoints = [EngineEndpoint(engine, "home")]
    app = make_app(
        config,
        CompactFormat(tokenizer),
        tokenizer,
        endpoints,
        trajectories,
        objects,
        directory / "gateway",
        ADMIN,
        LIVE,
    )
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
