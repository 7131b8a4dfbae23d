"""The guide's run with several suites, word by word but shorter: each is measured before, while and after it trains."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rollmill.runs.run import RunDirectory
from rollmill.runs.stages import results_key
from rollmill.telemetry import read_events
from tests.cli.test_init import shell
from tests.test_repo import ROOT

GUIDE = (ROOT / "docs" / "guides" / "watching-a-run.md").read_text()
LESS = (
    " stages.sft.steps=40 stages.rl.steps=6 stages.rl.groups_per_step=2 evals.every=2 evals.tasks=3 evals.attempts=2"
    " evals.suites.large.count=3 evals.suites.cool.count=2"
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_guide_measures_each_suite(tmp_path: Path) -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", GUIDE.partition("### Several suites")[2].partition("\n## ")[0], re.S)
    assert "rollmill train run.toml\n" in block
    shorter = block.replace("rollmill train run.toml\n", f"rollmill train run.toml{LESS}\n").replace("rl@12", "rl@6")
    printed = shell(shorter, tmp_path)
    assert "large, sampled" in printed and "cool, sampled" in printed and "large: plus-" in printed
    assert "large: quality" in printed and "large: bar" in printed and "cool: " not in printed.partition("bound")[2]

    run = RunDirectory.open(tmp_path / "my-suites" / "runs" / "my-run")
    left_out = {event["version"] for event in read_events(run.events) if event["kind"] == "eval_left_out"}
    during = [f"during-rl-{number}" for number in (2, 4) if number not in left_out]
    assert during, "none was measured while it trained"
    for label in ("before", *during, "after"):
        results = json.loads(run.objects().get(results_key(run, label)))
        sampled = {each["split"]: each for each in results if each["mode"] == "sampled"}
        assert list(sampled) == ["heldout", "large", "cool"]
        assert {name: (each["attempts"], each["k"]) for name, each in sampled.items()} == {
            "heldout": (6, 2),
            "large": (12, 4),
            "cool": (4, 2),
        }
        assert all(id.startswith("plus-") and int(id[5:]) > 10 for id in sampled["large"]["by_task"])
        assert sampled["large"]["version"] == {"before": 0, "after": 6}.get(
            label, int(label[-1]) if "-" in label else 0
        )
    report = json.loads((run.path / "report.json").read_text())
    assert {(each["label"], each["split"]) for each in report["evals"]} >= {("before", "large"), ("after", "cool")}
    shown = (run.path / "report.html").read_text()
    assert "large, sampled, after" in shown and "cool, sampled, before" in shown
