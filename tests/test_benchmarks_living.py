"""`python -m benchmarks.living` runs without an argument, and names the other proofs of the living mill. The rewards of
`benchmarks.credit` blame the turns of wrong edits."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.credit import EditHint, EditProcess
from benchmarks.living import parse
from rollmill.chat.format import assistant_message
from rollmill.demo.micro_repos import MicroRepos, repository_of
from rollmill.environments.episode import Episode
from rollmill.environments.rewards.weighted import WeightedRewards
from rollmill.machines.namespace.client import NamespaceHost
from rollmill.training.rl.turn_credit import turn_returns
from tests.test_repo import ROOT


def test_it_needs_no_argument_and_names_the_other_proofs(capsys: pytest.CaptureFixture[str]) -> None:
    given = parse([])
    assert (given.part, given.scenario, given.quick) == ("cycle", None, False), "every scenario, at full size"
    assert parse(["cycle", "--scenario", "poison", "--quick"]).scenario == ["poison"], "as the log has it"
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    named = re.findall(r"python -m benchmarks\.(\w+)", capsys.readouterr().out)
    assert named == ["living", "summaries", "long_episode", "credit", "day_night"]
    assert all((ROOT / "benchmarks" / f"{name}.py").exists() for name in named)


async def test_a_wrong_edit_costs_the_turn_that_made_it() -> None:
    task = next(iter(MicroRepos().train(0)))
    right = f"return {repository_of(task.id).function.code}"
    calls = [("read", "main.py"), ("edit", "return 0"), ("edit", f"  {right} "), ("edit", "return None")]
    messages = [assistant_message(None, [(name, json.dumps({"text": text}))]) for name, text in calls]
    for end, last_wrong in ((4, 3), (3, None), (2, 1), (1, None)):
        episode = Episode(task, {}, NamespaceHost(), messages=[*messages[:end], assistant_message("done", [])])
        hint = (await EditHint().grade(episode)).evidence
        assert hint == ({} if last_wrong is None else {"hints": [{"turn": last_wrong, "text": right}]})
        if end == 4:
            reward = await WeightedRewards([(1.0, EditHint()), (0.2, EditProcess())]).grade(episode)
            assert turn_returns(reward, 5).tolist() == pytest.approx([-0.4, -0.4, -0.2, -0.2, 0.0])
