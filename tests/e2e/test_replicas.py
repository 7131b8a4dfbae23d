"""Promise 5 with several gateways and dispatchers: some of them are killed in the middle of a run."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from rollmill.runs.run import RunDirectory
from rollmill.telemetry import read_events
from tests.e2e.small_run import BRIEF_EVALS, ONE_REGION, small_run
from tests.e2e.test_kill import check_stores, digests, finished_ids, pid_of, start, stores, wait_for

pytestmark = pytest.mark.slow
VICTIMS = ("gateway-2", "dispatcher-2", "gateway", "dispatcher")


@pytest.mark.timeout(900)
def test_a_run_survives_the_death_of_gateways_and_dispatchers(
    tmp_path: Path, midtrained: RunDirectory, database_url: str
) -> None:
    dials = ("stages.rl.steps=6", "stages.rl.groups_per_step=2", "gateway.replicas=2", "dispatcher.replicas=2")
    dials = (*dials, f"database={database_url!r}", *ONE_REGION, *BRIEF_EVALS)
    run = small_run(tmp_path, "replicas", *dials, base=midtrained)
    weights, ledger, trajectories = stores(run)
    draw = random.Random(os.urandom(8))
    seen_digests: dict[int, str] = {}
    seen_finished: set[str] = set()
    process = start(run)
    try:
        for number, victim in enumerate(VICTIMS):
            wait_for(lambda number=number: ledger.committed() > number, process, run)  # type: ignore[misc]
            time.sleep(draw.uniform(0, 0.5))
            pid = pid_of(run, victim)
            assert pid is not None, f"{victim} is not running"
            os.kill(pid, signal.SIGKILL)
            seen_digests |= digests(weights, "rl")
            seen_finished |= finished_ids(trajectories, run)
        assert process.wait() == 0, (run.path / "train.out").read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    check_stores(run, seen_digests, seen_finished)
    events = read_events(run.events)
    restarts = sorted((event["target"], event["exit_code"]) for event in events if event["kind"] == "restart")
    assert restarts == sorted((victim, -signal.SIGKILL) for victim in VICTIMS)
    players = {event["process"] for event in events if event["kind"] == "rollout" and event["split"] == "train"}
    assert players == {"dispatcher", "dispatcher-2"}, "both have played"
