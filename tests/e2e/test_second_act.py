"""The demo's second act, small: every process is real, and the users are simulated."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from rollmill.cli.demo import play_second_act
from rollmill.demo import second_act
from rollmill.runs.run import RunDirectory
from tests.launch.served import published_run

SMALL = (
    "stages.midtrain.steps=2",
    "harness.max_turns=4",
    "cycle.enough=8",
    "stages.rl.max_step_drift=0",  # of an almost random model every update goes far
    "cycle.canary_sessions=2",
    "cycle.max_loss=1.0",
    "evals.tasks=2",
    "gate.max_quality_loss=1.0",
    "gate.least_tasks=1",
    *(f"gate.max_more_{name}=1000.0" for name in ("tokens", "engine_seconds", "seconds")),
    *(f"gate.max_more_{name}=1.0" for name in ("malformed", "questions")),
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_second_act_adds_its_cycle_to_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = published_run(tmp_path, 1)  # the first act, as far as the second one looks at it
    monkeypatch.setattr(second_act, "SETTINGS", (*second_act.SETTINGS, *SMALL))
    monkeypatch.setattr(second_act, "live_cycle", functools.partial(second_act.live_cycle, measured=4, batch=16))
    play_second_act(run)
    living = json.loads((run.path / "report.json").read_text())["living"]
    (cycle,) = living["cycles"]
    states = [move["state"] for move in cycle["moves"]]
    assert states[:4] == ["collecting", "distilling", "training", "gating"] and cycle["ended"] == states[-1]
    assert living["users"] == "simulated" and living["measured"] == 4 and living["contexts"] > 1
    assert "simulated users: the cycle was" in capsys.readouterr().out
    assert "What users taught it" in (run.path / "report.html").read_text()
    assert RunDirectory.open(run.path / "live").config.model.max_context == 44
