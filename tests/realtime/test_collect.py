"""Which conversations a cycle reads."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from rollmill.realtime.collect import PRODUCTION, read_conversations
from rollmill.storage.database import open_database, writing
from rollmill.storage.objects import Objects
from rollmill.trajectories.store import TrajectoryStore
from rollmill.trajectories.tables import feedback, trajectories


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


def test_a_conversation_that_is_open_at_the_end_of_collecting_is_of_the_next_cycle(
    store: TrajectoryStore, engine: sa.Engine
) -> None:
    start = time.time() - 1000
    add(store, engine, "early", start, start + 10)
    add(store, engine, "across", start + 5, start + 30)  # the first cycle ends collecting at 20
    add(store, engine, "late", start + 25, start + 30)
    add(store, engine, "open", start + 6, None)

    def states(until: float, **since: float) -> dict[str, str]:
        return {each.id: each.state for each in read_conversations(engine, "r", until, settle_s=9.0, **since)}

    assert states(start + 20) == {"early": "finished", "across": "running", "late": "running", "open": "running"}
    assert states(start + 40, ended_after=start + 20) == {"across": "finished", "late": "finished"}
    store.finish("open", "payload", None, tokens=2, sampled_tokens=1, segments=1)
    assert states(time.time(), ended_after=start + 40) == {"open": "finished"}
    # a canary compares only conversations that began in it
    assert states(start + 40, begun_at=start + 20) == {"late": "finished"}


def test_runs_that_share_a_database_do_not_mix(store: TrajectoryStore, engine: sa.Engine) -> None:
    """`production` is what conversations of older gateways have in place of a run."""
    for run in ("r", "s", PRODUCTION):
        add(store, engine, f"of-{run}", 1.0, 2.0, run)
    assert [each.id for each in read_conversations(engine, "r", 3.0, settle_s=9.0)] == ["of-r"]
    assert [each.id for each in read_conversations(engine, "s", 3.0, settle_s=9.0)] == ["of-s"]


def test_signals_count_until_the_conversation_has_settled(store: TrajectoryStore, engine: sa.Engine) -> None:
    """However late they are read: otherwise an old conversation would be judged by more users than a new one."""
    add(store, engine, "c", 1.0, 100.0)
    for at in (50.0, 160.0, 161.0):
        store.add_feedback("c", "accepted", at, {})
        change = feedback.update().where(feedback.c.value == at).values(created_at=at)
        writing(engine, lambda connection, change=change: connection.execute(change))
    (found,) = read_conversations(engine, "r", 1000.0, settle_s=60.0)
    assert [signal.value for signal in found.signals] == [50.0, 160.0]
