"""Promises 4 and 5 with real processes: many compete for the bound, and one is killed -9 after each statement."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from rollmill.storage import tables
from rollmill.storage.database import open_database, reading
from rollmill.storage.objects import Objects
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.staleness import Pace
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Grade, LedgerState, StepRecord, Version
from tests.processes import SERVER
from tests.trajectories.build import start_group

BOUND = 5


def race(url: str, name: str, close: bool, go: Any, results: Any) -> None:
    """Three threads each request a group 12 times; with `close` they also finish the groups they got."""
    ledger = Ledger(open_database(url), "run")
    started: list[str] = []

    def work(thread: int) -> None:
        for attempt in range(12):
            group = f"{name}-{thread}-{attempt}"
            if start_group(ledger, group, "task", 1, pace=Pace(BOUND, 1, 0), ids=[group]) is not None:
                started.append(group)
                if close:
                    ledger.close_group(group, {group: (LedgerState.dropped, "test")}, 1)

    go.wait(60)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    results.put(started)


def run_race(url: str, *, close: bool) -> tuple[list[str], int]:
    """Returns the number of started groups, and the most that were open at the same time."""
    ledger = Ledger(open_database(url), "run")
    go, results = SERVER.Event(), SERVER.Queue()
    racers = [SERVER.Process(target=race, args=(url, f"p{number}", close, go, results)) for number in range(3)]
    for racer in racers:
        racer.start()
    go.set()
    most = 0
    while any(racer.is_alive() for racer in racers) and results.qsize() < len(racers):  # a sample, not a proof
        most = max(most, ledger.open_groups())
        time.sleep(0.002)
    started = [group for _ in racers for group in results.get(timeout=60)]
    for racer in racers:
        racer.join(60)
        assert racer.exitcode == 0
    return started, max(most, ledger.open_groups())


def test_the_bound_holds_among_processes_and_threads(database_url: str) -> None:
    started, most = run_race(database_url, close=False)
    assert len(started) == most == BOUND
    assert Ledger(open_database(database_url), "run").counts()["admitted"] == BOUND


def test_the_bound_holds_while_groups_end(database_url: str) -> None:
    started, most = run_race(database_url, close=True)
    assert most <= BOUND < len(started)
    ledger = Ledger(open_database(database_url), "run")
    assert ledger.open_groups() == 0 and ledger.counts()["dropped"] == len(started) == len(set(started))


def _record(ledger: Ledger) -> StepRecord:
    rows = ledger.members(["g"])["g"]
    leased = {row.id: (row.reward_id or 0, 1.0, 0.5) for row in rows if row.reward_id}
    rest: dict[str, tuple[LedgerState, str]] = {
        row.id: (LedgerState.dropped, "failed") for row in rows if not row.reward_id
    }
    return StepRecord("run", 1, "rl", ("g",), leased, rest, 1.0)


# the life of a group, in order
LIFE: dict[str, Callable[[TrajectoryStore, Ledger], object]] = {
    "start": lambda _, ledger: start_group(ledger, "g", "task", 2, pace=Pace(1, 1, 0), ids=["a", "b"]),
    "replace": lambda _, ledger: ledger.replace_lost("g", "b", "c", "engine gone"),
    "finish": lambda store, _: store.finish("a", "p/a", None, tokens=3, sampled_tokens=1, segments=1),
    "grade": lambda store, _: store.grade("a", Grade(1.0)),
    "fail": lambda store, _: store.fail("c", "machine gone"),
    "ready": lambda _, ledger: ledger.group_ready("g"),
    "write_step": lambda _, ledger: ledger.write_step(_record(ledger)),
    "commit_step": lambda _, ledger: ledger.commit_step(1, Version("rl", 1), "digest"),
}


def live_until(url: str, objects: Path, moment: str, statement: int, pipe: Connection) -> None:
    """Does one action. After its n-th statement, inside its transaction, reports it and waits to be killed."""
    engine = open_database(url)
    store, ledger = TrajectoryStore(engine, Objects.open(objects)), Ledger(engine, "run")
    numbers = itertools.count()

    def hold(*_: object) -> None:
        if next(numbers) == statement:
            pipe.send("held")
            time.sleep(600)

    sa.event.listen(engine, "after_cursor_execute", hold)
    LIFE[moment](store, ledger)
    pipe.send("done")


def contents(engine: sa.Engine) -> dict[str, list[tuple[Any, ...]]]:
    with reading(engine) as connection:
        return {
            table.name: sorted(map(tuple, connection.execute(sa.select(table))), key=repr)
            for table in tables.metadata.sorted_tables
        }


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_after_any_statement_nothing_is_half_done(database_url: str, tmp_path: Path) -> None:
    engine = open_database(database_url)
    ledger = Ledger(engine, "run")
    killed = 0
    for moment in LIFE:
        before = contents(engine)
        for statement in itertools.count():
            ours, theirs = SERVER.Pipe()
            process = SERVER.Process(target=live_until, args=(database_url, tmp_path / "o", moment, statement, theirs))
            process.start()
            assert ours.poll(60), moment
            outcome = ours.recv()
            if outcome == "done":
                process.join(60)
                break
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join(60)
            killed += 1
            assert contents(engine) == before, f"{moment}, statement {statement}"
        assert contents(engine) != before, moment
    assert killed >= 3 * len(LIFE)
    assert ledger.counts() == {**dict.fromkeys(LedgerState, 0), "trained": 1, "dropped": 2}
    assert ledger.open_groups() == 0 and ledger.committed() == 1
