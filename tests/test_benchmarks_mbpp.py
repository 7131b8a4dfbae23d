"""What `benchmarks.mbpp` trains on and how it counts: problems that are kept out are never learnt from."""

from __future__ import annotations

import json
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mbpp import (
    QUICK,
    RECIPE,
    START_S,
    WINDOW,
    Bench,
    curve,
    figures_of,
    follow,
    prepare,
    rl_figures,
    seconds_to,
    sft_version,
    smoothed,
    without_sft,
)
from benchmarks.mbpp_trl import compared
from rollmill.environments.environment import build_tasks
from rollmill.runs.run import RunDirectory
from tests.test_repo import SMOLLM2
from tests.weights.build import publish_line


def test_what_is_kept_out_is_not_learnt_from(tmp_path: Path) -> None:
    rows = [
        {"task_id": number, "text": f"Add {number}.", "code": f"def f(x):\n    return x + {number}\n"}
        | {"test_list": [f"assert f(1) == {number + 1}"]}
        for number in range(300)
    ]
    data = tmp_path / "problems.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SMOLLM2))
    settings = [f'checkpoint="{tmp_path / "model"}"', *QUICK]
    config = prepare(data, tmp_path / "work", settings)
    out = (tmp_path / "work" / "heldout.txt").read_text()
    tasks = build_tasks(config)
    kept = {task.id for task in tasks.heldout("heldout", 1000)}
    assert len(kept) == 128 and kept == set(out.split())
    learnt = [json.loads(line)["messages"] for line in (tmp_path / "work" / "solutions.jsonl").open()]
    assert [each["role"] for each in learnt[0]] == ["system", "user", "assistant"] and len(learnt) == 300 - 128
    asked = {messages[1]["content"] for messages in learnt}
    assert not asked & {tasks.get(id).instruction for id in kept}
    assert learnt[0][2]["content"].startswith("```python\ndef f(x):") and learnt[0][2]["content"].endswith("\n```")
    prepare(data, tmp_path / "work", settings)
    assert (tmp_path / "work" / "heldout.txt").read_text() == out
    bench = Bench(config, tmp_path / "work", settings, 500.0)
    measured = {"kind": "eval", "seconds": 40.0}
    assert bench.end - bench.ends([measured]) == 60.0 + START_S  # the last measurement may be slower
    assert bench.ends([measured, {"kind": "phase", "phase": "evaluate after"}]) == bench.end
    alone = Bench(config, tmp_path / "work", settings, 500.0, sft=True)
    assert alone.ends([{"kind": "document_step"}]) == alone.end and alone.ends([measured | {"label": "before"}]) == 0.0
    run = RunDirectory.create(tmp_path / "work" / "runs", config)
    publish_line(Path(run.home_store), 2, "sft")
    assert sft_version(tmp_path / "work") == (run.path, "sft@1")  # twenty steps publish once


def test_figures_pair_the_problems() -> None:
    before = {str(task): [task < 10] * 16 for task in range(128)}
    after = {str(task): [task < 30] * 16 for task in range(128)}
    found = {"before": {"by_task": before, "seconds": 1.0}, "after": {"by_task": after, "seconds": 1.0}, "base": None}
    figures = figures_of(found)
    assert figures["gain"] == pytest.approx(20 / 128) and 0 < figures["gain_low"] < figures["gain"]
    assert "base" not in figures and "sft_gain" not in figures
    assert rl_figures([]) == {}


def test_steps_without_a_measured_mismatch_do_not_count() -> None:
    figures = ("seconds", "trained_tokens", "wait_seconds", "trajectories", "solve_rate")
    step: dict[str, Any] = {"kind": "step", **dict.fromkeys(figures, 1.0)}
    measured = [None, 1e-6, None, None, 3e-6, 2e-6, None]
    events: list[dict[str, Any]] = [{"kind": "phase", "phase": "rl", "state": "start", "at": 0.0}]
    events += [step | {"at": float(at), "mismatch_k3": k3, "mismatch_max": k3} for at, k3 in enumerate(measured, 1)]
    found = rl_figures(events)
    assert (found["rl_mismatch_k3"], found["rl_mismatch_most"]) == (2e-6, 3e-6) and "rl_staleness" not in found


def test_the_time_to_the_same_reward_is_read_from_both_curves() -> None:
    begin = {"kind": "phase", "phase": "rl", "state": "start", "at": 100.0}
    ended = [
        {"kind": "rollout", "at": 100.0 + n / 100, "reward": float(n % 10 < n // WINDOW)} for n in range(4 * WINDOW)
    ]
    ours = curve([begin, *ended, {"kind": "step", "at": 1000.0}])
    assert len(ours) == 3 * WINDOW + 1 and ours[0] == (pytest.approx((WINDOW - 1) / 100), 0.0)
    theirs = smoothed((10.0 * step, 0.01 * step, 256) for step in range(1, 12))
    assert theirs[0] == (40.0, pytest.approx(0.025)) and len(theirs) == 8
    assert (
        seconds_to(theirs)["2pct"] == 40.0 and seconds_to(theirs)["6pct"] == 80.0 and "15pct" not in seconds_to(theirs)
    )
    found = compared({"samples_per_s": 10.0}, theirs, {"rl_samples_per_s": 60.0}, ours)
    assert found["times_samples"] == 6.0
    assert found["times_to_reward"] == pytest.approx(seconds_to(theirs)["8pct"] / seconds_to(ours)["8pct"])


def test_a_run_from_a_version_of_another_has_rl_alone() -> None:
    tree = tomllib.loads(without_sft(RECIPE.read_text()))
    assert [stage["kind"] for stage in tree["stages"]] == ["rl"] and "checkpoint" not in tree
    assert tree["rollouts"] == tomllib.loads(RECIPE.read_text())["rollouts"]


def test_a_command_is_stopped_in_time(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert follow(["true"], tmp_path, log, lambda _: time.time() + 60)
    assert not follow(["false"], tmp_path, log, lambda _: time.time() + 60)
    (tmp_path / "a.jsonl").write_text('{"at": 1.0, "kind": "phase", "phase": "rl", "state": "start"}\n')
    assert not follow(["sleep", "600"], tmp_path, log, lambda events: 0.0 if events else time.time() + 60)
