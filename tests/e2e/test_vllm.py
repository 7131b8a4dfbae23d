"""A small run whose only engine is a real vLLM server. `scripts/test --vllm` runs it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollmill.cli.train import run_to_report
from rollmill.runs.run import RunDirectory
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.telemetry import read_events
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import TrajectoryState
from tests.e2e.small_run import BRIEF_EVALS, small_run

ENGINES = 'engines=[{kind="vllm"}]'


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("ROLLMILL_TEST_VLLM"), reason="scripts/test --vllm runs it")
@pytest.mark.timeout(1200)
def test_a_run_learns_from_tokens_of_vllm(tmp_path: Path, midtrained: RunDirectory) -> None:
    run = small_run(tmp_path, "vllm", ENGINES, *BRIEF_EVALS, "stages.rl.max_staleness=1", base=midtrained)
    run_to_report(run)
    objects, stage = Objects.open(run.home_store), run.config.stages[-1]
    steps = Ledger(open_database(run.database_url), run.stage_key(stage)).steps()
    trajectories = TrajectoryStore(open_database(run.database_url), objects)
    events = read_events(run.events)

    # every step trained on tokens of versions that are young enough, and each token names its own
    assert len(steps) == stage.steps and any(step.trajectories for step in steps)
    for step in steps:
        for id in step.trajectories:
            for segment in trajectories.load(id).segments:
                assert segment.spans and all(
                    span.engine == "engine-home" and not span.missing for span in segment.spans
                )
                assert {policy.number for policy in segment.policies} <= {step.number - 2, step.number - 1}
    assert max(event["staleness_max"] or 0 for event in events if event["kind"] == "step") <= 1

    # the engine applied the versions one after the other, and no rollout was lost
    applied = [event["version"] for event in events if event["kind"] == "apply"]
    assert applied == sorted(applied) and applied[-1] >= stage.steps - 1
    rows = trajectories.list()
    assert rows and {row.state for row in rows} == {TrajectoryState.graded}
