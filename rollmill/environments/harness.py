"""Harness: runs an agent. It talks to the model at a URL and executes its tool calls in the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from rollmill.environments.machine import Machine
from rollmill.environments.task import Task


@dataclass(frozen=True)
class HarnessResult:
    """How the episode ended. All of these are the policy's doing: infrastructure trouble raises instead."""

    stop: Literal["done", "max_turns", "length"]
    turns: int
    tool_calls: int
    bad_tool_calls: int = 0  # not JSON, unknown tool, wrong arguments: answered with an error the model can read


class Harness(Protocol):
    name: str

    async def run(self, task: Task, machine: Machine, *, base_url: str, api_key: str) -> HarnessResult: ...
