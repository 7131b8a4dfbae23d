"""Ports of a machine on another host (`Machine.listen`): its programs' connections arrive at a socket of the client.

    client → host   GET /machines/ID/listen          a WebSocket. The host opens a port in the machine and says which:
                                                     {"port"}, or {"errno", "message"}, or {"failed"}. Then, for each
                                                     connection of a program: {"connection": number}
    client → host   GET /machines/ID/connections/N   a WebSocket with the bytes of that connection, both ways; an empty
                                                     message is the end of one direction

The port is open as long as the first WebSocket is.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web

from rollmill.errors import MachineError
from rollmill.machines.listener import Listener, connect, make_listener
from rollmill.machines.remote.service import Lent

_CHUNK = 1 << 16
_HEARTBEAT_S = 20.0
_MOST = 256  # connections of one port at once; a program that wants more waits
_CLAIM_S = 30.0  # for the client to take a connection
CHANNEL: dict[str, Any] = {"heartbeat": _HEARTBEAT_S, "max_msg_size": 4 * _CHUNK}

WebSocket = web.WebSocketResponse | aiohttp.ClientWebSocketResponse


async def serve_port(request: web.Request, lent: Lent) -> web.WebSocketResponse:
    """On the host of the machine: open a port, and offer its connections until the client leaves."""
    channel = web.WebSocketResponse(**CHANNEL)
    await channel.prepare(request)
    try:
        listener, port = await lent.machine.listen()
    except OSError as error:
        await channel.send_json({"errno": error.errno or errno.EIO, "message": str(error.strerror)})
        return channel
    except MachineError as error:
        await channel.send_json({"failed": error.message})
        return channel
    listener.setblocking(False)
    with contextlib.closing(listener):
        await channel.send_json({"port": port})
        offering = asyncio.create_task(_offer(listener, channel, lent))
        try:
            async for _ in channel:  # the client has nothing to say; it only closes
                pass
        finally:
            offering.cancel()
            await asyncio.wait([offering])
    return channel


async def _offer(listener: socket.socket, channel: web.WebSocketResponse, lent: Lent) -> None:
    loop = asyncio.get_running_loop()
    while True:
        connection, _ = await loop.sock_accept(listener)
        if len(lent.connections) >= _MOST:
            connection.close()
            continue
        connection.setblocking(False)
        number = lent.number()
        lent.connections[number] = connection
        loop.call_later(_CLAIM_S, _forget, lent, number, connection)
        await channel.send_json({"connection": number})


def _forget(lent: Lent, number: int, connection: socket.socket) -> None:
    """Nobody has claimed it."""
    if lent.connections.get(number) is connection:
        lent.connections.pop(number).close()


async def serve_connection(request: web.Request, lent: Lent) -> web.WebSocketResponse:
    """On the host of the machine: carry one connection. KeyError: there is no such."""
    connection = lent.connections.pop(int(request.match_info["number"]))
    channel = web.WebSocketResponse(**CHANNEL)
    try:
        await channel.prepare(request)
        await _carry(channel, connection)
    finally:
        connection.close()
    return channel


class RemotePort:
    """The client's end of a port."""

    def __init__(self, open_channel: Callable[[str], Awaitable[aiohttp.ClientWebSocketResponse]]) -> None:
        self._open = open_channel
        self._channel: aiohttp.ClientWebSocketResponse | None = None
        self._name = -1  # the open file by which the owner's socket is found
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> tuple[Listener, int]:
        """OSError or MachineError as `Machine.listen`."""
        self._channel = channel = await self._open("listen")
        try:
            said = await channel.receive_json(timeout=60.0)
            if "errno" in said:
                raise OSError(int(said["errno"]), str(said.get("message")))
            port = said.get("port")
            if not isinstance(port, int) or not 0 < port < 1 << 16:
                raise MachineError(f"the host opens no port: {str(said.get('failed'))[:500]}")
        except (TypeError, ValueError, AttributeError, TimeoutError) as error:
            await channel.close()
            raise MachineError(f"the host answered nonsense to a request for a port: {error!r}") from None
        except BaseException:
            await channel.close()
            raise
        listener, self._name = make_listener()
        listener.on_close = self._stop
        self._begin(self._accept(channel))
        return listener, port

    async def close(self) -> None:
        """End the port and its connections. Safe to repeat."""
        tasks = list(self._tasks)
        self._stop()
        if tasks:
            await asyncio.wait(tasks)

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, channel: aiohttp.ClientWebSocketResponse) -> None:
        try:
            async for message in channel:
                number = message.json().get("connection") if message.type is aiohttp.WSMsgType.TEXT else None
                if isinstance(number, int) and len(self._tasks) <= _MOST:
                    self._begin(self._carry(number))
        except (ValueError, AttributeError):  # the host talks nonsense: no port any more
            pass
        finally:
            os.close(self._name)
            self._name = -1
            await channel.close()

    async def _carry(self, number: int) -> None:
        connection = connect(self._name) if self._name >= 0 else None
        with contextlib.suppress(MachineError, OSError, aiohttp.ClientError):
            channel = await self._open(f"connections/{number}")
            if connection is None:  # the owner has closed its socket: so the program finds its connection closed
                await channel.close()
            else:
                await _carry(channel, connection)
        if connection is not None:
            connection.close()


async def _carry(channel: WebSocket, connection: socket.socket) -> None:
    """Carry bytes both ways until both directions have ended, or one side has gone."""
    both = [asyncio.create_task(_send(channel, connection)), asyncio.create_task(_receive(channel, connection))]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for each in both:
            each.cancel()
        await asyncio.gather(*both, return_exceptions=True)
        await channel.close()


async def _send(channel: WebSocket, connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(connection, _CHUNK):
        await channel.send_bytes(data)
    await channel.send_bytes(b"")


async def _receive(channel: WebSocket, connection: socket.socket) -> None:
    """Raises ConnectionResetError if the other side goes before it has ended its direction."""
    loop = asyncio.get_running_loop()
    async for message in channel:
        if message.type is not aiohttp.WSMsgType.BINARY:
            break
        if not message.data:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            return
        await loop.sock_sendall(connection, message.data)
    raise ConnectionResetError("the other side has gone")
