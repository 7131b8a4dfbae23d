"""The database through SQLAlchemy Core: SQLite embedded, PostgreSQL for several hosts, the same statements on both.

Readers use `reading`. Writers pass `writing` a function that may run more than once:

    with reading(engine) as connection: ...
    result = writing(engine, lambda connection: ...)

A SQLite write transaction takes the write lock when it begins (BEGIN IMMEDIATE), so what it has read cannot change
before it writes. On PostgreSQL a writer locks the row it decides about (the run, the trajectory) with
`with_for_update()`, which SQLite ignores. Serialization failures and deadlocks are retried.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator

from rollmill.backoff import Backoff
from rollmill.errors import StorageError
from rollmill.storage import tables

T = TypeVar("T")
LOCK_SECONDS = 30  # how long a writer waits for another one
_ERASE_SECONDS = 1  # how long `erase_deleted` waits for others
_ATTEMPTS = 10
_RETRIED = {"40001", "40P01"}  # SQLSTATE: serialization failure, deadlock
_MIGRATION_LOCK = 0x526F6C6C6D696C6C  # any constant: PostgreSQL's advisory lock around migrations
_REVISIONS = Path(__file__).parent / "migrations" / "versions"
_UNNUMBERED = "0001"  # a database with tables and without a revision: older than all that are read


def open_database(url: str, *, read_only: bool = False) -> sa.Engine:
    """Open `sqlite:///PATH` or `postgresql://USER:PASSWORD@HOST/NAME` and bring it to the newest schema.

    Several processes may open the same database at once: one migrates, the others wait for it. A wrong URL fails here,
    and so does a database whose schema is newer than this rollmill or older than its first revision.
    With `read_only` the database itself refuses every write, and an older schema is an error.
    """
    engine = _connect(url, read_only)
    with reading(engine) as connection:
        found = _find_revision(connection)
    _refuse_others(engine, found, read_only)
    if found != newest_revision():
        writing(engine, _migrate)
    return engine


def clock_of(url: str) -> float:
    """The time by the clock of a database, which stays as it is. Raises StorageError if it cannot be reached."""
    engine = _connect(url, read_only=True)
    try:
        with reading(engine) as connection:
            return float(connection.execute(sa.select(now())).scalar_one())
    finally:
        engine.dispose()


def _connect(url: str, read_only: bool) -> sa.Engine:
    try:
        parsed = sa.make_url(url)
    except ArgumentError:
        # the URL may contain a password, so it is not repeated
        raise StorageError("the database URL is malformed", hint=_URL_HINT) from None
    if parsed.get_backend_name() == "sqlite":
        return _open_sqlite(parsed, read_only=read_only)
    if parsed.get_backend_name() == "postgresql":
        return _open_postgresql(parsed, read_only=read_only)
    raise StorageError(f"no support for databases of the kind {parsed.drivername!r}", hint=_URL_HINT)


def newest_revision() -> str:
    """The schema this rollmill reads and writes."""
    return _revisions()[-1]


def _revisions() -> list[str]:
    """Files are named after their revision, so no import is needed."""
    return sorted(path.stem[1:5] for path in _REVISIONS.glob("r[0-9]*.py"))


@contextlib.contextmanager
def reading(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A consistent read-only view (on PostgreSQL: per statement)."""
    with _explained(engine), engine.connect() as connection:
        yield connection


def writing(engine: sa.Engine, work: Callable[[sa.Connection], T]) -> T:
    """Run `work` in one write transaction. If it raises or the process dies, nothing is written."""
    with _explained(engine):
        backoff = Backoff(0.01, 0.01 * 2**_ATTEMPTS, jitter=1.0)
        while True:
            try:
                with engine.connect() as connection:
                    connection.execution_options(rollmill_begin="BEGIN IMMEDIATE")
                    with connection.begin():
                        return work(connection)
            except DBAPIError as error:
                if getattr(error.orig, "sqlstate", None) not in _RETRIED or backoff.failures == _ATTEMPTS - 1:
                    raise
                time.sleep(backoff.failed())


def erase_deleted(engine: sa.Engine) -> None:
    """Take what was deleted out of SQLite's write-ahead log too. If others use the database all the time, a later
    checkpoint does it. PostgreSQL's vacuum overwrites it."""
    if engine.dialect.name != "sqlite":
        return
    with _explained(engine), contextlib.closing(engine.raw_connection()) as connection:
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {_ERASE_SECONDS * 1000}")
        try:
            with contextlib.suppress(sqlite3.OperationalError):
                cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            cursor.execute(f"PRAGMA busy_timeout = {LOCK_SECONDS * 1000}")


class now(FunctionElement[float]):
    """The database's clock in a statement: seconds since the epoch. Leases are by it, so clocks of hosts may differ."""

    type = sa.Double()
    inherit_cache = True


@compiles(now)
def _sqlite_now(element: Any, compiler: Any, **_: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now, "postgresql")
def _postgresql_now(element: Any, compiler: Any, **_: Any) -> str:
    return "CAST(extract(epoch from clock_timestamp()) AS DOUBLE PRECISION)"


class _JsonList(TypeDecorator[Any]):
    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> str:
        return json.dumps(list(value))


class _elements(FunctionElement[str]):
    inherit_cache = True


@compiles(_elements)
def _sqlite_elements(element: Any, compiler: Any, **kw: Any) -> str:
    return f"json_each({compiler.process(element.clauses, **kw)})"


@compiles(_elements, "postgresql")
def _postgresql_elements(element: Any, compiler: Any, **kw: Any) -> str:
    return f"jsonb_array_elements_text(CAST({compiler.process(element.clauses, **kw)} AS JSONB))"


def among(column: sa.ColumnElement[Any], name: str) -> sa.ColumnElement[bool]:
    """Whether `column` is one of the values of the list parameter `name`. The list is one parameter: a plain `IN` has
    one per value, and PostgreSQL takes at most 65,535."""
    values = _elements(sa.bindparam(name, type_=_JsonList())).table_valued("value")
    return column.in_(sa.select(sa.cast(values.c.value, column.type)))


def name_of(engine: sa.Engine) -> str:
    """The name of the database for messages, without its password and our own options."""
    return engine.url.difference_update_query(["options", "password"]).render_as_string(hide_password=True)


def _open_sqlite(url: sa.URL, *, read_only: bool = False) -> sa.Engine:
    if url.database in (None, "", ":memory:"):
        raise StorageError("an SQLite database in memory cannot be shared between processes", hint=_URL_HINT)
    if read_only and not Path(str(url.database)).exists():  # opening it would create it
        hint = "a relative path has three slashes, an absolute one four"
        raise StorageError(f"there is no database {url.database}", hint=hint)
    engine = sa.create_engine(url, connect_args={"timeout": LOCK_SECONDS}, max_overflow=-1)

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # we begin transactions explicitly; the driver does not guess
        connection.execute(f"PRAGMA busy_timeout = {LOCK_SECONDS * 1000}")
        if read_only:
            connection.execute("PRAGMA query_only = ON")
            return
        _use_write_ahead_log(connection)
        connection.execute("PRAGMA synchronous = FULL")  # acknowledged writes are on the disk
        connection.execute("PRAGMA secure_delete = ON")  # deleted text is overwritten
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get("rollmill_begin", "BEGIN"))

    return engine


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Switching to WAL mode does not wait for other processes that switch at the same time, so we retry."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _open_postgresql(url: sa.URL, *, read_only: bool = False) -> sa.Engine:
    limits = f"-c lock_timeout={LOCK_SECONDS}s -c idle_in_transaction_session_timeout=120s"
    if read_only:
        limits += " -c default_transaction_read_only=on"
    given = url.query.get("options", "")
    options = " ".join([given if isinstance(given, str) else " ".join(given), limits]).strip()
    try:
        return sa.create_engine(
            url.set(drivername="postgresql+psycopg").update_query_dict({"options": options}),
            # a server allows a hundred connections by default, and every process of every host needs some
            pool_size=4,
            max_overflow=4,
            pool_pre_ping=True,  # after a restart of the server: reconnect instead of an error
            connect_args={"connect_timeout": 10},
        )
    except (NoSuchModuleError, ModuleNotFoundError):
        raise StorageError("PostgreSQL needs the psycopg driver", hint="pip install 'rollmill[postgres]'") from None


def _refuse_others(engine: sa.Engine, found: str | None, read_only: bool) -> None:
    """StorageError for a database that cannot be read, nor be made to be."""
    oldest, newest = _revisions()[0], newest_revision()
    if found is not None and found < oldest:
        raise StorageError(
            f"{name_of(engine)} has schema revision {found}; this rollmill reads revisions from {oldest} on",
            hint="it is unchanged: `rollmill trajectories export` of the release that wrote it saves what it holds",
        )
    if found is not None and found > newest:
        raise StorageError(
            f"{name_of(engine)} has schema revision {found}; this rollmill knows revisions up to {newest}",
            hint="a newer rollmill wrote it: use that one",
        )
    if read_only and found != newest:
        raise StorageError(
            f"{name_of(engine)} has schema revision {found or 'none'}; this rollmill reads revision {newest}",
            hint="it is opened read-only; `rollmill trajectories list` brings a database to the newest schema",
        )


def _find_revision(connection: sa.Connection) -> str | None:
    """The revision of the database; None if it is empty."""
    names = set(sa.inspect(connection).get_table_names())
    if "alembic_version" in names:
        return connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one()
    return _UNNUMBERED if "trajectories" in names else None


def _migrate(connection: sa.Connection) -> None:
    """Make the tables, or run the revisions that the database does not have yet. One transaction: all, or nothing."""
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    if connection.dialect.name == "postgresql":  # SQLite took its write lock when the transaction began
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
    found = _find_revision(connection)  # again: another process may have done it while this one waited
    scripts = ScriptDirectory(_REVISIONS.parent)
    context = MigrationContext.configure(connection)
    if found is None:
        tables.metadata.create_all(connection)
        context.stamp(scripts, newest_revision())
        return
    for script in reversed(list(scripts.iterate_revisions("head", found))):
        with Operations.context(context):
            script.module.upgrade()
        context.stamp(scripts, script.revision)


@contextlib.contextmanager
def _explained(engine: sa.Engine) -> Iterator[None]:
    """Converts database errors to StorageError with a hint. The caller explains a broken constraint."""
    try:
        yield
    except IntegrityError:
        raise
    except (DBAPIError, PoolTimeout) as error:
        cause = " ".join(str(getattr(error, "orig", None) or error).split())
        raise StorageError(f"{name_of(engine)}: {cause}", hint=_hint(cause, error)) from error


_URL_HINT = "sqlite:///runs/NAME/mill.db or postgresql://USER:PASSWORD@HOST/NAME"
_HINTS = {
    "database is locked": f"another process held the write lock for {LOCK_SECONDS} s; is one stopped in a debugger?",
    "lock timeout": f"another session held a lock for {LOCK_SECONDS} s; see pg_stat_activity for who it is",
    "disk is full": "free some space and start again; nothing that was acknowledged is lost",
    "No space left": "free some space on the database host and start again; nothing that was acknowledged is lost",
    "disk I/O error": "the disk under the database fails or is full; see the system log",
    "unable to open": "does its directory exist, and may this user write there?",
    "readonly database": "this user may not write there; check the owner of the file and of its directory",
    "read-only": "the server is a standby; give the URL of the primary",
    "malformed": "the file is damaged; restore a copy, or start a new run",
    "not a database": "the path names a file that is not an SQLite database",
    "password authentication": "check the user and the password in the URL",
    "does not exist": "create the database and its user first: createdb NAME",
    "too many connections": "raise max_connections or run fewer processes",
    "QueuePool limit": "too many threads use one database handle at once",
}


def _hint(cause: str, error: Exception) -> str:
    for text, hint in _HINTS.items():
        if text in cause:
            return hint
    if getattr(error, "connection_invalidated", False) or "connection" in cause:
        return "is the database server running and reachable? Unfinished transactions were undone; start again"
    return "unexpected; the message above comes from the database itself"
