"""A connection to a host that is gone ends by itself."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollmill.keepalive import keepalive_connector


async def test_connections_ask_whether_the_other_host_is_there() -> None:
    """A host cannot be cut off here, so this reads what the kernel was told about a real connection."""
    seen = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"begun")
        await seen.wait()
        return response

    app = web.Application()
    app.router.add_get("/", answer)
    async with TestServer(app) as server, aiohttp.ClientSession(connector=keepalive_connector()) as client:
        async with client.get(server.make_url("/")) as response:
            assert response.connection is not None and response.connection.transport is not None
            opened = response.connection.transport.get_extra_info("socket")
            assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle, interval, probes = (
                opened.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
                for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
            )
            assert idle + interval * probes == 30
            seen.set()
