"""A machine of a pool: it is paused while nobody asks anything of it, and has a lease."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from rollmill.errors import MachineError, Overcommitted
from rollmill.machines.machine import Capabilities, ExecResult, Machine, Process, Snapshot
from rollmill.machines.pack_tree import pack_tree
from rollmill.machines.tool_turns import Turns

log = logging.getLogger(__name__)


class Owner(Protocol):
    """The pool."""

    async def fork(self, machine: Machine, count: int) -> Sequence[Machine]: ...

    def let_go(self, machine: PooledMachine) -> None: ...


class PooledMachine:
    """Every request goes to the machine itself; before it, the machine is resumed if it was paused here.

    A machine with a process of its own (`start`) or a port (`listen`) is not paused: something may be going on in it.
    """

    def __init__(self, pool: Owner, machine: Machine, pause_after_s: float, turns: Turns | None = None) -> None:
        """`turns`: it grades, in one of these."""
        self.capabilities: Capabilities = machine.capabilities
        self.image = machine.image
        self._pool = pool
        self._machine = machine
        self._turns = turns
        self._pause_after_s = pause_after_s if machine.capabilities.pause else 0.0  # 0: never
        self._switching = asyncio.Lock()  # pausing and resuming
        self._paused = False  # by this class, not by its user
        self._stays_awake = False
        self._users = 0  # requests in progress
        self._used_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._pausing: asyncio.Task[None] | None = None
        self._plan_pause()

    def beat(self) -> None:
        """The holder is alive and keeps the machine."""
        self._used_at = time.monotonic()

    def idle_s(self) -> float:
        """Seconds since the last request or beat; 0 while a request is in progress."""
        return 0.0 if self._users else time.monotonic() - self._used_at

    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        async with self._in_use() as machine:
            result = await machine.exec(argv, **options)
        if result.starved and self._turns is not None and not self._turns.alone:
            raise Overcommitted(
                "a command that grades got almost no processor time before its limit",
                hint="lower `rollouts.concurrency`, or give the machines processors of their own",
            )
        return result

    async def start(self, argv: Sequence[str], **options: Any) -> Process:
        async with self._in_use() as machine:
            self._stays_awake = True
            return await machine.start(argv, **options)

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        async with self._in_use() as machine:
            return await machine.read(path, max_bytes=max_bytes)

    async def pack(self, directory: str, *, max_bytes: int, timeout_s: float, whole: bool = True) -> bytes:
        async with self._in_use() as machine:
            return await pack_tree(machine, directory, max_bytes=max_bytes, timeout_s=timeout_s, whole=whole)

    async def write(self, path: str, data: bytes) -> None:
        async with self._in_use() as machine:
            await machine.write(path, data)

    async def listen(self) -> tuple[socket.socket, int]:
        async with self._in_use() as machine:
            self._stays_awake = True
            return await machine.listen()

    async def snapshot(self) -> Snapshot:
        async with self._in_use() as machine:
            return await machine.snapshot()

    async def fork(self, count: int = 1) -> Sequence[Machine]:
        async with self._in_use() as machine:
            return await self._pool.fork(machine, count)

    async def pause(self) -> None:
        async with self._in_use() as machine:
            self._stays_awake = True  # from now on its user decides
            await machine.pause()

    async def resume(self) -> None:
        await self._machine.resume()

    async def close(self) -> None:
        self._stays_awake = True
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._machine.close()
        finally:
            self._pool.let_go(self)

    @contextlib.asynccontextmanager
    async def _in_use(self) -> AsyncIterator[Machine]:
        self._users += 1
        if self._timer is not None:
            self._timer.cancel()
        try:
            async with self._switching:
                if self._paused:
                    self._paused = False
                    await self._machine.resume()
            yield self._machine
        finally:
            self._users -= 1
            self.beat()
            self._plan_pause()

    def _plan_pause(self) -> None:
        if self._pause_after_s and not self._users and not self._stays_awake:
            self._timer = asyncio.get_running_loop().call_later(self._pause_after_s, self._begin_pause)

    def _begin_pause(self) -> None:
        self._pausing = asyncio.create_task(self._pause())

    async def _pause(self) -> None:
        async with self._switching:
            if self._users or self._stays_awake:
                return
            try:
                await self._machine.pause()
                self._paused = True
            except (OSError, MachineError):  # the next request finds out more
                log.info("a machine could not be paused", exc_info=True)
