"""One machine of another host, and its processes, as the dispatcher sees them."""

from __future__ import annotations

import contextlib
import socket
from typing import Any, Protocol

import aiohttp

from rollmill.errors import MachineError
from rollmill.machines.framed_machine import Answer, FramedMachine
from rollmill.machines.guest import frames as wire
from rollmill.machines.host_choice import Place
from rollmill.machines.machine import Capabilities, Snapshot
from rollmill.machines.remote.ports import RemotePort

_ANSWERED: dict[str, tuple[str, type]] = {"snapshot": ("snapshot", str), "fork": ("machines", list)}


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


class RemoteMachine(FramedMachine):
    limits_told = (*FramedMachine.limits_told, "machine")

    def __init__(self, host: Home, place: Place, identifier: str, image: str, capabilities: Capabilities) -> None:
        self._host = host
        self.place = place
        self.id = identifier
        self.image = image
        self.capabilities = capabilities
        self._closed = False
        self._ports: list[RemotePort] = []

    async def request(
        self, header: dict[str, Any], body: bytes = b"", *, timeout_s: float = 0.0, max_body: int = wire.MAX_BODY
    ) -> Answer | None:
        path, frame = f"/machines/{self.id}/{header['op']}", wire.pack(header, body)
        reply, data = await self._host.ask(self.place, "POST", path, frame, timeout_s=timeout_s, max_body=max_body)
        try:
            return self.checked(header["op"], reply), data
        except wire.WireError as error:
            raise MachineError(f"the host {self.place.name} answered nonsense: {error}") from None

    async def listen(self) -> tuple[socket.socket, int]:
        port = RemotePort(lambda path: self._host.open_channel(self.place, f"/machines/{self.id}/{path}"))
        self._ports.append(port)
        return await port.listen()

    async def snapshot(self) -> Snapshot:
        return Snapshot(self.image, (self.place, str((await self._ask("snapshot", {}))["snapshot"])))

    async def fork(self, count: int = 1) -> list[RemoteMachine]:
        made = (await self._ask("fork", {"count": count}))["machines"]
        self.place.running += len(made)
        return [self._host.adopt(self.place, answer) for answer in made]

    async def prepare(self) -> None:
        await self._ask("prepare", {})

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

    async def _ask(self, operation: str, header: dict[str, Any]) -> dict[str, Any]:
        reply, _ = await self.request({"op": operation, **header}, max_body=0) or ({}, b"")
        wanted = _ANSWERED.get(operation)
        if wanted is not None and not isinstance(reply.get(wanted[0]), wanted[1]):
            raise MachineError(f"the host {self.place.name} answered nonsense to {operation!r}")
        return reply
