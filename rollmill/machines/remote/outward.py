"""Hosts of machines that connect outwards: behind a firewall or NAT nobody can reach them, so they reach the run.

    run's network                                   │   worker's network
    client.py ─► a loopback port per worker ─► Workers ◄── WebSocket, dialled by `offer` ──► service on loopback
                                                    │

A worker keeps a few connections waiting at the run. When the run needs one, it says so; the worker connects it to its
own service and dials another. Each carries one connection, so whatever speaks to a host of machines works unchanged.

Both sides need the key: to connect here at all, and in every request that the worker's service gets. The worker trusts
whoever answers at the URL it was given, so beyond one host that is https, with a certificate the worker can check.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from ssl import SSLContext
from typing import Any

import aiohttp
from aiohttp import web

from rollmill.backoff import Backoff
from rollmill.errors import ConfigError

log = logging.getLogger(__name__)
_WAITING = 4  # connections that a worker keeps waiting
_PATIENCE_S = 10.0  # for a busy worker to dial another connection
_AWAY_S = 3.0  # for a worker that has lost all its connections to dial again; then it is gone
_BEAT_S = 10.0  # both sides notice a connection that has silently gone
_MOST_WAITING, _MOST_WORKERS = 64, 10_000
_BYTES = 1 << 16
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_GO = "go"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Slot:
    """A connection that waits, and the connection it is to carry."""

    def __init__(self) -> None:
        self.taken: asyncio.Future[Streams] = asyncio.get_running_loop().create_future()
        self.done = asyncio.Event()


class Workers:
    """The run's side. `joined` is called with the URL of each new worker, on this host's loopback address."""

    def __init__(self, key: str, joined: Callable[[str], Awaitable[None]]) -> None:
        self._key = key.encode()
        self._joined = joined
        self._waiting: dict[str, asyncio.Queue[_Slot]] = {}  # by worker
        self._connected: Counter[str] = Counter()  # by worker
        self._left: dict[str, float] = {}  # by worker: when it lost its last connection
        self._local: list[asyncio.Server] = []
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, host: str, port: int, tls: SSLContext | None) -> None:
        app = web.Application()
        app.router.add_get("/workers", self.wait)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, ssl_context=tls).start()
        self.port = self._runner.addresses[0][1]

    async def wait(self, request: web.Request) -> web.StreamResponse:
        """A connection that a worker keeps waiting here. It carries one connection to the worker's service.

        Needs: the key; the name of the worker in X-Rollmill-Worker.
        Returns: a WebSocket: the word `go`, then the bytes of the connection as binary messages.
        """
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode(errors="replace")
        name = request.headers.get("X-Rollmill-Worker", "")
        if not hmac.compare_digest(given, self._key):
            raise web.HTTPUnauthorized(text="the key of the hosts of machines is needed: Authorization: Bearer KEY")
        if not _NAME.fullmatch(name) or (name not in self._waiting and len(self._waiting) >= _MOST_WORKERS):
            raise web.HTTPBadRequest(text="X-Rollmill-Worker must name the worker")
        connection = web.WebSocketResponse(heartbeat=_BEAT_S, max_msg_size=1 << 20)
        await connection.prepare(request)
        if name not in self._waiting:
            self._waiting[name] = asyncio.Queue(_MOST_WAITING)
            await self._open(name)
        slot = _Slot()
        self._connected[name] += 1
        try:
            self._drop_gone(name)
            with contextlib.suppress(asyncio.QueueFull):
                self._waiting[name].put_nowait(slot)
                await self._serve(connection, slot)
        finally:
            self._connected[name] -= 1
            self._left[name] = time.monotonic()
        await connection.close()
        return connection

    def _drop_gone(self, name: str) -> None:
        """Drop the slots of connections that ended while they waited: they would take the places of others."""
        queue = self._waiting[name]
        for _ in range(queue.qsize()):
            slot = queue.get_nowait()
            if not slot.taken.done():
                queue.put_nowait(slot)

    async def _serve(self, connection: web.WebSocketResponse, slot: _Slot) -> None:
        """Wait until the connection is needed, and then carry. While it waits, only its end is of interest."""
        ending = asyncio.create_task(connection.receive())
        try:
            either: list[asyncio.Future[Any]] = [ending, slot.taken]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            await asyncio.wait([ending])
            if slot.taken.done() and ending.cancelled():
                await connection.send_str(_GO)
                await pump(connection, *slot.taken.result())
        finally:
            ending.cancel()
            slot.taken.cancel()  # without effect if it was taken
            slot.done.set()

    def _patience_s(self, name: str) -> float:
        """How long to wait for a connection of a worker."""
        away_s = time.monotonic() - self._left.get(name, time.monotonic())
        return _PATIENCE_S if self._connected[name] else max(_AWAY_S - away_s, 0.0)

    async def close(self) -> None:
        for server in self._local:
            server.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _open(self, name: str) -> None:
        """Give a new worker a port on loopback."""

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                async with asyncio.timeout(self._patience_s(name)):
                    slot = await self._waiting[name].get()
                    while slot.taken.done():  # its connection has gone while it waited
                        slot = await self._waiting[name].get()
                slot.taken.set_result((reader, writer))
                await slot.done.wait()
            except TimeoutError:
                log.info("the worker %s has no connection waiting", name)
            finally:
                writer.close()

        server = await asyncio.start_server(carry, "127.0.0.1", 0)
        self._local.append(server)
        await self._joined(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


async def offer(url: str, key: str, port: int, *, name: str | None = None) -> None:
    """The worker's side: keep connections waiting at `url` for the service on a loopback port. Runs until cancelled."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no URL of a run's machines", hint="for example https://10.0.0.7:8900")
    headers = {"Authorization": f"Bearer {key}", "X-Rollmill-Worker": name or f"worker-{secrets.token_hex(6)}"}
    told = ""  # the last problem: said once, not at each of many attempts
    async with aiohttp.ClientSession(headers=headers) as session, asyncio.TaskGroup() as tasks:

        async def keep_one() -> None:
            nonlocal told
            backoff, replaced = Backoff(0.1, 10.0, jitter=0.5), False
            while True:
                try:
                    async with session.ws_connect(f"{url.rstrip('/')}/workers", heartbeat=_BEAT_S) as connection:
                        began, told = time.monotonic(), ""
                        message = await connection.receive()
                        if time.monotonic() - began > _BEAT_S:  # it was wanted: one that is refused ends at once
                            backoff.reset()
                        if message.type == aiohttp.WSMsgType.TEXT and message.data == _GO:
                            replaced = True
                            tasks.create_task(keep_one())  # waits in its place
                            await pump(connection, *await asyncio.open_connection("127.0.0.1", port))
                            return
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    if replaced:
                        log.warning("a connection of %s has ended: %r", url, error)
                        return
                    problem = str(error) or type(error).__name__
                    if problem != told:
                        log.warning("%s does not answer: %s; trying again", url, problem)
                    told = problem
                await asyncio.sleep(backoff.failed())

        for _ in range(_WAITING):
            tasks.create_task(keep_one())


async def pump(
    connection: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Carry bytes both ways until one side ends."""

    async def outwards() -> None:
        while data := await reader.read(_BYTES):
            await connection.send_bytes(data)

    async def inwards() -> None:
        async for message in connection:
            if message.type != aiohttp.WSMsgType.BINARY:
                return
            writer.write(message.data)
            await writer.drain()

    both = [asyncio.create_task(outwards()), asyncio.create_task(inwards())]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)
        writer.close()
        await connection.close()
