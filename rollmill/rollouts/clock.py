"""The clock of an episode. It counts the episode's own time: sampling and tools.

It stands still while the episode waits

- for an engine: the gateway says how long the requests of a session waited,
- for the gateway, while nobody can reach it: `GatewayClient` watches it, and
- for the machine host: the time of a command that the command itself did not run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

from rollmill.environments.machine import ExecResult, Machine
from rollmill.rollouts.client import GatewayClient


class Clock:
    """Starts when it is made."""

    def __init__(self, gateway: GatewayClient, trajectory: str, machine: Machine) -> None:
        self._gateway, self._trajectory = gateway, trajectory
        self._machine = _TimedMachine(machine)
        self._started = time.monotonic()
        self._away = gateway.away_seconds()
        self._waited = 0.0

    @property
    def machine(self) -> Machine:
        """The machine to give to the harness: its commands are timed."""
        return cast(Machine, self._machine)

    async def seconds(self) -> float:
        """The episode's own seconds so far."""
        # a gateway that was restarted may have forgotten its latest waits
        self._waited = max(self._waited, await self._gateway.waited(self._trajectory))
        elapsed, away = time.monotonic() - self._started, self._gateway.away_seconds() - self._away
        return max(0.0, elapsed - away - self._waited - self._machine.waited())


class _TimedMachine:
    """A machine that adds up how long its commands waited for the machine host."""

    def __init__(self, machine: Machine) -> None:
        self._wrapped = machine
        self._settled = 0.0
        self._since: dict[object, float] = {}  # by running command: the time from which it must have been waiting

    def waited(self) -> float:
        now = time.monotonic()
        return self._settled + sum(max(0.0, now - since) for since in self._since.values())

    async def exec(self, argv: Sequence[str], *, timeout_s: float = 10.0, **options: Any) -> ExecResult:
        began, command = time.monotonic(), object()
        self._since[command] = began + timeout_s  # it cannot itself run longer than that
        try:
            result = await self._wrapped.exec(argv, timeout_s=timeout_s, **options)
        finally:
            del self._since[command]
        if result.seconds:  # else it is not known how long the command itself ran
            self._settled += max(0.0, time.monotonic() - began - result.seconds)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)
