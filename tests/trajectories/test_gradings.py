"""Several gradings of one trajectory, what counts as solved, and what is taken out of training."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from rollmill.errors import TrajectoryChanged, TrajectoryError
from rollmill.training.rl.baseline import GroupBaseline
from rollmill.training.rl.selection import weigh_groups
from rollmill.trajectories.gradings import begin_grading, record_group
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.query import TrajectoryQuery
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Grade, LedgerState, Version
from tests.trajectories.test_ledger import assert_adds_up, record, settle, start

SEVERAL = Grade(0.7, {"solved": 1.0, "tests": 1.0, "length": -0.3})  # solved, though the sum is below 1
UNSOLVED = Grade(1.2, {"solved": 0.0, "tests": 0.0, "style": 1.2})


def test_the_first_reward_decides_what_is_solved_also_in_listings(store: TrajectoryStore, ledger: Ledger) -> None:
    start(ledger, "a", size=3)
    for number, reward in enumerate((SEVERAL, UNSOLVED, Grade(1.0))):
        store.finish(f"a-{number}", f"p/{number}", None, tokens=4, sampled_tokens=2, segments=1)
        store.grade(f"a-{number}", reward)
        assert store.get(f"a-{number}").solved is reward.solved
    assert {row.id for row in store.find(TrajectoryQuery(solved=True))} == {"a-0", "a-2"}
    assert {row.id for row in store.find(TrajectoryQuery(solved=False))} == {"a-1"}
    store.grade("a-1", SEVERAL)
    assert store.get("a-1").solved


def test_a_group_gets_a_new_grading_whole(engine: sa.Engine, store: TrajectoryStore, ledger: Ledger) -> None:
    start(ledger, "a")
    settle(store, ledger, "a")
    number = begin_grading(engine, "run", [{"kind": "calls"}])
    with pytest.raises(TrajectoryChanged):
        record_group(engine, "run", "a", {"a-0": SEVERAL}, number)
    with pytest.raises(TrajectoryError):  # cannot be stored
        record_group(engine, "run", "a", {"a-0": SEVERAL, "a-1": Grade(float("nan"))}, number)
    assert {row.grading for row in store.list(group_id="a")} == {None}
    record_group(engine, "run", "a", {"a-0": UNSOLVED, "a-1": SEVERAL}, number)
    rows = {row.id: row for row in store.list(group_id="a")}
    assert [(rows[id].reward, rows[id].solved, rows[id].grading) for id in ("a-0", "a-1")] == [
        (1.2, False, number),
        (0.7, True, number),
    ]
    assert [reward.value for _, reward in store.rewards(["a-0"])["a-0"]] == [1.0, 1.2], "the old one stays"
    assert begin_grading(engine, "run", []) == number + 1


def test_a_group_that_is_still_running_is_not_graded_again(
    engine: sa.Engine, store: TrajectoryStore, ledger: Ledger
) -> None:
    start(ledger, "a")
    store.finish("a-0", "p/0", None, tokens=4, sampled_tokens=2, segments=1)
    store.grade("a-0", Grade(1.0))
    with pytest.raises(TrajectoryChanged):
        record_group(engine, "run", "a", {"a-0": SEVERAL}, begin_grading(engine, "run", []))


def test_a_step_keeps_the_rewards_it_was_written_with(
    engine: sa.Engine, store: TrajectoryStore, ledger: Ledger
) -> None:
    start(ledger, "a")
    settle(store, ledger, "a")
    pinned = record(ledger, 1, "a")
    # the grading comes between reading and writing: both are complete, so the step is written as it was chosen
    record_group(engine, "run", "a", {"a-0": SEVERAL, "a-1": UNSOLVED}, begin_grading(engine, "run", []))
    ledger.write_step(pinned)
    ledger.commit_step(1, Version("rl", 1), "d")
    assert ledger.step(1) == pinned


def test_no_step_mixes_two_gradings(engine: sa.Engine, store: TrajectoryStore, ledger: Ledger) -> None:
    start(ledger, "a")
    settle(store, ledger, "a")
    old = record(ledger, 1, "a").trajectories
    record_group(engine, "run", "a", {"a-0": SEVERAL, "a-1": UNSOLVED}, begin_grading(engine, "run", []))
    new = record(ledger, 1, "a").trajectories
    with pytest.raises(TrajectoryError, match="two gradings"):
        ledger.write_step(record(ledger, 1, "a", trajectories={"a-0": old["a-0"], "a-1": new["a-1"]}))
    store.grade("a-0", Grade(0.0))  # one trajectory alone: the group's newest rewards are a mixture now
    graded, excluded = weigh_groups(ledger.members(["a"]), GroupBaseline(leave_one_out=False), lambda rows: False)
    assert not graded and {state for state, _ in excluded.values()} == {LedgerState.dropped}
    assert "graded again" in excluded["a-0"][1]
    ledger.write_step(record(ledger, 1, "a", trajectories=new))


def test_a_quarantine_takes_a_trajectory_out_of_its_group_and_no_step_loses_one(
    store: TrajectoryStore, ledger: Ledger, engine: sa.Engine
) -> None:
    for group in "ab":
        start(ledger, group, size=3)
        settle(store, ledger, group)
    store.quarantine("a-1", "it read the hidden tests")
    baseline = GroupBaseline(leave_one_out=False)
    graded, excluded = weigh_groups(ledger.members(["a"]), baseline, lambda rows: False)
    assert {id: advantage for id, (_, _, advantage) in graded.items()} == {"a-0": 0.5, "a-2": -0.5}
    assert excluded == {"a-1": (LedgerState.dropped, "quarantined: it read the hidden tests")}
    with pytest.raises(TrajectoryError, match=r"a-0 is graded, with reward 1\.0, and cannot be released"):
        store.release("a-0")
    store.release("a-1")
    row = store.get("a-1")
    assert (row.state, row.reason, row.reward) == ("graded", None, 0.0)
    assert len(weigh_groups(ledger.members(["a"]), baseline, lambda rows: False)[0]) == 3
    ledger.write_step(record(ledger, 1, "b"))
    with pytest.raises(TrajectoryError, match="b-0 is leased to step 1"):
        store.quarantine("b-0", "too late")
    assert store.get("b-0").state == "graded" and store.get("b-0").reason is None
    ledger.commit_step(1, Version("rl", 1), "digest")
    store.quarantine("b-0", "for exports and other runs")
    assert store.get("b-0").state == "quarantined" and ledger.counts()["trained"] == 3
    assert_adds_up(ledger, engine)
