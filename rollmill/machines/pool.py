"""Pool: around any kind of machine. Starts only what the host can bear, and has machines ready before they are needed.

    create   hands out a machine that is ready, else starts one. Waits for a place; NoCapacity if none comes free
    grading  the same pool for machines that grade: they have a queue of their own, which goes first. Each of them ends
             what an episode began, and there are only as many as episodes were played, so episodes get their turn.
             A command of theirs that others kept from the processor is no result: its grading is repeated alone
    expect   this many machines of an image will be needed soon: `tend` starts them ahead, and pauses them
    tend     a task: starts what is expected, closes what nobody took, and machines whose lease is over

    starting ─► ready (paused, here) ─► in use ─► closed
                                        in use ◄─► paused: no request for `pause_after_s`

A place is a machine in any of these states but the last. What ends all machines when this process is killed is the
matter of their kind: the pool keeps nothing outside of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from rollmill.config import Config
from rollmill.errors import MachineError, NoCapacity, Overcommitted, TaskError
from rollmill.machines.machine import ExecResult, Machine, MachineHost, MachineWrapper, Process, Snapshot

log = logging.getLogger(__name__)
_START_MB = 64  # a machine that starts takes about this much, which the host's memory does not show yet
_LOOK_S = 0.1  # between two looks for a place
_TEND_S = 1.0
_KEEP_READY_S = 120.0  # a machine that nobody took in this time is not needed
_MEMORY = Path("/proc/meminfo")
_PRESSURE = Path("/proc/pressure/memory")


class PoolConfig(Config):
    """Settings of the pool of machines."""

    most: int | None = Field(
        None, ge=1, description="Most machines at once. Not set: only the host's memory and memory pressure limit them."
    )
    reserve_mb: int = Field(
        256, ge=0, description="Memory in MiB that must stay free. No machine starts while the host has less available."
    )
    most_pressure: float = Field(
        40.0,
        gt=0,
        le=100,
        description="No machine starts while programs of this host wait for memory in more than this share of the "
        "time, in percent, as the kernel measures it over 10 seconds.",
    )
    patience_s: float = Field(
        45.0, gt=0, description="Seconds that a request for a machine waits for a place before it fails."
    )
    ahead: int = Field(
        8,
        ge=0,
        description="Most machines of an image that are started before they are needed, of kinds that can be paused. "
        "More shorten the start of a large group and take memory; 0 starts none ahead.",
    )
    pause_after_s: float = Field(
        2.0,
        ge=0,
        description="A machine without a request for this many seconds is paused until the next one, if its kind can: "
        "during a long answer of the model it takes no processor time. 0: never.",
    )
    lease_s: float | None = Field(
        None,
        gt=0,
        description="A machine whose holder neither uses it nor calls `beat` for this many seconds is closed. Not set: "
        "machines live until they are closed.",
    )


class Pool(MachineHost):
    """A host around another one. One per event loop."""

    def __init__(self, host: MachineHost, config: PoolConfig | None = None) -> None:
        self.config = config or PoolConfig()
        self._host = host
        self._turn = asyncio.Lock()  # requests get places in the order in which they came,
        self._grading_turn = asyncio.Lock()  # those of grading before all others
        self._grading_waits = 0
        self.turns = GradingTurns()
        self._starting = 0
        self._held: set[PooledMachine] = set()  # in use
        self._ready: dict[str, list[tuple[float, Machine]]] = {}  # by image; with the time since when
        self._expected: dict[str, int] = {}  # by image
        self._pausable: set[str] = set()  # images whose machines can be paused
        self._closed_at: list[float] = []  # the latest few
        self._tending: asyncio.Task[None] | None = None
        self._look = asyncio.Event()  # there is something to tend

    async def create(
        self,
        image: str,
        files: Mapping[str, bytes] | None = None,
        *,
        snapshot: Snapshot | None = None,
        grading: bool = False,
    ) -> PooledMachine:
        if self._tending is None:
            self._tending = asyncio.create_task(self._tend())
        machine = await self._take(image, files or {}) if snapshot is None else None
        if machine is None:
            async with self._place(grading):
                machine = await self._host.create(image, files, snapshot=snapshot)
        if machine.capabilities.pause:
            self._pausable.add(image)
        return self._hold(machine, self.turns if grading else None)

    async def fork(self, machine: Machine, count: int) -> list[PooledMachine]:
        async with contextlib.AsyncExitStack() as places:
            for _ in range(count):
                await places.enter_async_context(self._place(grading=False))
            return [self._hold(each) for each in await machine.fork(count)]

    def grading(self) -> GradingPool:
        return GradingPool(self)

    def expect(self, image: str, count: int) -> None:
        self._expected[image] = min(count, self.config.ahead)
        self._look.set()

    def let_go(self, machine: PooledMachine) -> None:
        """It is closed."""
        if machine in self._held:
            self._held.discard(machine)
            self._closed_at = [*self._closed_at[-7:], time.monotonic()]
            self._look.set()

    async def slowdown(self, image: str) -> float:
        return await self._host.slowdown(image)

    async def export(self, snapshot: Snapshot) -> Snapshot | None:
        return await self._host.export(snapshot)

    async def release(self, snapshot: Snapshot) -> None:
        await self._host.release(snapshot)

    async def close(self) -> None:
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.wait([self._tending])
        self._expected.clear()
        while await self._drop_one():
            pass
        await self._host.close()

    @property
    def counts(self) -> dict[str, int]:
        """How many machines are in which state."""
        ready = sum(map(len, self._ready.values()))
        return {"starting": self._starting, "ready": ready, "in_use": len(self._held)}

    def _hold(self, machine: Machine, turns: GradingTurns | None = None) -> PooledMachine:
        pooled = PooledMachine(self, machine, self.config.pause_after_s, turns)
        self._held.add(pooled)
        return pooled

    @contextlib.asynccontextmanager
    async def _place(self, grading: bool) -> AsyncIterator[None]:
        """Wait for a place, and count it as starting. A machine that is only ready gives way."""
        why: str | None = None
        self._grading_waits += grading
        try:
            async with (
                asyncio.timeout(self.config.patience_s) as limit,
                self._grading_turn if grading else self._turn,
            ):
                while (why := self._full(grading)) is not None:
                    if not await self._drop_one():
                        await asyncio.sleep(_LOOK_S)
                self._starting += 1
        except TimeoutError:
            if not limit.expired():
                raise
            raise NoCapacity(
                f"no machine can start: {why or 'others wait for a place before this one'}",
                retry_after_s=self._retry_after_s(),
                hint="lower `rollouts.concurrency` (episodes that run) or `rollouts.grading_concurrency` (those that "
                "are graded), or see [pool]",
            ) from None
        finally:
            self._grading_waits -= grading
        try:
            yield
        finally:
            self._starting -= 1

    def _full(self, grading: bool = False) -> str | None:
        """Why no machine can start now; None if one can."""
        counts, config = self.counts, self.config
        if self._grading_waits and not grading:
            return "machines that grade wait for a place before this one"
        if config.most is not None and sum(counts.values()) >= config.most:
            return f"{sum(counts.values())} machines are there (pool.most is {config.most})"
        available = _available_mb()
        if available is not None and available - self._starting * _START_MB < config.reserve_mb:
            return f"{available} MiB of memory are available (pool.reserve_mb is {config.reserve_mb})"
        pressure = _pressure()
        if pressure > config.most_pressure and counts["in_use"]:  # waiting helps only if a machine may close
            return f"memory pressure is {pressure:.0f} % (pool.most_pressure is {config.most_pressure:g})"
        return None

    def _retry_after_s(self) -> float:
        """About when the next machine closes, going by the latest ones."""
        if len(self._closed_at) < 2:
            return self.config.patience_s
        mean = (time.monotonic() - self._closed_at[0]) / len(self._closed_at)
        return min(max(1.0, mean), 600.0)

    async def _take(self, image: str, files: Mapping[str, bytes]) -> Machine | None:
        """A machine that is ready, with `files`. One that does not go on is closed."""
        while ready := self._ready.get(image):
            _, machine = ready.pop()
            self._starting += 1
            try:
                await machine.resume()
                await machine.write_all(files)  # also without files: the answer says that the machine is well
                self._look.set()
                return machine
            except (OSError, MachineError, TaskError):  # if the files are the reason, a new machine will say so
                await machine.close()
            except BaseException:
                await machine.close()
                raise
            finally:
                self._starting -= 1
        return None

    async def _tend(self) -> None:
        while True:
            self._look.clear()
            try:
                await self._close_abandoned()
                await self._start_expected()
            except (OSError, MachineError, TaskError):
                log.warning("machines could not be started ahead", exc_info=True)
                self._expected.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TEND_S):  # not wait_for: Python 3.11's may swallow a cancellation
                    await self._look.wait()

    async def _start_expected(self) -> None:
        for image, count in list(self._expected.items()):
            ready = self._ready.setdefault(image, [])
            while image in self._pausable and len(ready) < count and not self._turn.locked() and self._full() is None:
                ready.append((time.monotonic(), await self._start_ahead(image)))

    async def _start_ahead(self, image: str) -> Machine:
        """A machine that has run a command, so the first one of its user finds everything warm; paused."""
        self._starting += 1
        try:
            machine = await self._host.create(image)
            try:
                await machine.exec(["true"], timeout_s=60.0)
                await machine.prepare()
                await machine.pause()
            except BaseException:
                await machine.close()
                raise
        finally:
            self._starting -= 1
        return machine

    async def _close_abandoned(self) -> None:
        now = time.monotonic()
        for image, ready in self._ready.items():
            if ready and now - ready[0][0] > _KEEP_READY_S:
                self._expected.pop(image, None)
                await ready.pop(0)[1].close()
        for machine in [each for each in self._held if each.idle_s() > (self.config.lease_s or float("inf"))]:
            log.warning("a machine of %s is closed: its lease is over", machine.image)
            await machine.close()

    async def _drop_one(self) -> bool:
        """Close a machine that is only ready. Returns whether there was one."""
        for ready in self._ready.values():
            if ready:
                await ready.pop(0)[1].close()
                return True
        return False


class GradingPool(MachineHost):
    """A pool as those see it who create machines to grade in. Closed by the pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def create(
        self, image: str, files: Mapping[str, bytes] | None = None, *, snapshot: Snapshot | None = None
    ) -> PooledMachine:
        return await self._pool.create(image, files, snapshot=snapshot, grading=True)

    async def slowdown(self, image: str) -> float:
        return await self._pool.slowdown(image)

    async def export(self, snapshot: Snapshot) -> Snapshot | None:
        return await self._pool.export(snapshot)

    async def release(self, snapshot: Snapshot) -> None:
        await self._pool.release(snapshot)

    def turn(self, *, alone: bool) -> contextlib.AbstractAsyncContextManager[None]:
        return self._pool.turns.take(alone=alone)

    async def close(self) -> None: ...


class GradingTurns:
    """Many gradings at once, or one alone, when a time-out on a busy host has to be repeated."""

    def __init__(self) -> None:
        self.alone = False  # the grading that has its turn is the only one
        self._changed = asyncio.Condition()
        self._together = 0
        self._want_alone = 0

    @contextlib.asynccontextmanager
    async def take(self, *, alone: bool) -> AsyncIterator[None]:
        await (self._begin_alone() if alone else self._begin())
        try:
            yield
        finally:
            async with self._changed:
                self.alone = False
                self._together -= not alone
                self._changed.notify_all()

    async def _begin(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self.alone and not self._want_alone)
            self._together += 1

    async def _begin_alone(self) -> None:
        async with self._changed:
            self._want_alone += 1
            try:
                await self._changed.wait_for(lambda: not self.alone and not self._together)
                self.alone = True
            finally:
                self._want_alone -= 1
                self._changed.notify_all()


class PooledMachine(MachineWrapper):
    """It is paused while nobody asks anything of it, and has a lease. Before a request it is resumed.

    A machine with a process of its own (`start`) or a port (`listen`) is not paused: something may be going on in it.
    """

    def __init__(self, pool: Pool, machine: Machine, pause_after_s: float, turns: GradingTurns | None = None) -> None:
        """`turns`: it grades, in one of these."""
        super().__init__(machine)
        self._pool = pool
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
        result = await super().exec(argv, **options)
        if result.starved and self._turns is not None and not self._turns.alone:
            raise Overcommitted(
                "a command that grades got almost no processor time before its limit",
                hint="lower `rollouts.concurrency`, or give the machines processors of their own",
            )
        return result

    async def start(self, argv: Sequence[str], **options: Any) -> Process:
        self._stays_awake = True
        return await super().start(argv, **options)

    async def listen(self) -> tuple[socket.socket, int]:
        self._stays_awake = True
        return await super().listen()

    async def fork(self, count: int = 1) -> Sequence[Machine]:
        async with self._in_use() as machine:
            return await self._pool.fork(machine, count)

    async def pause(self) -> None:
        self._stays_awake = True  # from now on its user decides
        await super().pause()

    async def close(self) -> None:
        self._stays_awake = True
        if self._timer is not None:
            self._timer.cancel()
        try:
            await super().close()
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


def _available_mb() -> int | None:
    """Memory that programs of this host can still get, in MiB; None if the kernel does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in _MEMORY.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) >> 10
    return None


def _pressure() -> float:
    """Percent of the last 10 seconds in which some program waited for memory; 0 if the kernel does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return float(_PRESSURE.read_text().split("avg10=")[1].split()[0])
    return 0.0
