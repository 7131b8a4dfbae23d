"""One machine of another host, and its processes, as the dispatcher sees them."""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any, Protocol

import aiohttp

from rollmill.errors import MachineError
from rollmill.machines.guest import frames as wire
from rollmill.machines.host_choice import Place
from rollmill.machines.machine import Capabilities, ExecResult, Order, ProcessState, Snapshot, longest
from rollmill.machines.remote.ports import RemotePort

_ANSWERED: dict[str, tuple[str, type]] = {
    "start": ("process", int),
    "snapshot": ("snapshot", str),
    "fork": ("machines", list),
}
_NOTE = 64  # bytes of the line that replaces the middle of a long output
_STOPPED = (None, "time", "memory", "processes", "machine")


class HostLost(MachineError):
    """A host of machines does not answer, or has forgotten a machine."""


class Home(Protocol):
    """What a machine needs of the client that has it."""

    def adopt(self, place: Place, answer: dict[str, Any]) -> RemoteMachine: ...
    def ended(self, machine: RemoteMachine) -> None: ...
    async def ask(
        self, place: Place, method: str, path: str, frame: bytes, *, timeout_s: float, max_body: int = 0
    ) -> tuple[dict[str, Any], bytes]: ...
    async def open_channel(self, place: Place, path: str) -> aiohttp.ClientWebSocketResponse: ...


class RemoteMachine:
    """One machine of another host."""

    def __init__(self, host: Home, place: Place, identifier: str, image: str, capabilities: Capabilities) -> None:
        self._host = host
        self.place = place
        self.id = identifier
        self.image = image
        self.capabilities = capabilities
        self._closed = False
        self._ports: list[RemotePort] = []

    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        order, began = Order(argv, **options), time.monotonic()
        reply, output = await self._ask(
            "exec", order.header(), order.stdin, timeout_s=longest(order.timeout_s), max_body=order.max_output + _NOTE
        )
        try:
            if reply["stopped"] not in _STOPPED or not math.isfinite(float(reply["seconds"])):
                raise ValueError
            return ExecResult(
                exit_code=int(reply["exit_code"]),
                output=output,
                truncated=bool(reply["truncated"]),
                stopped=reply["stopped"],
                seconds=min(max(float(reply["seconds"]), 0.0), time.monotonic() - began),
                starved=reply.get("starved") is True,
            )
        except (KeyError, TypeError, ValueError):
            raise MachineError(f"the host {self.place.name} answered nonsense to a command") from None

    async def start(self, argv: Sequence[str], **options: Any) -> RemoteProcess:
        order = Order(argv, **options)
        reply, _ = await self._ask("start", order.header(), order.stdin)
        return RemoteProcess(self, reply["process"], order.max_output)

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        return (await self._ask("read", {"path": path, "max_bytes": max_bytes}, max_body=max_bytes))[1]

    async def pack(self, directory: str, *, max_bytes: int, timeout_s: float, whole: bool = True) -> bytes:
        header = {"path": directory, "max_bytes": max_bytes, "timeout_s": timeout_s, "whole": whole}
        return (await self._ask("pack", header, timeout_s=timeout_s, max_body=wire.MAX_BODY))[1]

    async def write(self, path: str, data: bytes) -> None:
        await self._ask("write", {"path": path}, data)

    async def listen(self) -> tuple[socket.socket, int]:
        port = RemotePort(lambda path: self._host.open_channel(self.place, f"/machines/{self.id}/{path}"))
        self._ports.append(port)
        return await port.listen()

    async def snapshot(self) -> Snapshot:
        reply, _ = await self._ask("snapshot", {})
        return Snapshot(self.image, (self.place, str(reply["snapshot"])))

    async def fork(self, count: int = 1) -> list[RemoteMachine]:
        reply, _ = await self._ask("fork", {"count": count})
        self.place.running += len(reply["machines"])
        return [self._host.adopt(self.place, answer) for answer in reply["machines"]]

    async def pause(self) -> None:
        await self._ask("pause", {})

    async def resume(self) -> None:
        await self._ask("resume", {})

    async def close(self) -> None:
        """End the machine. If its host does not answer, its lease ends it."""
        if self._closed:
            return
        self._closed = True
        for port in self._ports:
            await port.close()
        try:
            with contextlib.suppress(HostLost):
                await self._host.ask(self.place, "DELETE", f"/machines/{self.id}", b"", timeout_s=0.0)
        finally:
            self._host.ended(self)

    async def _ask(
        self, operation: str, header: dict[str, Any], body: bytes = b"", *, timeout_s: float = 0.0, max_body: int = 0
    ) -> tuple[dict[str, Any], bytes]:
        path, frame = f"/machines/{self.id}/{operation}", wire.pack(header, body)
        reply, data = await self._host.ask(self.place, "POST", path, frame, timeout_s=timeout_s, max_body=max_body)
        wanted = _ANSWERED.get(operation)
        if wanted is not None and not isinstance(reply.get(wanted[0]), wanted[1]):
            raise MachineError(f"the host {self.place.name} answered nonsense to {operation!r}")
        return reply, data


class RemoteProcess:
    def __init__(self, machine: RemoteMachine, number: int, max_output: int) -> None:
        self._machine, self._number, self._max = machine, number, max_output

    async def state(self) -> ProcessState:
        return await self._look("state")

    async def stop(self) -> ProcessState:
        return await self._look("stop")

    async def write(self, data: bytes) -> None:
        while data:  # a host answers after a few seconds, also if the program reads nothing
            reply, _ = await self._machine._ask("input", {"process": self._number}, data)
            count = reply.get("count", len(data))
            if not isinstance(count, int) or not 0 <= count <= len(data):
                raise MachineError(f"the host {self._machine.place.name} answered nonsense to 'input'")
            data = data[count:]

    async def resize(self, rows: int, columns: int) -> None:
        await self._machine._ask("resize", {"process": self._number, "rows": rows, "columns": columns})

    async def _look(self, operation: str) -> ProcessState:
        header = {"process": self._number}
        reply, output = await self._machine._ask(operation, header, max_body=self._max + _NOTE)
        code = reply["exit_code"]
        ended = -signal.SIGKILL if code is None and reply["stopped"] else code
        return ProcessState(ended, output, bool(reply["truncated"]), reply["stopped"])
