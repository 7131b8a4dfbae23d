"""`[balance] scale = "auto"` in a real run on this host: more engines while the trainer waits, fewer while they do."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from benchmarks.day_night import KIND
from rollmill.launch.autoscaler import read_decisions
from rollmill.launch.supervise import drive
from rollmill.runs.run import RunDirectory
from rollmill.storage.database import open_database
from rollmill.telemetry import read_events
from rollmill.trajectories.ledger import Ledger
from rollmill.types import GroupState
from tests.e2e.small_run import BRIEF_EVALS, small_run
from tests.e2e.test_kill import check_stores, pid_of, stage_key
from tests.launch.chance import TINY, tiny_base


def balanced_run(root: Path) -> RunDirectory:
    """A run whose first stage is over, and whose engines are slowed."""
    settings = (
        f"engines=[{{kind='{KIND}'}}]",
        "engine.max_batch=8",
        "stages.rl.groups_per_step=2",
        "stages.rl.steps=10",
        "balance.scale=auto",
        "balance.window_s=3",
        "balance.most=4",
    )
    return small_run(root, "balanced", *BRIEF_EVALS, *TINY, *settings, base=tiny_base(root))


class LongStep:
    """Stops the trainer in the middle of a step once there is a second engine, until one is taken away: a step that
    takes long. `tick` is called by the supervisor."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._ledger = run, Ledger(open_database(run.database_url), stage_key(run))
        self._trainer: int | None = None
        self.over = False

    def tick(self) -> None:
        done = [each for each in read_decisions(self._run) if each["done"]]
        if self._trainer is None and done and self._ledger.groups(GroupState.leased):
            self._trainer = pid_of(self._run, "trainer")
            if self._trainer is not None:
                os.kill(self._trainer, signal.SIGSTOP)
        elif self._trainer is not None and not self.over and done[-1]["engines"] < done[-1]["before"]:
            self.go_on()

    def go_on(self) -> None:
        self.over = True
        if self._trainer is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._trainer, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_number_of_engines_follows_a_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode time is simulated, so that engines speed each other up on few cores; so is the trainer's long step."""
    run = balanced_run(tmp_path)
    step = LongStep(run)
    # decoding that is simulated needs no cores, so the balance sees that there are some left
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(64)))
    try:
        drive(run, step.tick)
    finally:
        step.go_on()

    events = read_events(run.events)
    changes = [event for event in events if event["kind"] == "balance" and event["done"]]
    more = [event for event in changes if event["engines"] > event["before"]]
    fewer = [event for event in changes if event["engines"] < event["before"]]
    assert more and more[0]["waits"] > 0.1 and "more engines keep the trainer busy" in more[0]["reason"]
    assert fewer and fewer[0]["idle"] > 0.3 and "fewer engines are enough" in fewer[0]["reason"]
    # what was decided was done: the supervisor changed the number, and the new engine sampled
    assert [event["engines"] for event in changes[:1]] == [
        event["engines"] for event in events if event["kind"] == "scale"
    ][:1]
    assert "engine-home-2" in {event["engine"] for event in events if event["kind"] == "engine"}
    assert all(1 <= event["engines"] <= run.config.balance.most for event in changes)
    check_stores(
        run,
        {},
        {id for step in Ledger(open_database(run.database_url), stage_key(run)).steps() for id in step.trajectories},
    )
