"""A machine whose commands may leave processes behind, as in a container: for tasks whose result is a running process.

What the agent's commands leave lives on while the tests run. The tests themselves are commands of the machine: they do
not go through the keeper, whose files the agent could change.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from rollmill.machines.background_shell import BackgroundShell
from rollmill.machines.machine import WORK, ExecResult, Machine, MachineWrapper, Snapshot


class LastingMachine(MachineWrapper):
    """`keep` gives it to grading: then `close` leaves it open."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._shell = BackgroundShell(machine, WORK)
        self._kept = False

    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        """Run a command. What it leaves lives on, unless it runs as a user that is named."""
        order = self._machine.order(argv, **options)  # OSError: it is no command
        if order.user is not None:
            return await self._machine.exec(argv, **options)
        command = f"exec {shlex.join(argv)} 2>&1"
        limit_s = order.timeout_s / self.capabilities.slowdown
        try:
            done = await self._shell.exec(command, order.cwd, order.env, limit_s, order.stdin)
        except TimeoutError:
            return ExecResult(-9, b"", stopped="time", seconds=order.timeout_s)
        output = (done.stdout + done.stderr).encode()
        return ExecResult(done.exit_code, output[: order.max_output], len(output) > order.max_output)

    def keep(self) -> Snapshot:
        """The machine itself, as the state in which the agent left it."""
        self._kept = True
        return Snapshot(self.image, self._machine)

    async def close(self) -> None:
        if not self._kept:
            await self._machine.close()
