"""Promise 5 on a whole run: after kills at random moments nothing is lost and nothing is trained twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmill.runs.run import RunDirectory
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.telemetry import read_events
from rollmill.training.stage import RolloutSettings
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import GroupState, TrajectoryState, Version
from rollmill.weights.reading.weight_store import WeightStore
from tests.e2e.small_run import BRIEF_EVALS, small_run

pytestmark = pytest.mark.slow

VICTIMS = ("trainer", "engine-home", "gateway", "dispatcher", "engine-away", "everything")


def start(run: RunDirectory) -> subprocess.Popen[bytes]:
    """`rollmill train --resume`, which also starts a run directory that was only created."""
    return subprocess.Popen(
        [sys.executable, "-c", "from rollmill.cli.main import main; main()", "train", "--resume", str(run.path)],
        stdout=(run.path / "train.out").open("ab"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def stage_key(run: RunDirectory) -> str:
    return run.stage_key(run.config.stages[-1])


def stores(run: RunDirectory) -> tuple[WeightStore, Ledger, TrajectoryStore]:
    objects = Objects.open(run.home_store)
    database = open_database(run.database_url)
    return WeightStore(objects), Ledger(database, stage_key(run)), TrajectoryStore(database, objects)


def pid_of(run: RunDirectory, role: str) -> int | None:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                title = (entry / "cmdline").read_bytes().decode().rstrip("\0")
            except OSError:
                continue
            if title == f"rollmill {role} {run.path}":
                return int(entry.name)
    return None


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], run: RunDirectory) -> None:
    """The time limit is that of the test."""
    while not condition():
        assert process.poll() is None, (run.path / "train.out").read_text()[-3000:]
        time.sleep(0.05)


def finished_ids(trajectories: TrajectoryStore, run: RunDirectory) -> set[str]:
    rows = trajectories.list(run=stage_key(run), limit=100_000)
    return {row.id for row in rows if row.state in (TrajectoryState.finished, TrajectoryState.graded)}


def restarted(run: RunDirectory) -> set[str]:
    return {event["target"] for event in read_events(run.events) if event["kind"] == "restart"}


def digests(weights: WeightStore, line: str) -> dict[int, str]:
    return {manifest.number: manifest.digest for manifest in weights.versions(line)}


@pytest.mark.timeout(900)
def test_a_run_survives_the_death_of_every_process(tmp_path: Path, midtrained: RunDirectory) -> None:
    dials = ("stages.rl.steps=8", "stages.rl.groups_per_step=2", *BRIEF_EVALS)
    run = small_run(tmp_path, "killed", *dials, base=midtrained)
    weights, ledger, trajectories = stores(run)
    draw = random.Random(os.urandom(8))
    process = start(run)
    seen_digests: dict[int, str] = {}
    seen_finished: set[str] = set()
    try:
        for number, victim in enumerate(VICTIMS):
            wait_for(lambda number=number: ledger.committed() > number, process, run)  # type: ignore[misc]
            time.sleep(draw.uniform(0, 0.5))
            if victim == "everything":  # the supervisor dies too: it must have recorded the other restarts by then
                wait_for(lambda: restarted(run) >= set(VICTIMS[:-1]), process, run)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            else:
                pid = pid_of(run, victim)
                assert pid is not None, f"{victim} is not running"
                os.kill(pid, signal.SIGKILL)
            seen_digests |= digests(weights, "rl")
            seen_finished |= finished_ids(trajectories, run)
            if victim == "everything":
                process = start(run)
        assert process.wait() == 0, (run.path / "train.out").read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    check_stores(run, seen_digests, seen_finished)
    check_report(run)
    check_restarts(run)


def check_report(run: RunDirectory) -> None:
    """Every step is in it, also one whose trainer was killed before it could tell."""
    figures = json.loads((run.path / "report.json").read_text())
    assert figures["training"]["steps"] == run.config.stages[-1].steps


def check_stores(run: RunDirectory, seen_digests: dict[int, str], seen_finished: set[str]) -> None:
    weights, ledger, trajectories = stores(run)
    steps = ledger.steps()
    assert [step.number for step in steps] == list(
        range(1, run.config.stages[-1].steps + 1)
    ) and ledger.committed() == run.config.stages[-1].steps
    # nothing is trained twice
    uses = Counter(id for step in steps for id in step.trajectories)
    assert uses and max(uses.values()) == 1
    # nothing that was finished is lost: it is graded, and a step lists it or its group was closed with a reason
    rows = {row.id: row for row in trajectories.list(run=stage_key(run), limit=100_000)}
    lost = {id: (rows[id].state, rows[id].reason) for id in seen_finished if rows[id].state != TrajectoryState.graded}
    assert seen_finished and not lost
    decided = {id for step in steps for id in (*step.trajectories, *step.excluded)}
    groups = ledger.groups()
    closed = {group.id for group in groups} - {id for step in steps for id in step.groups}
    assert all(id in decided or rows[id].group_id in closed for id in seen_finished)
    assert {rows[id].group_id for id in decided} == {group.id for group in groups} - closed
    # every group ended, in a step or closed; every trajectory is in exactly one final state
    assert {group.state for group in groups} == {GroupState.final}
    trained = sum(len(step.groups) for step in steps)
    stage = run.config.stages[-1]
    assert isinstance(stage, RolloutSettings)
    assert 0 < trained <= stage.steps * stage.groups_per_step and trained + len(closed) == len(groups)
    assert len(groups) <= stage.pace(stage.steps).most_started(stage.steps - 1)
    counts = ledger.counts()
    assert sum(counts.values()) == len(rows) and counts["admitted"] == counts["leased"] == 0
    # no token is over the staleness bound, whoever died
    assert all(event.get("masked_stale", 0) == 0 for event in read_events(run.events) if event["kind"] == "step")
    # published versions kept their digests, and all of them verify
    after = digests(weights, "rl")
    assert {number: after[number] for number in seen_digests} == seen_digests
    assert sorted(after) == list(range(run.config.stages[-1].steps + 1)) and len(set(after.values())) > 1
    assert all(ok for _, ok, _ in weights.verify("rl"))
    # every sampled token names weights that exist
    for id in seen_finished:
        for segment in trajectories.load(id).segments:
            for policy in segment.policies:
                assert weights.manifest(Version(policy.line, policy.number), policy.form).digest == policy.digest


def check_restarts(run: RunDirectory) -> None:
    # each process that was killed was restarted once, no other died with it, and the report counts them
    restarts = [event for event in read_events(run.events) if event["kind"] == "restart"]
    died = sorted((event["target"], event["exit_code"]) for event in restarts)
    assert died == sorted((victim, -signal.SIGKILL) for victim in VICTIMS[:-1])
    assert json.loads((run.path / "report.json").read_text())["restarts"] == len(restarts)
