"""What all rollouts of a process share."""

from __future__ import annotations

import contextlib
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from rollmill.environments.harness import Harness
from rollmill.environments.reward import Reward
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
