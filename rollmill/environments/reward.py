"""Reward: grades an episode. It trusts nothing that the agent could touch."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from pydantic import Field

from rollmill.config import Config
from rollmill.environments.episode import Episode
from rollmill.errors import RewardError
from rollmill.types import Grade


class TimedConfig(Config):
    """Settings of a reward that limits its own time. A run refuses a limit that `rollouts.grading_timeout_s` would cut
    short."""

    timeout_s: float = Field(gt=0, description="Seconds that grading one submission may take.")


class Reward(ABC):
    """Base class of rewards: `name` and `grade` are needed, everything else has a default."""

    name: str  # stands before its parts and its evidence where several rewards add up

    # The kind of `task.grading` that it grades; None: any. If rewards of a run have kinds, a task is graded by those of
    # its own kind and by those without one.
    kind: str | None = None
    # It needs `episode.final_state`: the state in which the agent left its machine. Nobody wants it: none is saved.
    wants_final_state = False
    # What an agent could do to earn an undeserved reward. `rollmill tasks check` prints it. Empty: it does not say.
    cannot_protect = ""

    @abstractmethod
    async def grade(self, episode: Episode) -> Grade:
        """Returns a Grade for whatever the policy did. MachineError if the grading itself could not run."""

    async def weaknesses(self, episode: Episode) -> str:
        """What it cannot protect in the task of `episode`, if that differs between tasks."""
        return ""

    def preflight(self) -> None:
        """Called before a run begins. ConfigError if something it needs here is missing."""


async def grade_episode(reward: Reward, episode: Episode) -> Grade:
    """What the reward returns. RewardError if that is no Grade: it may be code of the user.

    It is graded in a task of its own. Before Python 3.13, a TaskGroup whose child fails can leave its task cancelled
    for good; the caller must not be that task.
    """
    grading = asyncio.create_task(reward.grade(episode))
    try:
        await asyncio.wait([grading])
    finally:
        grading.cancel()  # without effect if it has ended
        await asyncio.wait([grading])
    if grading.cancelled():
        raise RewardError(f"the reward {reward.name} cancelled itself")
    grade = grading.result()
    if not isinstance(grade, Grade):
        raise RewardError(f"the reward {reward.name} returned {type(grade).__name__}, not a Grade")
    return grade
