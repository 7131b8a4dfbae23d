"""A run trains on what another run has played, with every process real."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollmill.cli.train import run_to_report
from rollmill.runs.admit_experience import admit_trajectories
from rollmill.runs.prepare import restore_tokenizer
from rollmill.runs.run import RunDirectory
from rollmill.telemetry import read_events
from tests.e2e.small_run import BRIEF_EVALS, ONE_REGION, small_run
from tests.e2e.test_kill import stores, wait_for

SETTINGS = ("stages.rl.steps=1", "stages.rl.max_staleness=0", *ONE_REGION, *BRIEF_EVALS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_trains_on_the_trajectories_of_another(tmp_path: Path, midtrained: RunDirectory) -> None:
    """Both runs start from the same weights, so rl@0 of the first is rl@0 of the second. Of the second only the trainer
    runs: all it can train on was played by the first."""
    first = small_run(tmp_path, "first", *SETTINGS, base=midtrained)
    run_to_report(first)
    _, ledger, played = stores(first)
    step = ledger.step(1)
    assert step is not None and step.groups
    count = len(step.groups)
    rows = [played.get(id) for id in step.trajectories]

    settings = ("stages.rl.steps=2", f"stages.rl.groups_per_step={count}", *SETTINGS[1:])
    second = small_run(tmp_path, "second", *settings, base=midtrained)
    restore_tokenizer(second)
    weights, books, store = stores(second)
    command = [sys.executable, "-m", "rollmill.launch.role", "trainer", str(second.path), "rl"]
    with (second.path / "train.out").open("wb") as out:
        trainer = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: weights.head("rl") is not None, trainer, second)
        verdicts = admit_trajectories(second, "rl", rows, first)
        assert {verdict.decision for verdict in verdicts} == {"admitted"} and len(verdicts) == count
        wait_for(lambda: books.committed() == 1, trainer, second)
        late = {row.group_id for row in rows}
        evaluated = [row for row in played.list(split="heldout") if row.state == "graded"]
        closed = [
            played.list(run=ledger.run, group_id=group.id)[0] for group in ledger.groups() if group.id not in late
        ]
        again = admit_trajectories(second, "rl", [*rows, *evaluated, *closed], first)
    finally:
        trainer.terminate()
        trainer.wait()

    taken = books.step(1)
    assert taken is not None and set(taken.groups) == late and taken.trajectories.keys() == step.trajectories.keys()
    (event,) = [event for event in read_events(second.events) if event["kind"] == "step"]
    assert event["staleness_max"] == 0 and event["masked"] == {} and event["groups"] == count
    # what is in the ledger stays as it was; what comes too late is stale; evaluations stay out
    decisions = {verdict.group_id: verdict for verdict in again}
    assert {decisions[group].reason for group in late} == {"in the ledger already: trained"}
    assert {decisions[row.group_id].decision for row in evaluated} == {"refused"}
    assert {decisions[row.group_id].decision for row in closed} <= {"stale"}
    counts = books.counts()
    stale = sum(len(verdict.ids) for verdict in again if verdict.decision == "stale")
    entered = [row for group in books.groups() for row in books.entered(group.id)]
    assert sum(counts.values()) == len(entered) and counts["stale"] == stale
    assert {row.id for row in entered} <= {row.id for row in store.list(limit=1000)}
