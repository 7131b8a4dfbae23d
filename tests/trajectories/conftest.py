"""A trajectory store and a run's ledger over a fresh database (SQLite and PostgreSQL) and a directory of objects."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.trajectory_store import TrajectoryStore


@pytest.fixture
def engine(database_url: str) -> sa.Engine:
    return open_database(database_url)


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return Objects.open(tmp_path / "store")


@pytest.fixture
def store(engine: sa.Engine, objects: Objects) -> TrajectoryStore:
    return TrajectoryStore(engine, objects)


@pytest.fixture
def ledger(engine: sa.Engine) -> Ledger:
    return Ledger(engine, "run")
