"""What all rollouts of a process share."""

from __future__ import annotations

import contextlib
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace

from rollmill.environments.environment import Environments
from rollmill.environments.harness import Harness
from rollmill.environments.reward import Reward
from rollmill.environments.task import Task
from rollmill.machines.machine import MachineHost
from rollmill.rollouts.gateway_client import GatewayClient
from rollmill.rollouts.grading import Stalls
from rollmill.storage.objects import Objects
from rollmill.trajectories.trajectory_store import TrajectoryStore


@dataclass(frozen=True)
class RolloutContext:
    """Everything a rollout needs besides its task. All rollouts of a process share it."""

    gateway: GatewayClient
    machines: MachineHost  # where agents work
    grading_machines: MachineHost  # where submissions are graded; usually the same host
    harness: Harness
    grader: Reward
    trajectories: TrajectoryStore
    objects: Objects
    line: str = ""  # the line that samples; numbers of versions are of this line
    timeout_s: float = 120.0
    grading_timeout_s: float = 300.0
    attempts: int = 3
    checkpoint_s: float | None = None  # seconds between two checkpoints of an episode; None: none are kept
    stalls: Stalls = field(default_factory=Stalls)
    running: AbstractAsyncContextManager[None] = field(default_factory=contextlib.nullcontext)  # entered while it runs
    grading: AbstractAsyncContextManager[None] = field(default_factory=contextlib.nullcontext)  # while it is graded
    max_answer_tokens: int | None = None  # None: as the sampling of each rollout says
    environments: Environments | None = None  # that `of` chooses from; None: the fields above hold for every task

    @property
    def longest_s(self) -> float:
        """The longest time limit of any environment."""
        return max(self.timeout_s, self.environments.longest_s if self.environments is not None else 0.0)

    def of(self, task: Task) -> RolloutContext:
        """What a rollout of this task needs: the parts and the limits of its environment."""
        if self.environments is None:
            return self
        chosen = self.environments.of(task)
        settings = chosen.settings
        return replace(
            self,
            machines=chosen.machines,
            grading_machines=chosen.grading_machines,
            harness=chosen.harness,
            grader=chosen.grader,
            timeout_s=settings.timeout_s or self.timeout_s,
            grading_timeout_s=settings.grading_timeout_s or self.grading_timeout_s,
            max_answer_tokens=settings.max_answer_tokens,
            environments=None,
        )
