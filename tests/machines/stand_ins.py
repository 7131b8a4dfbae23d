"""Machines and hosts that are none: what a test does not replace fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollmill.machines.machine import Capabilities, ExecResult, Machine, MachineHost, Snapshot


class StandInMachine(Machine):
    capabilities = Capabilities(kernel="shared", snapshot="none")
    image = "stand-in"

    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        raise AssertionError("no test runs a command here")

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        raise AssertionError("no test reads here")

    async def write(self, path: str, data: bytes) -> None:
        raise AssertionError("no test writes here")

    async def close(self) -> None: ...


class StandInHost(MachineHost):
    """Its machines are those of another host."""

    host: MachineHost

    async def create(
        self, image: str, files: Mapping[str, bytes] | None = None, *, snapshot: Snapshot | None = None
    ) -> Machine:
        return await self.host.create(image, files, snapshot=snapshot)

    async def close(self) -> None: ...
