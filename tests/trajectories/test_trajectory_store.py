"""Trajectory facts: only legal transitions, append-only rewards and feedback, complete payloads."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from rollmill.errors import ObjectMissing, TrajectoryError
from rollmill.storage.database import erase_deleted, open_database, reading
from rollmill.storage.objects import Objects
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.payload import encode_trajectory, seal_facts
from rollmill.trajectories.staleness import Pace
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import TRAJECTORY_TRANSITIONS, Grade, StepRecord, TrajectoryState, Version
from tests.trajectories import build
from tests.trajectories.build import start_group

PROVENANCE = {"split": "train", "family": "bug", "harness": "coding"}


def seal(store: TrajectoryStore, objects: Objects, id: str) -> None:
    trajectory = build.trajectory(id)
    objects.create(f"trajectories/{id}", encode_trajectory(trajectory))
    store.finish(id, f"trajectories/{id}", None, **seal_facts(trajectory))


def bring_to(store: TrajectoryStore, id: str, state: TrajectoryState) -> None:
    store.create("run", "g", "task", [id], PROVENANCE)
    if state in ("finished", "graded", "quarantined"):
        store.finish(id, "key", None, tokens=1, sampled_tokens=1, segments=1)
    if state in ("graded", "quarantined"):
        store.grade(id, Grade(1.0))
    if state == "quarantined":
        store.quarantine(id, "odd")
    if state == "failed":
        store.fail(id, "first")
    if state == "deleted":
        store.delete(id)


MOVES = {
    TrajectoryState.finished: lambda store, id: store.finish(id, "other", None, tokens=1, sampled_tokens=1, segments=1),
    TrajectoryState.graded: lambda store, id: store.grade(id, Grade(0.5)),
    TrajectoryState.failed: lambda store, id: store.fail(id, "again"),
    TrajectoryState.quarantined: lambda store, id: store.quarantine(id, "again"),
    TrajectoryState.deleted: lambda store, id: store.delete(id),
}


def test_every_transition_of_the_table_and_no_other(store: TrajectoryStore) -> None:
    for number, (source, target) in enumerate(itertools.product(TrajectoryState, MOVES)):
        id = f"t{number}"
        bring_to(store, id, source)
        assert store.get(id).state == source
        if target in TRAJECTORY_TRANSITIONS[source] or (source == target and target != "finished"):
            MOVES[target](store, id)
            assert store.get(id).state == target
        else:
            with pytest.raises(TrajectoryError, match=f"is {source}.*cannot become {target}"):
                MOVES[target](store, id)
            assert store.get(id).state == source


def test_a_trajectory_from_creation_to_grade(store: TrajectoryStore, objects: Objects) -> None:
    store.create("run", "g", "bug/7", ["a", "b"], PROVENANCE)
    seal(store, objects, "a")
    row = store.get("a")
    assert (row.state, row.tokens, row.sampled_tokens, row.segments) == ("finished", 20, 11, 3)
    assert (row.split, row.family, row.form, row.causes, row.regions) == (
        "train", "bug", "bf16", "start,summary,sub_agent", "home",
    )  # fmt: skip
    assert row.created_at <= (row.finished_at or 0) <= time.time()
    first = store.grade("a", Grade(0.0, {"tests": 0.0}, {"output": "\x00 half \ud800"}, "hidden"))
    second = store.grade("a", Grade(1.0, {"tests": 1.0}, {}, "regrade"))
    assert first < second and store.get("a").reward == 1.0 and store.get("a").reward_id == second
    loaded = store.load("a")
    assert loaded.state == "graded" and [id for id, _ in loaded.rewards] == [first, second]
    assert loaded.rewards[0][1] == Grade(0.0, {"tests": 0.0}, {"output": "\x00 half \ud800"}, "hidden")
    assert loaded.segments[1].parent == ("s0", 5)


def test_repeated_writes_are_no_error(store: TrajectoryStore, objects: Objects) -> None:
    for _ in range(2):
        store.create("run", "g", "task", ["a"], PROVENANCE)
    seal(store, objects, "a")
    store.finish("a", "trajectories/a", None, tokens=20, sampled_tokens=11, segments=3)
    store.grade("a", Grade(1.0))
    store.finish("a", "trajectories/a", None, tokens=20, sampled_tokens=11, segments=3)
    assert store.get("a").state == "graded"
    with pytest.raises(TrajectoryError, match="cannot become finished"):
        store.finish("a", "another", None, tokens=20, sampled_tokens=11, segments=3)
    with pytest.raises(TrajectoryError, match="belongs to another"):
        store.create("run", "another group", "task", ["a"], PROVENANCE)


def test_missing_trajectories(store: TrajectoryStore) -> None:
    with pytest.raises(TrajectoryError, match="no ids"):
        store.create("run", "g", "task", [], PROVENANCE)
    for call in (store.get, store.load, store.delete, lambda id: store.fail(id, "x")):
        with pytest.raises(TrajectoryError, match="no trajectory 'nobody'"):
            call("nobody")
    with pytest.raises(TrajectoryError, match="no trajectory"):
        store.grade("nobody", Grade(1.0))
    with pytest.raises(TrajectoryError, match="no trajectory"):
        store.add_feedback("nobody", "thumb", 1.0, {})


def test_reasons_may_hold_anything_an_agent_printed(store: TrajectoryStore) -> None:
    store.create("run", "g", "task", ["a"], PROVENANCE)
    store.fail("a", "NUL \x00, half \ud800, long " + "x" * 100_000)
    reason = store.get("a").reason or ""
    assert reason.startswith("NUL \N{SYMBOL FOR NULL}, half ?, long") and len(reason) == 20_000
    store.fail("a", "a later reason")
    assert store.get("a").reason == reason


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_is_a_number(store: TrajectoryStore, value: float) -> None:
    bring_to(store, "a", TrajectoryState.finished)
    with pytest.raises(TrajectoryError, match="reward of a"):
        store.grade("a", Grade(value))
    with pytest.raises(TrajectoryError, match="not JSON"):
        store.grade("a", Grade(1.0, evidence={"x": value}))
    assert store.rewards(["a"]) == {"a": []} and store.get("a").state == "finished"


def test_open_trajectories_of_an_interrupted_evaluation_fail(store: TrajectoryStore) -> None:
    states = ("running", "finished", "graded", "failed", "deleted")
    for state in states:
        bring_to(store, state, TrajectoryState(state))
    store.create("another", "g", "task", ["other"], PROVENANCE)
    assert store.fail_interrupted("run", older_than_s=3600) == 0
    assert store.fail_interrupted("run") == 2
    found = {row.id: (row.state, row.reason) for row in store.list()}
    assert found["running"] == found["finished"] == ("failed", "interrupted")
    assert found["failed"] == ("failed", "first") and found["other"] == ("running", None)
    assert (found["graded"][0], found["deleted"][0]) == ("graded", "deleted")
    assert store.fail_interrupted("run") == 0


def test_a_refused_grade_leaves_no_reward_behind(store: TrajectoryStore) -> None:
    bring_to(store, "a", TrajectoryState.running)
    with pytest.raises(TrajectoryError):
        store.grade("a", Grade(1.0))
    assert store.rewards(["a"]) == {"a": []}


def test_feedback_is_append_only_and_may_come_at_any_time(store: TrajectoryStore) -> None:
    bring_to(store, "a", TrajectoryState.graded)
    store.add_feedback("a", "thumb", 1.0, {"by": "user"})
    store.add_feedback("a", "edit", None, {"kept": 0.4})
    assert [(one.kind, one.value, one.data) for one in store.feedback("a")] == [
        ("thumb", 1.0, {"by": "user"}),
        ("edit", None, {"kept": 0.4}),
    ]
    assert store.get("a").state == "graded"


def test_list_filters(store: TrajectoryStore) -> None:
    store.create("one", "g1", "task", ["a%1", "a_2"], {"split": "train"})
    store.create("two", "g2", "task", ["b1"], {"split": "heldout"}, traffic="production")
    store.fail("b1", "why")

    def ids(**filters: object) -> list[str]:
        return [row.id for row in store.list(**filters)]  # type: ignore[arg-type]

    assert ids() == ["b1", "a%1", "a_2"]  # newest first
    assert ids(run="one") == ids(state="running") == ids(group_id="g1") == ids(split="train") == ["a%1", "a_2"]
    assert ids(state=TrajectoryState.failed) == ids(limit=1) == ["b1"]
    assert ids(id_prefix="a_") == ["a_2"]
    assert store.get("b1").traffic == "production"


def test_load_many_keeps_the_order_and_names_missing_payloads(store: TrajectoryStore, objects: Objects) -> None:
    store.create("run", "g", "task", ["a", "b", "c"], PROVENANCE)
    seal(store, objects, "a")
    seal(store, objects, "b")
    assert [loaded.id for loaded in store.load_many(["b", "a", "b"])] == ["b", "a", "b"]
    assert store.load_many([]) == []
    with pytest.raises(TrajectoryError, match="c is running and has no payload"):
        store.load("c")
    store.finish("c", "trajectories/a", None, tokens=1, sampled_tokens=1, segments=1)
    with pytest.raises(TrajectoryError, match="belongs to a, not to c"):
        store.load("c")
    objects.put("trajectories/b", b"rubbish")
    with pytest.raises(TrajectoryError, match="damaged"):
        store.load("b")
    objects.delete("trajectories/b")
    with pytest.raises(ObjectMissing):
        store.load("b")


def test_delete_removes_the_payload_and_keeps_the_row(store: TrajectoryStore, objects: Objects) -> None:
    store.create("run", "g", "task", ["a"], PROVENANCE)
    seal(store, objects, "a")
    store.delete("a")
    assert objects.list("") == [] and store.get("a").state == "deleted"
    store.delete("a")  # as a process that was killed half-way repeats it
    with pytest.raises(TrajectoryError, match="deleted"):
        store.load("a")


@pytest.mark.parametrize("times", [1, 2000])
def test_sqlite_keeps_no_text_of_a_forgotten_user(tmp_path: Path, times: int) -> None:
    """Neither in its file nor in its write-ahead log. A long text has pages of its own."""
    engine = open_database(f"sqlite:///{tmp_path}/mill.db")
    store = TrajectoryStore(engine, Objects.open(tmp_path / "store"))

    def holding() -> list[str]:
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        return sorted(path.name for path in files if b"opinion" in path.read_bytes())

    store.create("run", "g", "task", ["a"], {"user": "pseudonym"}, "production")
    store.add_feedback("a", "text", 1.0, {"text": "Ann's opinion. " * times})
    assert holding() == ["mill.db-wal"]
    erase_deleted(engine)
    assert holding() == ["mill.db"]
    store.add_feedback("a", "text", 1.0, {"text": "Another opinion. " * times})
    assert holding() == ["mill.db", "mill.db-wal"]
    assert store.delete_user("pseudonym") == (["a"], {})
    assert holding() == [] and [said.data for said in store.feedback("a")] == [{}, {}]


def test_a_leased_trajectory_is_not_deleted(store: TrajectoryStore, objects: Objects, ledger: Ledger) -> None:
    start_group(ledger, "g", "task", 1, pace=Pace(1, 1, 0), ids=["a"])
    seal(store, objects, "a")
    reward = store.grade("a", Grade(1.0))
    ledger.group_ready("g")
    ledger.write_step(StepRecord("run", 1, "rl", ("g",), {"a": (reward, 1.0, 0.5)}, {}, 0.0))
    with pytest.raises(TrajectoryError, match="leased to step 1"):
        store.delete("a")
    assert store.load("a").state == "graded"
    ledger.commit_step(1, Version("rl", 1), "digest")
    store.delete("a")


def test_polled_queries_use_an_index(tmp_path: Path) -> None:
    """On SQLite, whose plans do not depend on the number of rows."""
    engine = open_database(f"sqlite:///{tmp_path}/mill.db")
    ledger = Ledger(engine, "run")
    polled: list[tuple[str, Any]] = []
    sa.event.listen(engine, "before_cursor_execute", lambda *event: polled.append((event[2], event[3])))
    ledger.untaken_groups(), ledger.open_groups(), ledger.counts(), ledger.committed()
    with reading(engine) as connection:
        for statement, parameters in [pair for pair in polled if pair[0].startswith("SELECT")]:
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).scalars("detail").all()
            assert all("USING" in line and "INDEX" in line for line in plan), (statement, plan)
