"""Reward: grades the outcome from what was handed in, on a clean machine, trusting nothing the agent could touch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rollmill.environments.machine import MachineHost
from rollmill.environments.task import Task
from rollmill.types import Reward

Submission = Mapping[str, bytes]  # path relative to the work directory -> contents; missing files are absent


class Grader(Protocol):
    name: str

    async def grade(self, task: Task, submission: Submission, machines: MachineHost) -> Reward:
        """A Reward for anything the policy did, however broken; MachineError if the grading itself could not run."""
        ...
