"""Reward: grades an episode. It trusts nothing that the agent could touch."""

from __future__ import annotations

from typing import Protocol

from rollmill.environments.episode import Episode
from rollmill.errors import RewardError
from rollmill.types import Reward


class Grader(Protocol):
    """`name` stands before the parts and the evidence of this grader where several rewards add up.

    A grader may also have `cannot_protect`, a text: what an agent could still do to earn an undeserved reward.
    `rollmill tasks check` prints it.

    A grader with `wants_final_state = True` gets `episode.final_state`: a reference to the state in which the agent
    left its machine. Without one that wants it, no state is saved.
    """

    name: str

    async def grade(self, episode: Episode) -> Reward:
        """Returns a Reward for whatever the policy did. MachineError if the grading itself could not run."""
        ...


def wants_final_state(grader: Grader) -> bool:
    return bool(getattr(grader, "wants_final_state", False))


async def grade_episode(grader: Grader, episode: Episode) -> Reward:
    """The grader's reward. RewardError if it returns something else: it may be code of the user."""
    reward = await grader.grade(episode)
    if not isinstance(reward, Reward):
        raise RewardError(f"the reward {grader.name} returned {type(reward).__name__}, not a Reward")
    return reward
