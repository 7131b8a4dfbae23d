"""The driver of cycles, without the processes that it starts: tests/e2e/test_cycle.py has them."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rollmill.config import override_config
from rollmill.errors import ConfigError, WeightsError
from rollmill.feedback.collect import PRODUCTION
from rollmill.gateway.routing.traffic_splits import SplitStore
from rollmill.launch.extend import change_cycle
from rollmill.realtime.cycle import CycleDriver, learnt_tokens, left_out
from rollmill.realtime.cycle_stage import cycle_run
from rollmill.realtime.gate_run import record_verdict
from rollmill.runs.cycle_journal import Cycle
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.storage.database import open_database, writing
from rollmill.storage.objects import Objects
from rollmill.storage.tables import trajectories
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Version
from rollmill.weights.reading.channels import Channels
from tests.launch.served import published_run
from tests.realtime.test_gate_run import verdict

TO_CANARY = ("distilling", "training", "gating", "canary")
# For each point STATE:WRITE a driver that kills itself there, by SIGKILL: before that write of the state (from 1), or
# as soon as it is in the state (0). They are forked by a process that has opened nothing, so modules are imported once
KILLED = """
import os, signal, sys
from pathlib import Path
from rollmill.realtime.cycle import CycleDriver
from rollmill.runs.run import RunDirectory
from rollmill.gateway.routing.traffic_splits import SplitStore
from rollmill.runs.cycle_journal import Journal
from rollmill.weights.reading.channels import Channels

def drive(point):
    state, writes = "", 0

    def reached():
        if f"{state}:{writes}" == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def counting(write):
        def counted(*arguments, **named):
            nonlocal writes
            writes += 1
            reached()
            return write(*arguments, **named)
        return counted

    def tick(cycle):
        nonlocal state, writes
        state, writes = cycle.state, 0
        reached()

    for owner, name in ((SplitStore, "put"), (Channels, "move"), (Journal, "move")):
        setattr(owner, name, counting(getattr(owner, name)))
    CycleDriver(RunDirectory.open(Path(sys.argv[1])), tick).run_cycle()

for point in sys.argv[2:]:
    child = os.fork()
    if not child:
        drive(point)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != -9:
        sys.exit(f"{point} was not reached: exit code {code}")
"""


def driver_in(run: RunDirectory, *states: str) -> CycleDriver:
    """A driver whose cycle has gone through these states; live is rl@0, the candidate rl@1."""
    channels = Channels(Objects.open(run.home_store))
    channels.move("live", Version("rl", 0))
    channels.move("candidate", Version("rl", 1))
    ticks: list[Cycle] = []

    def tick(cycle: Cycle) -> None:
        ticks.append(cycle)
        assert len(ticks) < 20, f"it waits for ever: {cycle}"

    driver = CycleDriver(run, tick)
    cycle = driver.journal.begin({"since": 0.0}, "test")
    for state in states:
        cycle = driver.journal.move(cycle, state, "test", live="rl@0", candidate="rl@1")
    return driver


class Users:
    """Conversations of production, with what their users said."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._engine = run.id, open_database(run.database_url)
        self._store = TrajectoryStore(self._engine, Objects.open(run.home_store))

    def said(
        self,
        id: str,
        versions: tuple[int, int],
        accepted: bool,
        *,
        early: bool = False,
        of: str = "",
        consent: str = "",
    ) -> None:
        provenance = {"key": "k", "run": of or self._run, "consent": consent or "store"}
        self._store.create(PRODUCTION, "", "", [id], provenance, "production")
        facts = {"line": "rl", "oldest_version": versions[0], "newest_version": versions[1]}
        self._store.finish(id, "payload", None, tokens=2, sampled_tokens=1, segments=1, **facts)
        self._store.add_feedback(id, "accepted", float(accepted), {})
        times = {"finished_at": time.time(), **({"created_at": 1.0} if early else {})}  # ends with what is said of it
        update = trajectories.update().where(trajectories.c.id == id).values(times)
        writing(self._engine, lambda connection: connection.execute(update))


def test_a_canary_ends_with_its_driver(tmp_path: Path) -> None:
    run = published_run(tmp_path, 2, "cycle.share=0.1")
    Channels(Objects.open(run.home_store)).move("live", Version("rl", 0))
    splits, seen = SplitStore(open_database(run.database_url), run.id), []

    def tick(cycle: Cycle) -> None:
        seen.append((cycle.state, splits.get()))
        if len(seen) == 2:
            raise KeyboardInterrupt

    driver = CycleDriver(run, tick)
    cycle = driver.journal.begin({"since": 0.0}, "test")
    for state in ("distilling", "training", "gating", "canary"):
        cycle = driver.journal.move(cycle, state, "test", live="rl@0", candidate="rl@1")
    with pytest.raises(KeyboardInterrupt):
        driver.run_cycle()
    assert seen == [("canary", {}), ("canary", {"rollmill": {"live": 0.9, "candidate": 0.1}})]
    assert splits.get() == {"rollmill": {"live": 1.0}}


def test_only_what_passed_the_gate_becomes_live(tmp_path: Path) -> None:
    run = published_run(tmp_path, 2, "gate.offline_bar=0.2")
    driver, objects = driver_in(run, *TO_CANARY, "promoting"), Objects.open(run.home_store)
    with pytest.raises(WeightsError, match="has not passed the gate"):
        driver.run_cycle()
    record_verdict(objects, Version("rl", 1), verdict("hold", "rl@1", "rl@0"))
    with pytest.raises(WeightsError, match="the gate holds rl@1"):
        driver.run_cycle()
    assert Channels(objects).get("live") == Version("rl", 0)
    record_verdict(objects, Version("rl", 1), verdict("promote", "rl@1", "rl@0"))
    assert driver.run_cycle().state == "promoted"
    assert Channels(objects).get("live") == Version("rl", 1)


def test_a_promotion_that_was_killed_after_live_moved_is_finished(tmp_path: Path) -> None:
    """The verdict is about rl@0, which is not live any more: nothing is asked again, and live moves once."""
    run = published_run(tmp_path, 2, "gate.offline_bar=0.2")
    driver, objects = driver_in(run, *TO_CANARY, "promoting"), Objects.open(run.home_store)
    record_verdict(objects, Version("rl", 1), verdict("promote", "rl@1", "rl@0"))
    Channels(objects).move("live", Version("rl", 1))  # the journal does not know it
    assert driver.run_cycle().state == "promoted"
    assert [entry.version for entry in Channels(objects).history("live")] == [Version("rl", 0), Version("rl", 1)]
    assert driver.journal.history(1)[-1].reason == "rl@1 is live; before it was rl@0"


def test_a_live_version_that_somebody_else_has_set_stays(tmp_path: Path) -> None:
    run = published_run(tmp_path, 3)
    driver, channels = driver_in(run, *TO_CANARY, "promoting"), Channels(Objects.open(run.home_store))
    channels.move("live", Version("rl", 2))
    assert driver.run_cycle().state == "held"
    assert channels.get("live") == Version("rl", 2)
    assert "live was moved to rl@2 by somebody else" in driver.journal.history(1)[-1].reason


def test_after_a_roll_back_nothing_of_the_candidate_is_served(tmp_path: Path) -> None:
    run = published_run(tmp_path, 2)
    driver = driver_in(run, *TO_CANARY, "rolling_back")
    splits = SplitStore(open_database(run.database_url), run.id)
    splits.put("rollmill", {"live": 0.9, "candidate": 0.1})
    assert driver.run_cycle().state == "rolled_back"
    channels = Channels(Objects.open(run.home_store))
    assert channels.get("live") == channels.get("candidate") == Version("rl", 0)
    assert splits.get() == {"rollmill": {"live": 1.0}}


def test_a_canary_counts_what_began_in_it_and_one_version_sampled(tmp_path: Path) -> None:
    """The candidate is accepted always here, and everything that must not count is refused by its user."""
    run = published_run(tmp_path, 2, "cycle.settle_s=0", "cycle.canary_sessions=4", "cycle.max_loss=1.0")
    driver, users = driver_in(run, *TO_CANARY), Users(run)
    for number in range(4):
        users.said(f"live-{number}", (0, 0), True)
        users.said(f"candidate-{number}", (1, 1), True)
        users.said(f"early-{number}", (1, 1), False, early=True)
        users.said(f"both-{number}", (0, 1), False)
        users.said(f"foreign-{number}", (1, 1), False, of="another")
    cycle = driver.run_cycle()
    four = {"accepted": 4, "sessions": 4, "all": 4}
    assert (cycle.facts["canary"]["live"], cycle.facts["canary"]["candidate"]) == (four, four)
    assert cycle.state == "promoted"
    assert "accepted 4 of 4 candidate sessions" in driver.journal.history(1)[-1].reason, "its end says why"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("accepted", "kills", "live", "candidate"),
    [
        (0, "canary:2 canary:3 rolling_back:1 rolling_back:2 rolling_back:3 rolled_back:0", 0, 0),
        (5, "canary:3 held:0", 0, 1),
        (10, "canary:3 promoting:1 promoting:2 promoted:0", 1, 1),
    ],
)
def test_a_kill_between_any_two_writes_changes_nothing(
    tmp_path: Path, accepted: int, kills: str, live: int, candidate: int
) -> None:
    """Ten users of each version decide the canary: `accepted` of the candidate's. rolling_back:3 and promoting:2 are
    after the move of a channel and before the journal's. Once over, a cycle is followed by the next one."""
    overrides = ("cycle.settle_s=0", "cycle.canary_sessions=10", "cycle.max_loss=0.9", "gate.offline_bar=0.2")
    run = published_run(tmp_path, 2, *overrides)
    journal, users, objects = driver_in(run, *TO_CANARY).journal, Users(run), Objects.open(run.home_store)
    record_verdict(objects, Version("rl", 1), verdict("promote", "rl@1", "rl@0"))
    for number in range(10):
        users.said(f"live-{number}", (0, 0), True)
        users.said(f"candidate-{number}", (1, 1), number < accepted)
    words = [sys.executable, "-c", KILLED, str(run.path), *kills.split(), "collecting:0"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    states = [move.state for move in journal.history(1)]
    passed = dict.fromkeys(point.partition(":")[0] for point in kills.split())
    assert states == ["collecting", *TO_CANARY[:-1], *passed], "every state once, whatever was killed"
    next_one = journal.current()
    assert next_one is not None and (next_one.number, next_one.state) == (2, "collecting")
    channels = Channels(objects)
    moved = {name: [entry.version.number for entry in channels.history(name)] for name in ("live", "candidate")}
    assert moved == {"live": [0, *[live] * (live != 0)], "candidate": [1, *[candidate] * (candidate != 1)]}
    assert SplitStore(open_database(run.database_url), run.id).get() == {"rollmill": {"live": 1.0}}


@pytest.mark.parametrize("credit", ["turns", "decayed"])
def test_a_cycle_credits_answers_whatever_the_last_stage_does(tmp_path: Path, credit: str) -> None:
    run = published_run(tmp_path, 1, f"stages.rl.credit={credit}")
    _, stage = cycle_run(run, 1, "rl@0", 300)
    assert (stage.credit, stage.baseline) == ("answers", "none")  # type: ignore[attr-defined]
    other = override_config(RunConfig, run.config.model_dump(mode="json"), ["cycle.credit=path"], "test")
    assert cycle_run(run.rewrite(other), 1, "rl@0", 300)[1].credit == "path"  # type: ignore[attr-defined]


def test_a_stage_that_cannot_train_is_refused_before_anything_is_collected(tmp_path: Path) -> None:
    run = published_run(tmp_path, 1)
    Channels(Objects.open(run.home_store)).move("live", Version("rl", 0))
    wrong = run.config.stages[-1].model_copy(update={"replay_plausibility": 0.5, "router_replay": False})
    changed = replace(run, config=run.config.model_copy(update={"stages": (*run.config.stages[:-1], wrong)}))
    driver = CycleDriver(changed)
    with pytest.raises(ConfigError, match="the stage of cycle-1"):
        driver.run_cycle()
    assert driver.journal.current() is None


def test_a_cycle_says_how_many_conversations_it_may_not_train_on(tmp_path: Path) -> None:
    run = published_run(tmp_path, 1, "cycle.settle_s=0")
    Channels(Objects.open(run.home_store)).move("live", Version("rl", 0))
    users, told = Users(run), list[str]()
    for number in range(3):
        users.said(f"private-{number}", (0, 0), True)
    users.said("agreed", (0, 0), True, consent="train")

    def tick(cycle: Cycle) -> None:
        told.append(left_out(driver.found))
        if len(told) > 2:
            raise KeyboardInterrupt

    driver = CycleDriver(run, tick)
    with pytest.raises(KeyboardInterrupt):
        driver.run_cycle()
    assert "3 without consent to training, 1 too few to compare with" in told[-1]
    assert "rollmill keys create --consent train" in told[-1]


def test_settings_change_between_cycles_only(tmp_path: Path) -> None:
    run = published_run(tmp_path, 2)
    with pytest.raises(ConfigError, match="only, not `seed`"):
        change_cycle(run, ["cycle.share=0.2", "seed=3"])
    changed = change_cycle(run, ["cycle.share=0.2", "gate.offline_bar=0.1"])
    assert changed.config.cycle.share == 0.2 and RunDirectory.open(run.path).config == changed.config
    driver_in(run, "distilling", "training")
    with pytest.raises(ConfigError, match="cycle 1 is training"):
        change_cycle(changed, ["cycle.steps=2"])
    assert RunDirectory.open(run.path).config == changed.config


def test_tokens_that_a_cycle_learns_from_are_counted_and_the_others_by_reason() -> None:
    first = {"kind": "step", "step": 1, "trained_tokens": 90, "masked": {"sampled at temperature 0": 10, "stale": 0}}
    second = {"kind": "step", "step": 2, "trained_tokens": 5, "masked": {"sampled at temperature 0": 1}}
    lost = {"kind": "step", "step": 3, "from_ledger": True}
    told = learnt_tokens([{"kind": "busy"}, first, second, second, lost])
    assert told == {"trained on": 95, "left out (sampled at temperature 0)": 11}
    assert learnt_tokens([lost]) == {"trained on": 0}
