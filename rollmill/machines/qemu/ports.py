"""The ports of a machine, on the host: what its programs connect to arrives at sockets of this process. asyncio.

For each connection in the guest (streams.py) this end connects to the owner's socket. That is a Unix socket whose name
is deleted at once, so nobody else can connect to it, and no file is left. Frames of a guest are not trusted: one that
makes no sense closes all its ports.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

from rollmill.machines.guest.frames import WireError
from rollmill.machines.listener import connect, make_listener
from rollmill.machines.qemu.streams import CLOSE, CONNECT, LISTEN, LISTENING, NUMBER, UNLISTEN, Streams


class Ports:
    """The ports of one machine. `connection` is this side's end of its virtio port; it is duplicated."""

    def __init__(self, connection: socket.socket, mark: bytes) -> None:
        self._port = os.dup(connection.fileno())
        self._streams = Streams(self._port, mark, self._control)
        self._names: dict[int, int] = {}  # number of a port → open file by which its socket is found
        self._asked: dict[int, asyncio.Future[int]] = {}
        self._last = 0
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._streams.fileno(), self._step)

    async def listen(self) -> tuple[socket.socket, int]:
        """OSError: the guest opens no port."""
        self._last += 1
        number = self._last
        listener, self._names[number] = make_listener()
        asked = self._asked[number] = self._loop.create_future()
        try:
            self._tell(LISTEN, number)
            port = await asked
        except BaseException:
            listener.close()
            self._forget(number)
            raise
        finally:
            self._asked.pop(number, None)
        listener.on_close = lambda: self._forget(number)
        return listener, port

    def close(self) -> None:
        """Close all connections. Safe to repeat."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._streams.fileno())
        self._streams.close()
        os.close(self._port)
        for number in list(self._names):
            os.close(self._names.pop(number))
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(ConnectionResetError("the machine has closed its ports"))

    def _forget(self, number: int) -> None:
        if number in self._names:
            os.close(self._names.pop(number))
            self._tell(UNLISTEN, number)

    def _tell(self, kind: int, number: int) -> None:
        if not self.closed:
            self._guarded(lambda: self._streams.send(kind, number))
            self._guarded(lambda: self._streams.flush())

    def _step(self) -> None:
        self._guarded(self._streams.step)

    def _guarded(self, work: Callable[[], Any]) -> None:
        """Whatever a guest sends, it breaks its own ports only."""
        if self.closed:
            return
        try:
            work()
        except (OSError, WireError, struct.error):
            self.close()

    def _control(self, kind: int, number: int, data: bytes) -> None:
        (value,) = NUMBER.unpack(data)
        if kind == LISTENING:
            asked = self._asked.get(number)
            if asked is None or asked.done():
                return
            if 0 < value < 1 << 16:
                asked.set_result(value)
            else:
                asked.set_exception(OSError("the machine has no port left"))
        elif kind == CONNECT:
            connection = self._connect(value)
            if connection is None:
                self._streams.send(CLOSE, number)
            else:
                self._streams.add(number, connection)
        else:
            raise WireError(f"a frame of kind {kind}")

    def _connect(self, number: int) -> socket.socket | None:
        """A connection to the owner of a port; None if the owner closed it or cannot keep up."""
        name = self._names.get(number)
        if name is None or self._streams.full:
            return None
        return connect(name)
