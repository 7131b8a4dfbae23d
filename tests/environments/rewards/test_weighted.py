"""Several rewards of one episode."""

from __future__ import annotations

from typing import Any

import pytest

from rollmill.environments.episode import Episode
from rollmill.environments.reward import Reward
from rollmill.environments.rewards.weighted import add_up
from rollmill.environments.task import Task
from rollmill.errors import MachineError, RewardError, TaskError
from rollmill.machines.namespace.client import NamespaceHost
from rollmill.types import Grade


class Fixed(Reward):
    """A user's reward: it returns or raises what it is given."""

    def __init__(self, name: str, outcome: Any) -> None:
        self.name, self._outcome = name, outcome

    async def grade(self, episode: Episode) -> Grade:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        outcome: Grade = self._outcome
        return outcome


EPISODE = Episode(Task("t", "do it"), {}, NamespaceHost())  # no reward here needs a machine
TESTS = Fixed("tests", Grade(1.0, {"passed": 3.0}, {"log": "ok"}, "tests"))
LENGTH = Fixed("length", Grade(-2.0, {}, {"tokens": 9}, "length"))


async def test_values_add_up_by_weight_and_every_part_is_kept() -> None:
    reward = await add_up([(1.0, TESTS), (0.25, LENGTH), (2.0, Fixed("length", Grade(0.5)))]).grade(EPISODE)
    assert reward.value == 1.0 - 0.5 + 1.0 and reward.solved
    assert reward.parts == {"solved": 1.0, "tests": 1.0, "tests.passed": 3.0, "length": -2.0, "length_2": 0.5}
    assert reward.evidence == {"tests": {"log": "ok"}, "length": {"tokens": 9}, "length_2": {}}


async def test_each_task_is_graded_by_the_rewards_for_its_kind() -> None:
    calls, script = Fixed("calls", Grade(1.0)), Fixed("script", Grade(0.0))
    calls.kind, script.kind = "calls", "script"  # type: ignore[attr-defined]
    both = add_up([(1.0, script), (1.0, calls), (0.25, LENGTH)])
    for kind, value, solved in (("calls", 0.5, True), ("script", -0.5, False)):
        task = Task("t", "do it", grading={"kind": kind, "mine": 3})
        reward = await both.grade(Episode(task, {}, EPISODE.machines))
        assert (reward.value, reward.solved) == (value, solved) and reward.grader == f"{kind}+length"
    for grading in ({"kind": "pytest"}, {"mine": 3}):  # nobody's, or not said whose
        with pytest.raises(TaskError, match="there are rewards for calls, script"):
            await both.grade(Episode(Task("t", "do it", grading=grading), {}, EPISODE.machines))


async def test_the_first_reward_decides_whether_it_is_solved() -> None:
    assert not (await add_up([(1.0, LENGTH), (1.0, TESTS)]).grade(EPISODE)).solved


@pytest.mark.parametrize("error", [MachineError("the host is gone"), ValueError("a mistake of the user")])
async def test_an_error_comes_out_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        await add_up([(1.0, TESTS), (1.0, Fixed("own", error))]).grade(EPISODE)


async def test_a_result_that_is_no_reward_is_named() -> None:
    with pytest.raises(RewardError, match="the reward own returned float, not a Grade"):
        await add_up([(1.0, TESTS), (1.0, Fixed("own", 1.0))]).grade(EPISODE)
