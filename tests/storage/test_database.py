"""The database layer on SQLite and on PostgreSQL: transactions, and errors with a hint. Its schema:
tests/storage/test_migrations.py."""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from rollmill.errors import StorageError
from rollmill.storage import database
from rollmill.storage.database import open_database, reading, writing

metadata = sa.MetaData()
counters = sa.Table("counters", metadata, sa.Column("name", sa.Text, primary_key=True), sa.Column("value", sa.Integer))


@pytest.fixture
def engine(database_url: str) -> sa.Engine:
    engine = open_database(database_url)
    metadata.create_all(engine)
    return engine


def _value(engine: sa.Engine) -> int | None:
    with reading(engine) as connection:
        return connection.execute(sa.select(counters.c.value)).scalar()


def test_concurrent_read_modify_write_loses_nothing(engine: sa.Engine) -> None:
    writing(engine, lambda connection: connection.execute(counters.insert(), {"name": "a", "value": 0}))

    def add_one(connection: sa.Connection) -> None:
        value = connection.execute(sa.select(counters.c.value).with_for_update()).scalar_one()
        connection.execute(counters.update().values(value=value + 1))

    def work() -> None:
        for _ in range(25):
            writing(engine, add_one)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _value(engine) == 100


def test_a_transaction_that_raises_leaves_nothing(engine: sa.Engine) -> None:
    def work(connection: sa.Connection) -> None:
        connection.execute(counters.insert(), {"name": "a", "value": 1})
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        writing(engine, work)
    assert _value(engine) is None


def test_serialization_failures_are_tried_again(engine: sa.Engine) -> None:
    """Two transactions lock two rows in opposite order: PostgreSQL ends one of them, and it succeeds later."""
    writing(engine, lambda c: c.execute(counters.insert(), [{"name": "a", "value": 0}, {"name": "b", "value": 0}]))
    meet = threading.Barrier(2, timeout=20)

    def add(names: str) -> None:
        tries = 0

        def work(connection: sa.Connection) -> None:
            nonlocal tries
            tries += 1
            for position, name in enumerate(names):
                row = counters.c.name == name
                connection.execute(counters.update().where(row).values(value=counters.c.value + 1))
                # both hold their first row before either requests its second; SQLite has one writer at a time
                if position == 0 and tries == 1 and engine.dialect.name == "postgresql":
                    meet.wait()

        writing(engine, work)

    threads = [threading.Thread(target=add, args=(names,)) for names in ("ab", "ba")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with reading(engine) as connection:
        assert connection.execute(sa.select(counters.c.value)).scalars().all() == [2, 2]


def test_sqlite_settings(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path}/mill.db")
    with reading(engine) as connection:
        found = [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        ]
    assert found == ["wal", 2, 1]


def test_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "LOCK_SECONDS", 0.05)
    engine = open_database(f"sqlite:///{tmp_path}/mill.db")
    metadata.create_all(engine)
    other = sqlite3.connect(tmp_path / "mill.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageError, match="locked") as caught:
        writing(engine, lambda connection: connection.execute(counters.insert(), {"name": "a", "value": 1}))
    other.execute("ROLLBACK")
    assert "write lock" in str(caught.value.hint)
    writing(engine, lambda connection: connection.execute(counters.insert(), {"name": "a", "value": 1}))


def test_full_disk_is_a_storage_error_and_loses_nothing(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path}/mill.db")
    metadata.create_all(engine)

    def fill(connection: sa.Connection) -> None:
        connection.exec_driver_sql("PRAGMA max_page_count = 8")  # SQLite reports this like a full disk
        connection.execute(counters.insert(), [{"name": str(n) * 500, "value": n} for n in range(100)])

    with pytest.raises(StorageError, match="full") as caught:
        writing(engine, fill)
    assert "free some space" in str(caught.value.hint)
    assert _value(engine) is None


def test_a_lost_connection_undoes_the_transaction_and_the_next_one_works(postgresql_directory: Path) -> None:
    engine = open_database(f"postgresql://rollmill@/postgres?host={postgresql_directory}")
    metadata.create_all(engine)

    def work(connection: sa.Connection) -> None:
        connection.execute(counters.insert(), {"name": "lost", "value": 1})
        mine = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        with reading(engine) as other:
            other.exec_driver_sql("SELECT pg_terminate_backend(%s)", (mine,))
        connection.execute(counters.insert(), {"name": "never", "value": 1})

    with pytest.raises(StorageError) as caught:
        writing(engine, work)
    assert "reachable" in str(caught.value.hint)
    assert _value(engine) is None
    writing(engine, lambda connection: connection.execute(counters.insert(), {"name": "a", "value": 7}))
    assert _value(engine) == 7


@pytest.mark.parametrize(
    ("url", "message", "hint"),
    [
        ("sqlite:////nowhere/at/all/mill.db", "unable to open", "directory"),
        ("sqlite://", "in memory", "sqlite:///"),
        ("mysql://host/name", "mysql", "postgresql://"),
        ("not a url", "malformed", "sqlite:///"),
        ("postgresql://user:secret@127.0.0.1:1/name", "refused", "reachable"),
        ("postgresql://127.0.0.1:1/name?password=secret", "refused", "reachable"),
    ],
)
def test_bad_urls(url: str, message: str, hint: str) -> None:
    with pytest.raises(StorageError, match=message) as caught:
        open_database(url)
    assert hint in str(caught.value.hint)
    assert "secret" not in str(caught.value) and "options" not in caught.value.message
    assert "\n" not in caught.value.message


def test_not_a_database(tmp_path: Path) -> None:
    (tmp_path / "mill.db").write_bytes(os.urandom(4096))
    with pytest.raises(StorageError, match="not a database"):
        open_database(f"sqlite:///{tmp_path}/mill.db")
