"""A connection into a Firecracker guest that outlives resets. Its owner keeps one socket; what is behind it changes.

Firecracker listens on a Unix socket: `CONNECT PORT` leads to a port of the guest, and is answered with `OK NUMBER`. It
closes all connections when a snapshot is taken or loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

from rollmill.errors import MachineError

_RETRY_S = 0.005
_LONGEST_ANSWER = 32


class Channel:
    def __init__(self) -> None:
        self.socket, self._inner = socket.socketpair()  # the first is the owner's
        for each in (self.socket, self._inner):
            each.setblocking(False)
        self._guest: socket.socket | None = None
        self._pumping: list[asyncio.Task[None]] = []

    async def connect(self, path: Path, port: int, *, within_s: float) -> None:
        """Connect to a port of the guest, once something listens there. MachineError: nothing does in time."""
        await self.disconnect()
        try:
            async with asyncio.timeout(within_s):
                while (guest := await _try(path, port)) is None:  # noqa: ASYNC110
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            raise MachineError(f"port {port} of the guest does not answer") from None
        self._guest = guest
        self._pumping = [
            asyncio.create_task(self._pump(self._inner, guest)),
            asyncio.create_task(self._pump(guest, self._inner)),
        ]

    @property
    def disconnected(self) -> bool:
        return self._guest is None

    async def disconnect(self) -> None:
        """Before a snapshot. The owner's socket stays."""
        pumping, self._pumping = self._pumping, []
        for task in pumping:
            task.cancel()
        if pumping:
            await asyncio.wait(pumping)
        if self._guest is not None:
            self._guest.close()
            self._guest = None

    async def close(self) -> None:
        await self.disconnect()
        self._inner.close()

    async def _pump(self, source: socket.socket, target: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(source, 1 << 16):
                await loop.sock_sendall(target, data)
        with contextlib.suppress(OSError):
            self._inner.shutdown(socket.SHUT_RDWR)  # the guest is gone: the owner reads an end of file


async def _try(path: Path, port: int) -> socket.socket | None:
    """A connection to the port; None if nobody listens yet."""
    loop = asyncio.get_running_loop()
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    answer = b""
    try:
        await loop.sock_connect(connection, str(path))
        await loop.sock_sendall(connection, b"CONNECT %d\n" % port)
        while not answer.endswith(b"\n") and len(answer) < _LONGEST_ANSWER:
            part = await loop.sock_recv(connection, 1)  # what follows the line is the guest's
            if not part:
                break
            answer += part
    except OSError:
        answer = b""
    except BaseException:
        connection.close()
        raise
    if answer.startswith(b"OK ") and answer.endswith(b"\n"):
        return connection
    connection.close()
    return None
