"""Laws of the index and the ledger for benchmarks.growth: what a run asks for all the time, by the trajectories it has.

The database is SQLite, filled with committed steps of eight groups of eight. PostgreSQL has the same indexes; that
neither reads a whole table is tested in tests/trajectories/test_scale.py.
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

from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories import tables
from rollmill.trajectories.ledger import Ledger, NewGroup
from rollmill.trajectories.pace import Pace
from rollmill.trajectories.store import TrajectoryStore

RUN, SIZE, PER_STEP = "run", 8, 8
SIZES = (1_000, 10_000, 100_000, 1_000_000)
_CHUNK = 4_000  # groups per transaction


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


@functools.cache
def filled(trajectories: int) -> tuple[Ledger, TrajectoryStore]:
    directory = Path(tempfile.mkdtemp(prefix="growth-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    engine = open_database(f"sqlite:///{directory}/mill.db")
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
    return ledger, TrajectoryStore(engine, Objects.open(directory / "store"))


def milliseconds(ask: Callable[[Ledger, TrajectoryStore], object], trajectories: int) -> float:
    """Of one call: CPU time, the best of three times twenty."""
    ledger, store = filled(trajectories)
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        for _ in range(20):
            ask(ledger, store)
        best = min(best, (time.process_time() - began) / 20)
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
LAWS = [(name, "trajectories", "ms", SIZES, functools.partial(milliseconds, ask), 0.25) for name, ask in ASKED.items()]
