"""SIMULATION: the coding harness, whose commands take as long as in a larger repository.

Tests of a micro-repository run in milliseconds. To measure asynchronous training with slow tools, each command of the
model also waits a time drawn from a recorded distribution. Only the waiting is simulated; the commands run.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

from pydantic import Field

from rollmill.environments.harnesses.coding import CodingHarness, HarnessConfig
from rollmill.machines.machine import ExecResult, Machine


class SlowToolsConfig(HarnessConfig):
    tool_seconds: tuple[float, ...] = Field(min_length=1, description="Each command also waits one of these.")


class SlowTools(CodingHarness):
    def __init__(self, config: SlowToolsConfig) -> None:
        super().__init__(config)
        self._seconds = config.tool_seconds
        self._draw = random.Random(0)  # as the demo's seed

    async def _exec(self, machine: Machine, argv: Sequence[str]) -> ExecResult:
        simulated = self._draw.choice(self._seconds)
        await asyncio.sleep(simulated)
        result = await super()._exec(machine, argv)
        return replace(result, seconds=result.seconds + simulated)  # the command took it, nobody waited
