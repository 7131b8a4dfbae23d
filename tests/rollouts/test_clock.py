"""The clock of an episode: which time of its commands is not its own."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from rollmill.machines.machine import Capabilities, ExecResult
from rollmill.rollouts.clock import Clock, _only_waiting, _TimedMachine
from tests.machines.stand_ins import StandInMachine

pytestmark = pytest.mark.asyncio(loop_scope="module")


class StandInQueue(StandInMachine):
    """A machine whose commands wait for their turn until `turn` is set, and then run for a millisecond."""

    def __init__(self) -> None:
        self.turn = asyncio.Event()

    async def exec(self, *_: Any, **__: Any) -> ExecResult:
        await self.turn.wait()
        return ExecResult(0, b"", seconds=1e-3)


async def test_commands_that_wait_together_wait_once() -> None:
    queue = StandInQueue()
    machine = _TimedMachine(queue)
    began = time.monotonic()
    commands = [asyncio.create_task(machine.exec(["true"], timeout_s=0.01)) for _ in range(8)]
    while machine.waited() < 0.05:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert machine.waited() <= time.monotonic() - began, "while they wait"
    queue.turn.set()
    await asyncio.gather(*commands)
    assert 0.05 <= machine.waited() <= time.monotonic() - began, "and afterwards"


class StandInGateway:
    def away_seconds(self, _: str) -> float:
        return 0.0

    async def waited(self, _: str) -> float:
        return 0.0


async def test_the_clock_stands_still_while_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("rollmill.rollouts.clock.time", SimpleNamespace(monotonic=lambda: now))
    queue = StandInQueue()
    queue.capabilities = Capabilities(kernel="shared", snapshot="files")
    clock = Clock(StandInGateway(), "t0", queue)  # type: ignore[arg-type]
    for passes, seconds in ((7.0, 1.0), (600.0, 542.0)):  # a checkpoint that hangs stops the clock for 60 s
        now += 1.0
        with clock.held():
            now += passes
            assert await clock.seconds() == seconds, "one that is still being written"
        assert await clock.seconds() == seconds


async def test_seconds_of_commands_are_divided_by_the_slowdown_of_their_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("rollmill.rollouts.clock.time", SimpleNamespace(monotonic=lambda: now))

    class StandInSlow(StandInMachine):
        capabilities = Capabilities(kernel="own", snapshot="full", slowdown=20.0)

        async def exec(self, *_: Any, **__: Any) -> ExecResult:
            nonlocal now
            now += 40.0
            assert await clock.seconds() == pytest.approx(3.0), "while it runs"
            return ExecResult(0, b"", seconds=40.0)

    clock = Clock(StandInGateway(), "t0", StandInSlow())  # type: ignore[arg-type]
    now += 1.0  # sampling is not slower
    await clock.machine.exec(["true"], timeout_s=200.0)
    assert await clock.seconds() == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("waits", "runs", "seconds"),
    [
        ([(0, 2), (5, 6)], [(2, 3), (6, 9)], 3),  # one after the other
        ([(0, 4), (1, 5)], [], 5),
        ([(0, 4)], [(1, 3)], 2),  # another command runs meanwhile
        ([(0, 4)], [(0, 9)], 0),
        ([(3, 1)], [], 0),  # it has not waited
        ([], [(0, 1)], 0),
    ],
)
async def test_time_counts_as_waiting_while_a_command_waits_and_none_runs(
    waits: list[tuple[float, float]], runs: list[tuple[float, float]], seconds: float
) -> None:
    assert _only_waiting(waits, runs) == seconds
