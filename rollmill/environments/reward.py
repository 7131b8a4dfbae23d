"""Reward: grades an episode. It trusts nothing that the agent could touch."""

from __future__ import annotations

import asyncio
from typing import Protocol

from rollmill.environments.episode import Episode
from rollmill.errors import RewardError
from rollmill.types import Reward


class Grader(Protocol):
    """`name` stands before the parts and the evidence of this grader where several rewards add up.

    A grader may also have `cannot_protect`, a text: what an agent could still do to earn an undeserved reward.
    `rollmill tasks check` prints it. `async weaknesses(episode) -> str` says it of one task, where that differs.

    A grader with `kind` grades tasks whose `grading` has this kind. Where several such graders are rewards of one run,
    each task is graded by those of its own kind, and by all graders without a `kind`.

    A grader with `wants_final_state = True` gets `episode.final_state`: a reference to the state in which the agent
    left its machine. Without one that wants it, no state is saved.

    Before a run begins, `preflight()` of a grader that has it raises ConfigError if something it needs here is missing.
    """

    name: str

    async def grade(self, episode: Episode) -> Reward:
        """Returns a Reward for whatever the policy did. MachineError if the grading itself could not run."""
        ...


def wants_final_state(grader: Grader) -> bool:
    return bool(getattr(grader, "wants_final_state", False))


async def grade_episode(grader: Grader, episode: Episode) -> Reward:
    """The grader's reward. RewardError if it returns something else: it may be code of the user.

    It is graded in a task of its own. Before Python 3.13, a TaskGroup whose child fails can leave its task cancelled
    for good; the caller must not be that task.
    """
    grading = asyncio.create_task(grader.grade(episode))
    try:
        await asyncio.wait([grading])
    finally:
        grading.cancel()  # without effect if it has ended
        await asyncio.wait([grading])
    if grading.cancelled():
        raise RewardError(f"the reward {grader.name} cancelled itself")
    reward = grading.result()
    if not isinstance(reward, Reward):
        raise RewardError(f"the reward {grader.name} returned {type(reward).__name__}, not a Reward")
    return reward
