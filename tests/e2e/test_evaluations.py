"""Versions are evaluated while training goes on, also when everything is killed in the middle of it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rollmill.runs.run import RunDirectory
from rollmill.runs.stages import attempts_folder, results_key
from rollmill.runs.status import state_of
from rollmill.telemetry import read_events
from rollmill.types import LedgerState, TrajectoryState
from tests.e2e.small_run import BRIEF_EVALS, ONE_REGION, small_run
from tests.e2e.test_kill import start, stores, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DIALS = (
    *("stages.rl.steps=6", "stages.rl.groups_per_step=2", "evals.every=2"),
    *(*ONE_REGION, *BRIEF_EVALS, "evals.tasks=6", "evals.attempts=2", "evals.every_concurrency=1"),
)


def results_of(run: RunDirectory, number: int) -> list[dict[str, Any]]:
    return list(json.loads(run.objects().get(results_key(run, f"during-rl-{number}"))))


def check_no_attempt_is_trained_on(run: RunDirectory) -> None:
    _, ledger, trajectories = stores(run)
    used = {id for step in ledger.steps() for id in (*step.trajectories, *step.excluded)}
    for label in ("during-rl-2", "during-rl-4"):
        rows = trajectories.list(run=f"{run.id}/eval-{label}", limit=1000)
        assert not {row.id for row in rows} & used
    assert ledger.counts()[LedgerState.leased] == 0


@pytest.mark.parametrize("engines", ["own", "run"])
def test_an_evaluation_goes_on_after_everything_is_killed(
    tmp_path: Path, midtrained: RunDirectory, engines: str
) -> None:
    """With an engine of its own every token is of the version; with those of the run each attempt says of which."""
    run = small_run(tmp_path, "every", *DIALS, f"evals.engines={engines}", base=midtrained)
    objects, (weights, _, trajectories) = run.objects(), stores(run)
    folder = attempts_folder(run, "during-rl-2", 2)
    process = start(run)
    try:
        wait_for(lambda: bool(objects.list(folder)), process, run)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kept = {json.loads(objects.get(key))["trajectory"] for key in objects.list(folder)}
        process = start(run)
        assert process.wait() == 0, (run.path / "train.out").read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    left_out = {event["version"] for event in read_events(run.events) if event["kind"] == "eval_left_out"}
    assert kept and left_out <= {2, 4}
    for number in {2, 4} - left_out:
        (result,) = results_of(run, number)
        assert (result["version"], result["attempts"], result["split"]) == (number, 12, "heldout")
        rows = trajectories.list(run=f"{run.id}/eval-during-rl-{number}", limit=1000)
        graded = [row for row in rows if row.state == TrajectoryState.graded]
        assert len(graded) == 12, "no attempt was made twice"
        assert number != 2 or kept <= {row.id for row in graded}
        spans = [each["versions"] for made in result["conduct"].values() for each in made]
        assert sorted(spans) == sorted([row.oldest_version, row.newest_version] for row in graded)
        assert (result["oldest"], result["newest"]) == (min(low for low, _ in spans), max(high for _, high in spans))
        assert result["oldest"] >= number and (engines == "run" or result["newest"] == number)
    for number in left_out:
        assert results_of(run, number) == []
    assert engines == "run" or 2 not in left_out, "an engine of its own holds the version, however late it is"
    check_no_attempt_is_trained_on(run)
    assert objects.list(f"evals/{run.id}/attempts") == []
    state = state_of(run)
    assert state.word == "finished" and weights.head("rl") == 6
