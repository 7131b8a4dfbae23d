"""Serves the home store over HTTP, read-only, to the other regions."""

from __future__ import annotations

from aiohttp import web

from rollmill.runs.run import RunDirectory
from rollmill.runs.trust import server_tls
from rollmill.storage.object_server import object_app


def main(run: RunDirectory) -> None:
    app = object_app(run.objects(), run.secrets["store_token"])
    web.run_app(
        app,
        host="127.0.0.1",
        port=run.ports["store"],
        access_log=None,
        print=None,
        shutdown_timeout=1.0,
        ssl_context=server_tls(run),
    )
