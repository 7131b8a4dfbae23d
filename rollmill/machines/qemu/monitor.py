"""QEMU's monitor (QMP): one command after the other, as JSON lines. Events are dropped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

from rollmill.errors import MachineError

_ANSWER_S = 60.0
_POLL_S = 0.002


class Monitor:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = asyncio.Lock()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._number = 0  # of the latest command: an answer whose caller was cancelled is not taken for another

    async def start(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=self._connection)
        async with asyncio.timeout(_ANSWER_S):
            await self._receive("QMP")
        await self.ask("qmp_capabilities")

    async def ask(self, command: str, **arguments: Any) -> Any:
        """The result of a command. MachineError if QEMU refuses it, ConnectionError if it is gone."""
        if self._writer is None:
            raise ConnectionResetError("QEMU's monitor is closed")
        async with self._lock, asyncio.timeout(_ANSWER_S):
            self._number += 1
            message = {"execute": command, "arguments": arguments, "id": self._number}
            self._writer.write(json.dumps(message).encode() + b"\n")
            await self._writer.drain()
            return await self._receive("return", command)

    async def wait_while(self, status: str) -> None:
        """Return once QEMU's status is another."""
        while True:
            if (await self.ask("query-status"))["status"] != status:
                return
            await asyncio.sleep(_POLL_S)

    async def _receive(self, key: str, command: str = "") -> Any:
        assert self._reader is not None
        while True:
            line = await self._reader.readline()
            if not line.endswith(b"\n"):
                raise ConnectionResetError("QEMU closed its monitor")
            message = json.loads(line)
            if key != "QMP" and message.get("id") != self._number:
                continue
            if "error" in message:
                raise MachineError(f"QEMU refuses {command!r}: {message['error'].get('desc')}")
            if key in message:
                return message[key]

    async def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            self._connection.close()
            return
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
