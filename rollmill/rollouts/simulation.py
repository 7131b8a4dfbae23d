"""SIMULATION, for benchmarks: machines whose commands take as long as in a larger repository.

Tests of a micro-repository run in milliseconds. To measure asynchronous training with slow tools, each command also
waits a time drawn from a recorded distribution. Only the waiting is simulated; the commands run.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollmill.machines.file_trees import pack_tree
from rollmill.machines.machine import (
    Capabilities,
    ExecResult,
    Machine,
    MachineHost,
    Process,
    Snapshot,
    expect,
    export,
    release,
    slowdown,
)


class SlowMachine:
    def __init__(self, machine: Machine, seconds: Sequence[float], draw: random.Random) -> None:
        self._machine = machine
        self._seconds = seconds
        self._draw = draw
        self.capabilities: Capabilities = machine.capabilities
        self.image = machine.image

    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        simulated = self._draw.choice(self._seconds)
        await asyncio.sleep(simulated)
        result = await self._machine.exec(argv, **options)
        return replace(result, seconds=result.seconds + simulated)  # the command took it, nobody waited

    async def start(self, argv: Sequence[str], **options: Any) -> Process:
        return await self._machine.start(argv, **options)

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        return await self._machine.read(path, max_bytes=max_bytes)

    async def write(self, path: str, data: bytes) -> None:
        await self._machine.write(path, data)

    async def pack(self, directory: str, *, max_bytes: int, timeout_s: float, whole: bool = True) -> bytes:
        return await pack_tree(self._machine, directory, max_bytes=max_bytes, timeout_s=timeout_s, whole=whole)

    async def listen(self) -> tuple[socket.socket, int]:
        return await self._machine.listen()

    async def snapshot(self) -> Snapshot:
        return await self._machine.snapshot()

    async def fork(self, count: int = 1) -> Sequence[Machine]:
        return [SlowMachine(each, self._seconds, self._draw) for each in await self._machine.fork(count)]

    async def pause(self) -> None:
        await self._machine.pause()

    async def resume(self) -> None:
        await self._machine.resume()

    async def close(self) -> None:
        await self._machine.close()


class SlowMachines:
    """A MachineHost whose machines are slow. Grading uses the fast host: only the policy's own commands wait."""

    def __init__(self, host: MachineHost, seconds: Sequence[float], seed: int) -> None:
        self._host = host
        self._seconds = seconds
        self._draw = random.Random(seed)

    async def create(
        self, image: str, files: Mapping[str, bytes] | None = None, *, snapshot: Snapshot | None = None
    ) -> Machine:
        return SlowMachine(await self._host.create(image, files, snapshot=snapshot), self._seconds, self._draw)

    def expect(self, image: str, count: int) -> None:
        expect(self._host, image, count)

    async def slowdown(self, image: str) -> float:
        return await slowdown(self._host, image)

    async def export(self, snapshot: Snapshot) -> Snapshot | None:
        return await export(self._host, snapshot)

    async def release(self, snapshot: Snapshot) -> None:
        await release(self._host, snapshot)

    async def close(self) -> None:
        await self._host.close()
