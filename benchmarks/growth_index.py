"""Laws of the index and the ledger for benchmarks.growth: what a run asks for all the time, by the trajectories it has.

The database is SQLite, or the PostgreSQL of `--database URL`, filled with committed steps of eight groups of eight. The
URL's database gets a schema for each size. That neither reads a whole table is tested in
tests/trajectories/test_scale.py.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from rollmill.feedback.collect import Conversations
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories import tables
from rollmill.trajectories.admission import Experience, Member
from rollmill.trajectories.changes import trajectory_rows
from rollmill.trajectories.ledger import Ledger, NewGroup
from rollmill.trajectories.pace import Pace
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Reward

RUN, SIZE, PER_STEP = "run", 8, 8
SIZES = (1_000, 10_000, 100_000, 1_000_000)
_CHUNK = 4_000  # groups per transaction
database: str | None = None  # PostgreSQL


def rows(groups: range) -> Iterator[tuple[sa.Table, list[dict[str, Any]]]]:
    named = [(number, f"g-{number:06d}", number // PER_STEP + 1) for number in groups]
    members = [(id, f"{id}-{member}", step, number) for number, id, step in named for member in range(SIZE)]
    state = {"run": RUN, "traffic": "rollout", "state": "graded", "provenance": "{}", "family": "f", "reward": 1.0}
    yield (
        tables.groups,
        [
            {
                "run": RUN,
                "id": id,
                "task_id": f"t-{number % 99}",
                "size": SIZE,
                "state": "final",
                "min_version": step - 1,
            }
            | {"step": step, "created_at": float(number)}
            for number, id, step in named
        ],
    )
    yield (
        tables.trajectories,
        [
            {**state, "id": id, "group_id": group, "task_id": f"t-{number % 99}", "created_at": float(number)}
            for group, id, _, number in members
        ],
    )
    yield (
        tables.ledger,
        [
            {"run": RUN, "trajectory": id, "group_id": group, "state": "trained", "step": step}
            for group, id, step, _ in members
        ],
    )


def empty(name: str) -> TrajectoryStore:
    """An index without anything in it."""
    directory = Path(tempfile.mkdtemp(prefix="growth-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    url = f"sqlite:///{directory}/mill.db"
    if database:
        with sa.create_engine(database).begin() as connection:
            connection.exec_driver_sql(f"DROP SCHEMA IF EXISTS {name} CASCADE")
            connection.exec_driver_sql(f"CREATE SCHEMA {name}")
        url = f"{database}{'&' if '?' in database else '?'}options=-csearch_path%3D{name}"
    return TrajectoryStore(open_database(url), Objects.open(directory / "store"))


@functools.cache
def filled(trajectories: int) -> tuple[Ledger, TrajectoryStore]:
    store = empty(f"growth_{trajectories}")
    engine = store._engine
    ledger, groups = Ledger(engine, RUN), max(PER_STEP, trajectories // SIZE)
    last = groups // PER_STEP
    step = {"run": RUN, "line": "rl", "created_at": 0.0}
    with engine.begin() as connection:
        connection.execute(tables.steps.insert(), [{**step, "number": n, "groups": "[]"} for n in range(1, last + 2)])
        commits = [{**step, "step": n, "number": n, "digest": "d"} for n in range(1, last + 1)]
        connection.execute(tables.commits.insert(), commits)
        connection.execute(tables.runs.update().values(started=groups))
    for start in range(0, groups, _CHUNK):
        with engine.begin() as connection:
            for table, values in rows(range(start, min(groups, start + _CHUNK))):
                connection.execute(table.insert(), values)
    if engine.dialect.name == "postgresql":
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("ANALYZE")
    return ledger, store


def milliseconds(ask: Callable[[Ledger, TrajectoryStore], object], trajectories: int) -> float:
    """Of one call, the best of three times twenty: CPU time, or what a client of PostgreSQL waits."""
    ledger, store = filled(trajectories)
    clock = time.perf_counter if database else time.process_time
    best = float("inf")
    for _ in range(3):
        began = clock()
        for _ in range(20):
            ask(ledger, store)
        best = min(best, (clock() - began) / 20)
    return best * 1e3


def start(ledger: Ledger, _: TrajectoryStore) -> object:
    def name(index: int) -> NewGroup:
        return NewGroup(f"s-{index}", "t", [f"s-{index}-{member}" for member in range(SIZE)])

    assert ledger.start_group(name, pace=Pace(1_000, SIZE, 0))
    return None


ASKED: dict[str, Callable[[Ledger, TrajectoryStore], object]] = {
    "results_of_a_step": lambda ledger, _: ledger.results(7, 8),
    "groups_started": lambda ledger, _: ledger.groups_started(),
    "a_step": lambda ledger, _: ledger.step(8),
    "entries_of_a_trajectory": lambda _, store: store.entries("g-000001-1"),
    "start_group": start,
}


def one(index: int) -> NewGroup:
    return NewGroup(f"o-{index}", "t", [f"o-{index}-0"])


def look(groups: int) -> float:
    """Milliseconds of a look at the open groups after one more has started: the trainer looks ten times per second."""
    ledger = Ledger(empty(f"look_{groups}")._engine, RUN)
    pace = Pace(1_000_000, 1, 0)
    for _ in range(groups):
        ledger.start_group(one, pace=pace)
    seen, _ = ledger.changed_groups(None)
    costs = []
    for _ in range(20):
        ledger.start_group(one, pace=pace)
        began = time.perf_counter()
        seen, found = ledger.changed_groups(seen)
        costs.append((time.perf_counter() - began) * 1e3)
        assert len(found) == 1
    return min(costs)


def admit(groups: int) -> float:
    """Seconds of the admission of this many conversations of production."""
    ledger = Ledger(empty(f"admit_{groups}")._engine, RUN)
    found = []
    for number in range(groups):
        (row,) = trajectory_rows("production", "g", "t", [f"live-{number:032x}"], {}, "production")
        member = Member(row["id"], {**row, "state": "finished", "payload_key": "p"}, Reward(1.0))
        found.append(Experience(row["id"], "t", "production", [member], 0))
    began = time.perf_counter()
    verdicts = ledger.admit(found, pace=Pace(-(-groups // 4), 1, 3, 4))
    assert {each.decision for each in verdicts} == {"admitted"}
    return time.perf_counter() - began


def collect(conversations: int) -> float:
    """Milliseconds of a cycle's look at the conversations of which one has ended since the last look."""
    store = empty(f"collect_{conversations}")

    def end(ids: range) -> None:
        rows = trajectory_rows("production", "g", "t", [f"live-{id}" for id in ids], {"run": RUN}, "production")
        facts = {"state": "finished", "payload_key": "p", "line": "rl"}
        with store._engine.begin() as connection:
            connection.execute(
                tables.trajectories.insert(),
                [{**row, **facts, "finished_at": id * 100.0} for id, row in zip(ids, rows, strict=True)],
            )

    end(range(1, conversations))
    ended = Conversations(store._engine, RUN, settle_s=0.0)
    ended.look(conversations * 100.0 - 1)
    costs = []
    for id in range(conversations, conversations + 20):
        end(range(id, id + 1))
        began = time.perf_counter()
        assert ended.look(id * 100.0)
        costs.append((time.perf_counter() - began) * 1e3)
    return min(costs)


LAWS = [
    *((name, "trajectories", "ms", SIZES, functools.partial(milliseconds, ask), 0.25) for name, ask in ASKED.items()),
    ("look_at_open_groups", "open groups", "ms", (100, 1_000, 10_000), look, 0.25),
    ("admit", "groups", "s", (100, 1_000, 10_000, 100_000), admit, 1.1),
    ("look_at_conversations", "conversations", "ms", (1_000, 10_000, 100_000), collect, 0.25),
]
