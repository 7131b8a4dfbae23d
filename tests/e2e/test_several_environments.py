"""The guide to several environments, word by word: a small run whose model learns two of them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from rollmill.kinds import code_of
from rollmill.runs.run import RunDirectory
from rollmill.telemetry import read_events
from rollmill.trajectories.query import TrajectoryQuery
from tests.cli.test_init import LESS, shell
from tests.test_repo import ROOT

GUIDE = ROOT / "docs" / "guides" / "several-environments.md"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_guide_trains_on_two_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "images"))
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(), re.S)
    assert len(blocks) == 4, "a new block must be executed too"
    less = f"{LESS} evals.tasks=4 stages.rl.groups_per_step=3"
    blocks[3] = blocks[3].replace("rollmill train run.toml\n", f"rollmill train run.toml{less}\n", 1)
    printed = shell("\n".join(blocks), tmp_path)
    assert "48 of 48 tasks are all right" in printed
    status = printed.partition("held-out solve rate")[2]
    assert re.search(r"arithmetic +\d+ % → \d+ %", status) and re.search(r"tickets +\d+ % → \d+ %", status)

    run = RunDirectory.open(tmp_path / "two" / "runs" / "my-run")
    episodes = [event for event in read_events(run.events) if event["kind"] == "rollout"]
    assert {episode["state"] for episode in episodes} == {"graded"}, [each["reason"] for each in episodes]
    groups = {each["group"]: each["environment"] for each in episodes if each["split"] == "train"}
    assert list(map(groups.get, sorted(groups)))[:3] == ["arithmetic", "tickets", "arithmetic"]
    rows = run.trajectories().find(TrajectoryQuery(of_run=run.id))
    graders = {row.id: reward.grader for row in rows for _, reward in run.trajectories().rewards([row.id])[row.id]}
    of = {row.id: row.provenance["environment"] for row in rows}
    assert {(of[id], grader) for id, grader in graders.items()} >= {
        ("arithmetic", "calls+short"),
        ("tickets", "script"),
    }
    code = json.loads((run.path / "run.json").read_text())["code"]
    assert code["environments.tickets.harness"] == code_of(run.config.environments[1].harness)
    report = json.loads((run.path / "report.json").read_text())
    assert {name: own["groups"] for name, own in report["environments"].items()} == Counter(groups.values())
    assert "<td>tickets</td>" in (run.path / "report.html").read_text()
