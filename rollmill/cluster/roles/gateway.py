"""The gateway: all clients reach the engines through it."""

from __future__ import annotations

from aiohttp import web

from rollmill.chat.formats.choice import format_of
from rollmill.chat.tokenizer import Tokenizer
from rollmill.cluster.run import RunDirectory
from rollmill.gateway.app import make_app
from rollmill.gateway.config import EngineEndpoint
from rollmill.gateway.keys import KeyStore
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.store import TrajectoryStore


def main(run: RunDirectory) -> None:
    tokenizer = Tokenizer.load(run.tokenizer)
    objects = Objects.open(run.home_store)
    database = open_database(run.database_url)
    app = make_app(
        run.config.gateway,
        format_of(tokenizer, tools_in_prompt=run.config.tools_in_prompt),
        tokenizer,
        [
            EngineEndpoint(run.url(f"engine-{region}"), region, run.secrets["engine_token"])
            for region in run.config.regions
        ],
        TrajectoryStore(database, objects),
        objects,
        run.path / "gateway",
        run.secrets["admin_token"],
        run.secrets["production_key"],
        KeyStore(database, run.id),
    )
    web.run_app(app, host=run.host, port=run.ports["gateway"], access_log=None, print=None, shutdown_timeout=1.0)
