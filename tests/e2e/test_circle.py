"""A small synchronous run in two regions, with every process real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollmill.cli.target import find_target
from rollmill.cli.train import run_to_report
from rollmill.evals.suite import EvalConfig
from rollmill.launch.services import evaluate, serving
from rollmill.runs.run import RunDirectory
from rollmill.runs.status import is_finished
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.telemetry import read_events
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import TrajectoryState, Version
from rollmill.weights.reading.weight_store import WeightStore
from tests.e2e.small_run import small_run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_synchronous_run_in_two_regions(tmp_path: Path, midtrained: RunDirectory) -> None:
    run = small_run(tmp_path, "circle", "stages.rl.max_staleness=0", base=midtrained)
    run_to_report(run)
    objects = Objects.open(run.home_store)
    weights, [_, stage] = WeightStore(objects), run.config.stages
    ledger = Ledger(open_database(run.database_url), run.stage_key(stage))
    trajectories = TrajectoryStore(open_database(run.database_url), objects)
    events = read_events(run.events)

    # every step trained on tokens of the version it started from, nothing older
    steps = ledger.steps()
    assert len(steps) == stage.steps and any(step.trajectories for step in steps)
    for step in steps:
        for id in step.trajectories:
            for segment in trajectories.load(id).segments:
                assert {policy.number for policy in segment.policies} == {step.number - 1}
    assert max(event["staleness_max"] or 0 for event in events if event["kind"] == "step") == 0

    # the other region has a store of its own with the same bytes, and both engines applied every version they served
    away = WeightStore(Objects.open(run.store_path("away")))
    newest = Version("rl", stage.steps)
    assert away.manifest(newest).digest == weights.manifest(newest).digest
    assert {event["engine"] for event in events if event["kind"] == "apply"} == {"engine-home", "engine-away"}

    # every rollout ended, and the report has the figures
    rows = trajectories.list()
    assert {row.state for row in rows} <= {TrajectoryState.graded, TrajectoryState.failed}
    assert sum(row.state == TrajectoryState.failed for row in rows) == 0
    report = json.loads((run.path / "report.json").read_text())
    assert report["seed"] == run.config.seed and report["solve_rate_after"] is not None
    assert "<html" in (run.path / "report.html").read_text()

    # the run knows that it is finished
    assert is_finished(run)

    # any version can be evaluated afterwards
    suite, target = EvalConfig(tasks=2, attempts=1, family_tasks=0, greedy=False), find_target(run, "2")
    with serving(run, target, "eval") as (service, cluster):
        results = evaluate(service, cluster, suite, target.version)
    assert [result.attempts for result in results] == [2] and results[0].version == 2
