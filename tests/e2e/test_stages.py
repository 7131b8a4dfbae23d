"""Mid-training, SFT and two stages of RL, killed on the way, with every process real."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path

import pytest

from rollmill.cli.target import find_target
from rollmill.config import load_config
from rollmill.demo import CONFIG as DEMO
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.runs.status import is_finished, state_of
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.telemetry import read_events
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Version
from rollmill.weights.files.companions import kept_companions
from rollmill.weights.reading.weight_store import WeightStore
from tests.e2e.small_run import BRIEF_EVALS, ONE_REGION, SMALL, copy_store
from tests.e2e.test_kill import start, wait_for

MORE = """
[[stages]]
kind = "rl"
name = "polish"
steps = 1
groups_per_step = 2
group_size = 4
max_context = 256
"""
SFT = """
[[stages]]
kind = "sft"
steps = 2
documents_per_step = 4
sources = [{kind = "rollmill.demo.demonstrations:Demonstrations"}]

"""


def four_stages(root: Path, base: RunDirectory) -> RunDirectory:
    """The demo's mid-training, which is done, then SFT, RL, and RL with a longer context."""
    head, mark, rl = DEMO.read_text().partition('[[stages]]\nkind = "rl"')
    file = root / "run.toml"
    file.write_text(head + SFT + mark + rl + MORE)
    settings = [*SMALL, "stages.rl.steps=1", "stages.rl.groups_per_step=2", *ONE_REGION, *BRIEF_EVALS]
    run = RunDirectory.create(root, load_config(RunConfig, file, ["name=four", *settings]))
    copy_store(base, run)
    return run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_stages_are_one_lineage_although_the_run_is_killed(tmp_path: Path, midtrained: RunDirectory) -> None:
    run = four_stages(tmp_path, midtrained)
    weights = WeightStore(Objects.open(run.home_store))
    process = start(run)
    try:
        for line in ("sft", "polish"):  # in the middle of a stage, with everything
            wait_for(lambda line=line: weights.head(line) is not None, process, run)  # type: ignore[misc]
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process = start(run)
        assert process.wait() == 0, (run.path / "train.out").read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    # each line begins with the weights that the one before ended with
    lines = [stage.name for stage in run.config.stages]
    assert lines == ["midtrain", "sft", "rl", "polish"] and set(weights.lines()) == set(lines)
    for before, line in itertools.pairwise(lines):
        parent = Version(before, weights.head(before) or 0)
        first = weights.manifest(Version(line, 0))
        assert first.origin == parent and first.digest == weights.manifest(parent).digest

    # steps, groups and trajectories are keyed by stage
    database = open_database(run.database_url)
    trajectories = TrajectoryStore(database, weights.objects)
    for name in ("rl", "polish"):
        key = run.stage_key(run.config.stage(name))
        ledger = Ledger(database, key)
        assert ledger.committed() == 1 and {step.line for step in ledger.steps()} == {name}
        assert ledger.open_groups() == 0 and {row.line for row in trajectories.list(run=key)} == {name}

    # the longer context is a fact of the line, and leaves with it
    assert json.loads(kept_companions(weights.objects, "polish")["config.json"])["max_position_embeddings"] == 256
    assert kept_companions(weights.objects, "rl") == {}

    # evaluated before, between and after; the run says where it is
    report = json.loads((run.path / "report.json").read_text())
    assert [(one["label"], one["version"]) for one in report["evals"]] == [("before", 0), ("after-rl", 1), ("after", 1)]
    steps = [event for event in read_events(run.events) if event["kind"] == "step"]
    assert {(event["stage"], event["step"]) for event in steps} == {("rl", 1), ("polish", 1)}
    assert report["training"]["steps"] == 2
    assert is_finished(run) and (state_of(run).stage, state_of(run).step) == ("polish", 1)
    assert find_target(run, "rl@1").version == Version("rl", 1) and find_target(run, None).name == "polish"
