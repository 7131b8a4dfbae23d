"""How long grading may take."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp.test_utils import unused_port

from rollmill.environments.episode import Episode
from rollmill.environments.reward import Reward
from rollmill.environments.rewards.judge import Judge, JudgeConfig
from rollmill.environments.rewards.script import Script, ScriptConfig
from rollmill.environments.rewards.weighted import add_up
from rollmill.environments.task import Task
from rollmill.errors import RewardError
from rollmill.machines.namespace.client import NamespaceHost
from rollmill.rollouts.grading import Stalls, grade_patiently
from rollmill.types import Grade

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_hidden_tests_that_hang_are_graded_though_their_limit_is_longer_than_the_runs(
    host: NamespaceHost,
) -> None:
    """Otherwise a submission could turn its failure into an episode that is dropped."""
    grading = {"kind": "script", "command": ["sh", "run.sh"], "timeout_s": 0.5}
    task = Task("t", "do it", files={"run.sh": b"exit 1"}, submission=("run.sh",), grading=grading)
    episode = Episode(task, {"run.sh": b"sleep 1000"}, host)
    reward = await grade_patiently(Script(), episode, "t0", Stalls(), timeout_s=0.1, attempts=1)
    assert reward.value == 0.0 and reward.evidence["stopped"] == "time"


async def test_grading_may_take_longer_where_commands_do(host: NamespaceHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a machine that is 20 times slower the tests' own limit is as much longer, and must end first."""

    async def slowdown(self: NamespaceHost, image: str) -> float:
        return 20.0

    monkeypatch.setattr(NamespaceHost, "slowdown", slowdown, raising=False)
    monkeypatch.setattr(host, "measured_slowdown", 20.0)  # what its machines declare
    grading = {"kind": "script", "command": ["sh", "run.sh"]}
    task = Task("t", "do it", files={"run.sh": b"exit 1"}, submission=("run.sh",), grading=grading)
    episode = Episode(task, {"run.sh": b"sleep 1000"}, host)
    grader = Script(ScriptConfig(timeout_s=0.05))
    reward = await grade_patiently(grader, episode, "t0", Stalls(), timeout_s=0.5, attempts=1)
    assert reward.value == 0.0 and reward.evidence["stopped"] == "time"


async def test_a_judge_that_is_down_beside_another_reward_does_not_cancel_who_waits_for_it(host: NamespaceHost) -> None:
    """Before Python 3.13 a TaskGroup, here of the rewards or of a user's own, leaves its task cancelled for good."""
    settings = {"base_url": f"http://127.0.0.1:{unused_port()}/v1", "model": "m", "dimension": "d", "rubric": "r"}
    judge = Judge(JudgeConfig(**settings, votes=1, grading_timeout_s=0.1))
    task = Task("t", "do it", submission=("run.sh",), grading={"kind": "script", "command": ["true"]})
    grading = grade_patiently(
        add_up([(1.0, Script()), (0.1, judge)]), Episode(task, {}, host), "t0", Stalls(), timeout_s=1, attempts=1
    )
    with pytest.raises(RewardError, match=r"no grade after 1 s: the judge .* cannot be reached"):
        await grading
    me = asyncio.current_task()
    assert me is not None and me.cancelling() == 0


class Cancels(Reward):
    name = "cancels"

    async def grade(self, episode: Episode) -> Grade:
        raise asyncio.CancelledError


async def test_a_reward_that_cancels_itself_is_an_error_of_that_reward(host: NamespaceHost) -> None:
    with pytest.raises(RewardError, match="the reward cancels cancelled itself"):
        await grade_patiently(Cancels(), Episode(Task("t", ""), {}, host), "t0", Stalls(), timeout_s=5, attempts=1)
