"""How long grading may take."""

from __future__ import annotations

import pytest

from rollmill.environments.episode import Episode
from rollmill.environments.machines.namespace.client import NamespaceHost
from rollmill.environments.rewards.script import Script, ScriptConfig
from rollmill.environments.task import Task
from rollmill.rollouts.grading import Stalls, grade_patiently

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
