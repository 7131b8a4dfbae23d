"""The clock of an episode. It counts the episode's own time: sampling and tools.

It stands still while the episode waits

- for an engine: the gateway reports how long the requests of a session waited,
- for the gateway, while it cannot be reached: `GatewayClient` watches it,
- for the machine host: the time of a command in which the command itself did not run, and
- for a checkpoint to be taken, up to `_LONGEST_HOLD_S` each time.

Seconds of commands count less in a machine that is slow: they are divided by its measured slowdown.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rollmill.machines.machine import ExecResult, Machine, MachineWrapper
from rollmill.rollouts.gateway_client import GatewayClient

Interval = tuple[float, float]  # start and end
_LONGEST_HOLD_S = 60.0  # a checkpoint that hangs must not stop the clock for ever


class Clock:
    """Starts when it is constructed."""

    def __init__(
        self,
        gateway: GatewayClient,
        trajectory: str,
        machine: Machine,
        *,
        spent_s: float = 0.0,
        waited_before: float = 0.0,
    ) -> None:
        """For an episode that resumes: `spent_s` is its own time before, `waited_before` the waits of its session."""
        self._gateway, self.trajectory = gateway, trajectory
        self.machine = _TimedMachine(machine)  # to give to the harness: its commands are timed
        self._started = time.monotonic()
        self._away = gateway.away_seconds(trajectory)
        self._spent_s = spent_s
        self._waited = self._waited_before = waited_before
        self._held = 0.0
        self._held_since: float | None = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The clock stands still in this block."""
        self._held_since = time.monotonic()
        try:
            yield
        finally:
            self._held, self._held_since = self._held_seconds(), None

    def _held_seconds(self) -> float:
        if self._held_since is None:
            return self._held
        return self._held + min(time.monotonic() - self._held_since, _LONGEST_HOLD_S)

    async def seconds(self) -> float:
        """The episode's own seconds so far."""
        # a gateway that was restarted may have forgotten its latest waits
        self._waited = max(self._waited, await self._gateway.waited(self.trajectory))
        elapsed, away = time.monotonic() - self._started, self._gateway.away_seconds(self.trajectory) - self._away
        waited = self._waited - self._waited_before + self.machine.waited() + self._held_seconds()
        return self._spent_s + max(0.0, elapsed - away - waited - self.machine.slowed())


class _TimedMachine(MachineWrapper):
    """A machine that measures how long its commands waited for the machine host.

    A command waits first, and then runs. Commands that wait at the same time count once, and not at all while another
    command is known to run.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._waits: list[Interval] = []  # of commands that have ended
        self._runs: list[Interval] = []
        self._open: dict[object, Interval] = {}  # by command that has not ended: its start, and its time limit

    def waited(self) -> float:
        now = time.monotonic()
        # a command cannot itself run longer than its limit: before that it must have been waiting
        waiting = [(began, now - timeout_s) for began, timeout_s in self._open.values()]
        return _only_waiting([*self._waits, *waiting], self._runs)

    def slowed(self) -> float:
        """Seconds that commands took because the machine is slower than its host."""
        now = time.monotonic()
        running = [(max(began, now - timeout_s), now) for began, timeout_s in self._open.values()]
        return _only_waiting([*self._runs, *running], []) * (1 - 1 / self.capabilities.slowdown)

    async def exec(self, argv: Sequence[str], *, timeout_s: float = 10.0, **options: Any) -> ExecResult:
        began, command = time.monotonic(), object()
        self._open[command] = began, timeout_s
        try:
            result = await super().exec(argv, timeout_s=timeout_s, **options)
        finally:
            del self._open[command]
        if result.seconds:  # else it is not known how long the command itself ran
            ended = time.monotonic()
            self._waits.append((began, ended - result.seconds))
            self._runs.append((ended - result.seconds, ended))
        return result


def _only_waiting(waits: Sequence[Interval], runs: Sequence[Interval]) -> float:
    """Seconds that are in one of `waits` and in none of `runs`. An interval that ends before it starts is empty."""
    changes = [change for start, end in waits if start < end for change in ((start, 1, 0), (end, -1, 0))]
    changes += [change for start, end in runs if start < end for change in ((start, 0, 1), (end, 0, -1))]
    seconds, before, waiting, running = 0.0, 0.0, 0, 0
    for at, more_waiting, more_running in sorted(changes):
        if waiting and not running:
            seconds += at - before
        before, waiting, running = at, waiting + more_waiting, running + more_running
    return seconds
