"""The run's ledger: the bound on open groups, create-only steps, nothing trained twice, totals that add up."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from rollmill.errors import TrajectoryChanged, TrajectoryError
from rollmill.storage import tables
from rollmill.storage.database import reading, writing
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.staleness import Pace
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Grade, GroupState, LedgerState, StepRecord, Version
from tests.trajectories.build import start_group

DROPPED = (LedgerState.dropped, "failed: machine")
NO_SIGNAL = (LedgerState.no_signal, "all rewards equal")


def start(ledger: Ledger, group: str, size: int = 2, bound: int = 100) -> bool:
    ids = [f"{group}-{n}" for n in range(size)]
    return (
        start_group(ledger, group, "task", size, pace=Pace(bound, size, 0), ids=ids, provenance={"split": "train"})
        is not None
    )


def settle(store: TrajectoryStore, ledger: Ledger, group: str) -> None:
    for row in ledger.members([group])[group]:
        store.finish(row.id, f"p/{row.id}", None, tokens=4, sampled_tokens=2, segments=1)
        store.grade(row.id, Grade(float(row.id.endswith("0"))))
    ledger.group_ready(group)


def record(ledger: Ledger, number: int, *groups: str, **changes: object) -> StepRecord:
    rows = [row for members in ledger.members(groups).values() for row in members]
    leased = {row.id: (row.reward_id or 0, row.reward or 0.0, (row.reward or 0.0) - 0.5) for row in rows}
    return dataclasses.replace(StepRecord(ledger.run, number, "rl", groups, leased, {}, 12.5), **changes)  # type: ignore[arg-type]


def assert_adds_up(ledger: Ledger, engine: sa.Engine) -> None:
    """Every trajectory of the run is in exactly one ledger state, and states agree with steps, groups and commits."""
    with reading(engine) as connection:
        total = connection.execute(
            sa.select(sa.func.count()).where(tables.trajectories.c.run == ledger.run)
        ).scalar_one()
    counts = ledger.counts()
    assert set(counts) == set(LedgerState) and sum(counts.values()) == total
    steps = ledger.steps()
    leased = [id for step in steps for id in step.trajectories]
    assert len(leased) == len(set(leased)) == counts["leased"] + counts["trained"]
    assert counts["trained"] == sum(len(step.trajectories) for step in steps if step.number <= ledger.committed())
    states = [group.state for group in ledger.groups()]
    assert ledger.open_groups() == len(states) - states.count(GroupState.final)


def test_the_bound(store: TrajectoryStore, ledger: Ledger) -> None:
    assert start(ledger, "a", bound=2) and start(ledger, "b", bound=2)
    assert not start(ledger, "c", bound=2)
    assert [row.id for row in store.list(group_id="c")] == []  # a refusal changes nothing
    settle(store, ledger, "a")
    assert not start(ledger, "c", bound=2)  # waiting counts
    ledger.write_step(record(ledger, 1, "a"))
    assert not start(ledger, "c", bound=2)  # leased counts: its version is not published
    ledger.commit_step(1, Version("rl", 1), "digest")
    assert start(ledger, "c", bound=2) and ledger.open_groups() == 2


def test_trained_and_open_groups_never_exceed_what_the_steps_take(store: TrajectoryStore, ledger: Ledger) -> None:
    pace = Pace(2, 1, max_staleness=5, steps=3)

    def fill(prefix: str) -> int:
        ids = [f"{prefix}{number}" for number in range(20)]
        return sum(start_group(ledger, id, "task", 1, pace=pace, ids=[f"{id}-0"]) is not None for id in ids)

    assert fill("a") == 6
    ledger.close_group("a0", {"a0-0": DROPPED}, 1)
    assert fill("b") == 1, "a closed group is replaced"
    for group in ("a1", "a2"):
        settle(store, ledger, group)
    ledger.write_step(record(ledger, 1, "a1", "a2"))
    assert fill("c") == 0
    ledger.commit_step(1, Version("rl", 1), "digest")
    assert fill("d") == 0 and ledger.open_groups() == 4
    for group in ("a3", "a4"):
        settle(store, ledger, group)
    ledger.write_step(record(ledger, 2, "a3"))  # a short step: what it did not take is too much for those that follow
    ledger.commit_step(2, Version("rl", 2), "digest")
    assert fill("e") == 0 and ledger.open_groups() == 3


def test_runs_do_not_share_their_bound_or_ledger(engine: sa.Engine, ledger: Ledger) -> None:
    other = Ledger(engine, "other")
    assert start(ledger, "a", bound=1) and start(other, "b", bound=1)
    assert ledger.counts()["admitted"] == other.counts()["admitted"] == 2
    assert Ledger(engine, "run").open_groups() == 1  # opened again: the same ledger


def test_groups_from_start_to_commit(store: TrajectoryStore, ledger: Ledger, engine: sa.Engine) -> None:
    for group in "abc":
        start(ledger, group)
        assert_adds_up(ledger, engine)
    for group in "ba":
        settle(store, ledger, group)
    untaken = ledger.untaken_groups()
    assert [(group.id, group.state) for group in untaken] == [("a", "waiting"), ("b", "waiting"), ("c", "running")]
    assert (untaken[0].task_id, untaken[0].size, untaken[0].min_version) == ("task", 2, 0)
    written = record(ledger, 1, "b", "a")
    ledger.write_step(written)
    assert_adds_up(ledger, engine)
    assert ledger.step(1) == written and ledger.steps() == [written] and ledger.step(2) is None
    assert list(ledger.step(1).trajectories) == list(written.trajectories)  # type: ignore[union-attr]
    assert ledger.steps(after=1) == [] and ledger.committed() == 0 and ledger.groups("waiting") == []
    assert [group.id for group in ledger.untaken_groups()] == ["c"]
    ledger.commit_step(1, Version("rl", 1), "digest")
    assert_adds_up(ledger, engine)
    assert ledger.committed() == 1 and ledger.counts()["trained"] == 4 and ledger.step(1) == written
    assert {group.id: group.state for group in ledger.groups()} == {"a": "final", "b": "final", "c": "running"}
    assert [group.id for group in ledger.groups("final")] == ["a", "b"] and ledger.groups_started() == 3


def test_steps_are_create_only_and_numbered(store: TrajectoryStore, ledger: Ledger, engine: sa.Engine) -> None:
    for group in "ab":
        start(ledger, group)
        settle(store, ledger, group)
    first = record(ledger, 1, "a")
    ledger.write_step(first)
    for number in (0, 1, 3):
        with pytest.raises(TrajectoryError, match=f"step {number} cannot be written: step 1 is the newest"):
            ledger.write_step(record(ledger, number, "b"))
    with pytest.raises(TrajectoryError, match="run 'other'"):
        ledger.write_step(record(ledger, 2, "b", run="other"))
    assert ledger.steps() == [first]
    assert_adds_up(ledger, engine)


def test_nothing_is_in_two_steps(store: TrajectoryStore, ledger: Ledger, engine: sa.Engine) -> None:
    start(ledger, "a")
    settle(store, ledger, "a")
    first = record(ledger, 1, "a")
    ledger.write_step(first)
    ledger.commit_step(1, Version("rl", 1), "digest")
    with pytest.raises(TrajectoryError, match="not an admitted member"):
        ledger.write_step(dataclasses.replace(first, number=2))
    with pytest.raises(TrajectoryError, match="a is final to step 1"):
        ledger.write_step(dataclasses.replace(first, number=2, trajectories={}))
    # even if all of that code were wrong, the database would refuse it
    step = {"run": "run", "number": 2, "line": "rl", "groups": "[]", "created_at": 0.0}
    again = {"run": "run", "trajectory": "a-0", "step": 2, "position": 0, "reward": 0.0, "advantage": 0.0}

    def cheat(connection: sa.Connection) -> None:
        connection.execute(tables.steps.insert(), step)
        connection.execute(tables.step_trajectories.insert(), {**again, "reward_id": first.trajectories["a-0"][0]})

    with pytest.raises(IntegrityError):
        writing(engine, cheat)
    assert_adds_up(ledger, engine)


def test_a_step_accounts_for_every_trajectory(store: TrajectoryStore, ledger: Ledger, engine: sa.Engine) -> None:
    for group in "abc":
        start(ledger, group)
    for group in "ab":
        settle(store, ledger, group)
    good = record(ledger, 1, "a")
    (one, pin), (two, _) = good.trajectories.items()
    other = record(ledger, 1, "b").trajectories
    wrong = {
        "a-1 is left out": {"trajectories": {one: pin}},
        "a-1 is both": {"excluded": {two: DROPPED}},
        "b-0 is not an admitted member": {"trajectories": {**good.trajectories, **other}},
        "reward .* is not of a-0": {"trajectories": {**good.trajectories, one: other["b-0"]}},
        "named twice": {"groups": ("a", "a")},
        "reason ''": {"trajectories": {one: pin}, "excluded": {two: (LedgerState.dropped, "")}},
        "cannot go from admitted to trained": {
            "trajectories": {one: pin},
            "excluded": {two: (LedgerState.trained, "x")},
        },
        "has no group 'nobody'": {"groups": ("a", "nobody")},
        "c is running, not leased": {
            "groups": ("c",),
            "trajectories": {},
            "excluded": {"c-0": DROPPED, "c-1": DROPPED},
        },
    }
    for message, changes in wrong.items():
        with pytest.raises(TrajectoryError, match=message):
            ledger.write_step(dataclasses.replace(good, **changes))  # type: ignore[arg-type]
        assert ledger.steps() == [] and ledger.counts()["admitted"] == 6
    part = dataclasses.replace(good, trajectories={one: pin}, excluded={two: NO_SIGNAL})
    ledger.write_step(part)
    assert ledger.step(1) == part
    assert ledger.reasons() == {("no_signal", "all rewards equal"): 1}
    assert_adds_up(ledger, engine)


def test_only_graded_trajectories_are_leased(store: TrajectoryStore, ledger: Ledger) -> None:
    start(ledger, "a")
    settle(store, ledger, "a")
    step = record(ledger, 1, "a")
    store.quarantine("a-0", "looks like tampering")
    with pytest.raises(TrajectoryError, match="a-0 is quarantined"):
        ledger.write_step(step)
    leased = {"a-1": step.trajectories["a-1"]}
    ledger.write_step(dataclasses.replace(step, trajectories=leased, excluded={"a-0": DROPPED}))


def test_commit_is_idempotent_and_in_order(store: TrajectoryStore, ledger: Ledger, engine: sa.Engine) -> None:
    for number, group in enumerate("ab", start=1):
        start(ledger, group)
        settle(store, ledger, group)
        ledger.write_step(record(ledger, number, group))
    for number in (0, 2, 3):
        with pytest.raises(TrajectoryError, match="2 written and 0 committed"):
            ledger.commit_step(number, Version("rl", number), "digest")
    for _ in range(2):
        ledger.commit_step(1, Version("rl", 1), "digest")
    with pytest.raises(TrajectoryError, match="not as rl@1 other"):
        ledger.commit_step(1, Version("rl", 1), "other")
    ledger.commit_step(2, Version("rl", 2), "two")
    # hardware that gives other bits starts a new line from a checkpoint and runs the recorded steps again
    ledger.commit_step(2, Version("rl-b", 2), "twelve")
    assert [(one.step, str(one.version)) for one in ledger.commits()] == [(1, "rl@1"), (2, "rl@2"), (2, "rl-b@2")]
    assert ledger.committed() == 2 and ledger.counts()["trained"] == 4
    assert_adds_up(ledger, engine)


def test_a_group_is_ready_when_all_of_it_is_settled(store: TrajectoryStore, ledger: Ledger) -> None:
    start(ledger, "a")
    with pytest.raises(TrajectoryError, match="a-0 is running"):
        ledger.group_ready("a")
    store.fail("a-0", "machine")
    store.finish("a-1", "p", None, tokens=1, sampled_tokens=1, segments=1)
    with pytest.raises(TrajectoryError, match="a-1 is finished"):
        ledger.group_ready("a")
    store.grade("a-1", Grade(1.0))
    for _ in range(2):
        ledger.group_ready("a")  # a failed rollout does not block its group
    assert [row.state for row in ledger.members(["a"])["a"]] == ["failed", "graded"]
    with pytest.raises(TrajectoryError, match="no group 'nobody'"):
        ledger.group_ready("nobody")


def test_starting_again_after_a_crash(store: TrajectoryStore, ledger: Ledger) -> None:
    assert start(ledger, "a", bound=1)
    ledger.replace_lost("a", "a-0", "a-0b")
    assert not start(ledger, "b", bound=1)
    assert ledger.counts()["admitted"] == 2
    with pytest.raises(TrajectoryError, match="already exists"):
        start(ledger, "a", size=3)
    with pytest.raises(TrajectoryError, match="already exists"):
        start_group(ledger, "b", "task", 3, pace=Pace(9, 1, 0), ids=["x", "y", "y"])


def test_replace_lost(store: TrajectoryStore, ledger: Ledger, engine: sa.Engine) -> None:
    start(ledger, "a")
    for _ in range(2):  # also if another holder of the group was first
        assert ledger.replace_lost("a", "a-0", "a-0b", reason="engine gone") == 0
    assert (store.get("a-0").state, store.get("a-0").reason) == ("failed", "engine gone")
    fresh = store.get("a-0b")
    assert (fresh.state, fresh.task_id, fresh.split) == ("running", "task", "train")
    assert fresh.provenance["replaces"] == "a-0"
    assert sorted(row.id for row in ledger.members(["a"])["a"]) == ["a-0b", "a-1"]
    store.fail("a-1", "machine gone")
    ledger.replace_lost("a", "a-1", "a-1b")  # failed before: it keeps its own reason
    assert ledger.reasons() == {
        ("dropped", "replaced by a-0b: engine gone"): 1,
        ("dropped", "replaced by a-1b: machine gone"): 1,
    }
    for old, new, message in (("a-0", "x", "is dropped there"), ("z", "x", "is unknown"), ("a-0b", "a-1b", "already")):
        with pytest.raises(TrajectoryError, match=message):
            ledger.replace_lost("a", old, new)
    assert store.get("a-0b").state == "running"
    store.finish("a-0b", "p/a-0b", None, tokens=4, sampled_tokens=2, segments=1)
    assert ledger.replace_lost("a", "a-0b", "a-0c") is None  # sealed a moment ago: it is not lost
    assert store.get("a-0b").state == "finished" and len(ledger.members(["a"])["a"]) == 2
    settle(store, ledger, "a")
    with pytest.raises(TrajectoryError, match="a is waiting, not running"):
        ledger.replace_lost("a", "a-0b", "x")
    assert_adds_up(ledger, engine)


def test_a_group_gets_the_version_that_is_committed_when_it_is_admitted(
    store: TrajectoryStore, ledger: Ledger, engine: sa.Engine
) -> None:
    """Another thread commits a step just before the admission: the group must not get the version from before it."""
    start(ledger, "a")
    settle(store, ledger, "a")
    ledger.write_step(record(ledger, 1, "a"))
    trainer = Ledger(engine, "run")

    late = [lambda: trainer.commit_step(1, Version("rl", 1), "digest")]

    def commit(*_: object) -> None:
        if late:
            late.pop()()

    sa.event.listen(engine, "checkout", commit)  # before the transaction that admits the group begins
    assert start_group(ledger, "b", "task", 1, pace=Pace(9, 1, 0), ids=["b-0"]) == 1
    assert [group.min_version for group in ledger.groups()] == [0, 1]
    # a lost rollout restarts from the version of that moment, not from its group's
    settle(store, ledger, "b")
    assert start_group(ledger, "c", "task", 1, pace=Pace(9, 1, 0), ids=["c-0"]) == 1
    ledger.write_step(record(ledger, 2, "b"))
    ledger.commit_step(2, Version("rl", 2), "digest")
    assert ledger.replace_lost("c", "c-0", "c-0b") == 2
    assert [group.min_version for group in ledger.untaken_groups()] == [1]  # its deadline stays what it was


def test_a_trajectory_deleted_in_flight_ends_only_itself(
    store: TrajectoryStore, ledger: Ledger, engine: sa.Engine
) -> None:
    start(ledger, "a", size=3)
    store.delete("a-0")
    ledger.replace_lost("a", "a-0", "a-0b")  # the dispatcher was restarted and believes it is running
    assert store.get("a-0").state == "deleted"
    store.delete("a-1")
    for id in ("a-0b", "a-2"):
        store.finish(id, f"p/{id}", None, tokens=4, sampled_tokens=2, segments=1)
        store.grade(id, Grade(1.0))
    ledger.group_ready("a")
    # the trainer has read the group; then another trajectory is deleted
    stale = record(ledger, 1, "a", excluded={"a-1": DROPPED})
    leased = {id: entry for id, entry in stale.trajectories.items() if id != "a-1"}
    store.delete("a-2")
    with pytest.raises(TrajectoryChanged, match="a-2 is deleted"):
        ledger.write_step(dataclasses.replace(stale, trajectories=leased))
    kept = {id: entry for id, entry in leased.items() if id != "a-2"}
    ledger.write_step(dataclasses.replace(stale, trajectories=kept, excluded={"a-1": DROPPED, "a-2": DROPPED}))
    assert list(ledger.steps()[0].trajectories) == ["a-0b"]
    assert_adds_up(ledger, engine)


def test_close_group_makes_room(store: TrajectoryStore, ledger: Ledger, engine: sa.Engine) -> None:
    assert start(ledger, "a", bound=1) and not start(ledger, "b", bound=1)
    with pytest.raises(TrajectoryError, match="a-1 is left out"):
        ledger.close_group("a", {"a-0": DROPPED}, 1)
    for _ in range(2):
        ledger.close_group("a", {"a-0": DROPPED, "a-1": DROPPED}, 1)
    assert start(ledger, "b", bound=1) and ledger.counts()["dropped"] == 2
    settle(store, ledger, "b")
    ledger.close_group("b", {"b-0": NO_SIGNAL, "b-1": NO_SIGNAL}, 1)
    assert ledger.open_groups() == 0 and ledger.steps() == []
    assert_adds_up(ledger, engine)


def test_another_run_can_use_the_same_trajectories(store: TrajectoryStore, ledger: Ledger, engine: sa.Engine) -> None:
    """Facts and ledgers are separate: another run's ledger does not know what one run trained on."""
    start(ledger, "a")
    settle(store, ledger, "a")
    ledger.write_step(record(ledger, 1, "a"))
    other = Ledger(engine, "ablation")
    assert other.counts() == dict.fromkeys(LedgerState, 0) and other.steps() == [] and other.committed() == 0
    assert list(itertools.chain(*other.members(["a"]).values())) == []
