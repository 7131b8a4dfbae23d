"""HTTPS that a gateway asks: engines and other gateways must show a certificate that it trusts and that names them."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import ClientError, web

from rollmill.gateway.replicas import Gateways
from rollmill.gateway.routing.engine_http import EngineConnections
from rollmill.tls import client_context, server_context
from tests.gateway.serve import ADMIN
from tests.launch.test_tls import make_ca, trusted  # noqa: F401 - a fixture


@contextlib.asynccontextmanager
async def https(directory: Path, *, names: str = "127.0.0.1") -> AsyncIterator[str]:
    """A server that answers "yes". Its certificate is of the CA that is made in the directory."""
    make_ca(directory, names)

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="yes")

    app = web.Application()
    app.router.add_post("/generate", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    shown = server_context(str(directory / "host.pem"), str(directory / "host.key"))
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=shown).start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}/generate"
    finally:
        await runner.cleanup()


async def ask_engine(url: str) -> bytes:
    connections = EngineConnections(5.0)
    try:
        async with connections.post(url, b"{}", None) as answer:
            return await answer.read()
    finally:
        connections.close()


async def ask_gateway(url: str, trust: ssl.SSLContext | None) -> bytes:
    async with Gateways(0, [lambda: None] * 2, ADMIN, trust).client() as client, client.post(url) as response:
        return await response.read()


async def test_engines_and_gateways_need_a_certificate_that_is_trusted_and_names_them(
    tmp_path: Path,
    trusted: Callable[[Path], None],  # noqa: F811
) -> None:
    ours, other, misnamed = tmp_path / "ours", tmp_path / "other", tmp_path / "misnamed"
    async with https(ours) as url, https(other) as strange, https(misnamed, names="10.9.8.7") as elsewhere:
        with pytest.raises(ssl.SSLError):
            await ask_engine(url)  # no CA of the run is trusted yet
        for each in (strange, elsewhere):
            for directory in (ours, misnamed):
                trusted(directory)
                trust = client_context(str(directory / "ca.pem"))
                with pytest.raises(ssl.SSLError):
                    await ask_engine(each)
                with pytest.raises(ClientError):
                    await ask_gateway(each, trust)
        with pytest.raises(ClientError):
            await ask_gateway(url, None)
        trusted(ours)
        assert await ask_engine(url) == await ask_gateway(url, client_context(str(ours / "ca.pem"))) == b"yes"
