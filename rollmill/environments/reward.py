"""Reward: grades a submission on a clean machine. It trusts nothing that the agent could touch."""

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
        """Returns a Reward for whatever the policy did. MachineError if the grading itself could not run."""
        ...
