"""Which conversations a cycle reads."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from rollmill.feedback.collect import LATE_S, PRODUCTION, Conversations
from rollmill.feedback.distil import Conversation
from rollmill.storage.database import open_database, reading, writing
from rollmill.storage.objects import Objects
from rollmill.storage.tables import feedback, trajectories
from rollmill.trajectories.trajectory_store import TrajectoryStore


@pytest.fixture
def store(database_url: str, tmp_path: Path) -> TrajectoryStore:
    return TrajectoryStore(open_database(database_url), Objects.open(tmp_path / "store"))


@pytest.fixture
def engine(database_url: str) -> sa.Engine:
    return open_database(database_url)


def add(store: TrajectoryStore, engine: sa.Engine, id: str, begun: float, ended: float | None, run: str = "r") -> None:
    store.create(PRODUCTION, id, "t", [id], {"key": "k", "run": run}, "production")
    values: dict[str, object] = {"created_at": begun}
    if ended is not None:
        store.finish(id, "payload", None, tokens=2, sampled_tokens=1, segments=1)
        values["finished_at"] = ended
    update = trajectories.update().where(trajectories.c.id == id).values(values)
    writing(engine, lambda connection: connection.execute(update))


def read(engine: sa.Engine, run: str, until: float, *, settle_s: float = 9.0, **since: float) -> list[Conversation]:
    reader = Conversations(engine, run, settle_s=settle_s, **since)
    reader.look(until)
    return reader.found


def test_a_conversation_that_is_open_at_the_end_of_collecting_is_of_the_next_cycle(
    store: TrajectoryStore, engine: sa.Engine
) -> None:
    start = time.time() - 1000
    add(store, engine, "early", start, start + 10)
    add(store, engine, "across", start + 5, start + 30)  # the first cycle ends collecting at 20
    add(store, engine, "late", start + 25, start + 30)
    add(store, engine, "open", start + 6, None)

    def states(until: float, **since: float) -> dict[str, str]:
        return {each.id: each.state for each in read(engine, "r", until, **since)}

    assert states(start + 20) == {"early": "finished"}
    assert states(start + 40, ended_after=start + 20) == {"across": "finished", "late": "finished"}
    store.finish("open", "payload", None, tokens=2, sampled_tokens=1, segments=1)
    assert states(time.time(), ended_after=start + 40) == {"open": "finished"}
    # a canary compares only conversations that began in it
    assert states(start + 40, begun_at=start + 20) == {"late": "finished"}


def test_runs_that_share_a_database_do_not_mix(store: TrajectoryStore, engine: sa.Engine) -> None:
    """`production` is what conversations of older gateways have in place of a run."""
    for run in ("r", "s", PRODUCTION):
        add(store, engine, f"of-{run}", 1.0, 2.0, run)
    assert [each.id for each in read(engine, "r", 3.0)] == ["of-r"]
    assert [each.id for each in read(engine, "s", 3.0)] == ["of-s"]


def test_signals_count_until_the_conversation_has_settled(store: TrajectoryStore, engine: sa.Engine) -> None:
    """However late they are read: otherwise an old conversation would be judged by more users than a new one."""
    add(store, engine, "c", 1.0, 100.0)
    for at in (50.0, 160.0, 161.0):
        store.add_feedback("c", "accepted", at, {})
        change = feedback.update().where(feedback.c.value == at).values(created_at=at)
        writing(engine, lambda connection, change=change: connection.execute(change))
    (found,) = read(engine, "r", 1000.0, settle_s=60.0)
    assert [signal.value for signal in found.signals] == [50.0, 160.0]


def test_a_look_reads_what_is_new_and_nothing_again(store: TrajectoryStore, engine: sa.Engine) -> None:
    """A cycle looks each second. A conversation whose row became visible late is not missed."""
    for number in range(8):
        add(store, engine, f"old-{number}", 10.0, 100.0 + number)
    reader = Conversations(engine, "r", settle_s=5.0)
    assert reader.look(1000.0) and len(reader.found) == 8
    update = trajectories.update().values(provenance="no JSON: reading it again would raise")
    writing(engine, lambda connection: connection.execute(update))
    assert not reader.look(1001.0)
    add(store, engine, "late", 10.0, 1001.0 - LATE_S + 1.0)
    add(store, engine, "new", 10.0, 1001.5)
    assert reader.look(1002.0) and [each.id for each in reader.found[8:]] == ["late", "new"]
    assert not reader.look(1003.0) and len(reader.found) == 10


def test_a_look_finds_the_ends_by_an_index(tmp_path: Path) -> None:
    """On SQLite, whose plans do not depend on the number of rows."""
    engine, asked = open_database(f"sqlite:///{tmp_path}/mill.db"), list[tuple[str, Any]]()
    add(TrajectoryStore(engine, Objects.open("memory://")), engine, "c", 1.0, 2.0)
    sa.event.listen(engine, "before_cursor_execute", lambda *event: asked.append((event[2], event[3])))
    Conversations(engine, "r", settle_s=5.0).look(100.0)
    with reading(engine) as connection:
        for statement, parameters in [pair for pair in asked if pair[0].startswith("SELECT")]:
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).scalars("detail").all()
            assert any("trajectories_by_end (run=? AND finished_at>? AND finished_at<?)" in line for line in plan), plan
            assert not any(line.startswith("SCAN") for line in plan), plan
    assert len(asked) >= 2


def test_a_signal_names_its_answer_and_a_conversation_its_user(store: TrajectoryStore, engine: sa.Engine) -> None:
    add(store, engine, "c", 1.0, 100.0)
    facts = {"key": "k", "run": "r", "user": "u-1", "consent": "train"}
    writing(engine, lambda connection: connection.execute(trajectories.update().values(provenance=json.dumps(facts))))
    for data in ({"answer": "c.0/3"}, {"segment": "c.1"}, {}):
        store.add_feedback("c", "accepted", 1.0, data)
    writing(engine, lambda connection: connection.execute(feedback.update().values(created_at=90.0)))
    (found,) = read(engine, "r", 1000.0)
    assert [signal.answer for signal in found.signals] == ["c.0/3", "c.1", ""]
    assert (found.user, found.consent) == ("u-1", "train")
    add(store, engine, "silent", 1.0, 101.0)
    assert read(engine, "r", 1000.0)[1].consent == "store", "what was not said is no consent"
