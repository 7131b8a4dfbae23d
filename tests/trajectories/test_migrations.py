"""Every released schema is migrated to the newest one with its rows, on SQLite and on PostgreSQL, by any process.

`released/N.DIALECT.sql` is a database of release N: its DDL and a few rows. Add a pair with each release.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from rollmill.errors import StorageError
from rollmill.storage import database, migrations
from rollmill.storage.database import newest_revision, open_database, reading, writing
from rollmill.storage.objects import Objects
from rollmill.trajectories import tables
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Reward
from tests.processes import SERVER

RELEASED = Path(__file__).parent / "released"
RELEASES = sorted({path.name.split(".")[0] for path in RELEASED.glob("*.sql")})
OURS = {"alembic_version", "schema_version"}  # tables about the schema itself


def restore(url: str, release: str) -> dict[str, list[tuple[Any, ...]]]:
    """Makes the database of a release. Returns its rows."""
    engine = sa.create_engine(url)
    script = (RELEASED / f"{release}.{engine.dialect.name}.sql").read_text()
    with engine.begin() as connection:
        for statement in script.strip().removesuffix(";").split(";\n"):
            connection.exec_driver_sql(statement)
    kept = rows(engine)
    engine.dispose()
    return kept


def check_kept(before: dict[str, list[tuple[Any, ...]]], after: dict[str, list[tuple[Any, ...]]]) -> None:
    """No row is lost. Later revisions only add columns, which come last."""
    for name, kept in before.items():
        assert [row[: len(kept[0]) if kept else 0] for row in after[name]] == kept, name


def rows(engine: sa.Engine) -> dict[str, list[tuple[Any, ...]]]:
    metadata = sa.MetaData()
    with engine.connect() as connection:
        metadata.reflect(connection)
        return {
            table.name: sorted(map(tuple, connection.execute(sa.select(table))), key=repr)
            for table in metadata.sorted_tables
            if table.name not in OURS
        }


def schema(engine: sa.Engine) -> dict[str, Any]:
    """All tables, columns, keys and indices."""
    look = sa.inspect(engine)
    return {
        name: {
            "columns": {c["name"]: (str(c["type"]), c["nullable"], c.get("default")) for c in look.get_columns(name)},
            "primary key": look.get_pk_constraint(name)["constrained_columns"],
            "foreign keys": sorted(
                (k["constrained_columns"], k["referred_table"], k["referred_columns"])
                for k in look.get_foreign_keys(name)
            ),
            "indices": sorted((i["name"], i["column_names"], bool(i["unique"])) for i in look.get_indexes(name)),
        }
        for name in look.get_table_names()
    }


def revision(engine: sa.Engine) -> str | None:
    with reading(engine) as connection:
        return database._find_revision(connection)


@pytest.fixture
def fresh_schema(database_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The schema of a new database of the same dialect."""
    if database_url.startswith("sqlite"):
        return schema(open_database(f"sqlite:///{tmp_path}/fresh.db"))
    engine = sa.create_engine(database_url)
    name = f"fresh_{request.node.name.split('[')[0]}_{tmp_path.name[-8:]}".lower().replace("-", "_")[:60]
    with engine.begin() as connection:
        connection.exec_driver_sql(f'CREATE SCHEMA "{name}"')
    options = {"options": f"-csearch_path={name}"}
    return schema(open_database(engine.url.update_query_dict(options).render_as_string(hide_password=False)))


@pytest.mark.parametrize("release", RELEASES)
def test_a_released_database_is_brought_up_to_date(
    database_url: str, release: str, fresh_schema: dict[str, Any], tmp_path: Path
) -> None:
    before = restore(database_url, release)
    engine = open_database(database_url)
    assert revision(engine) == newest_revision()
    assert schema(engine) == fresh_schema
    after = rows(engine)
    check_kept(before, after)
    # it works: the ledger continues, and numbers of rewards are not reused
    ledger, store = Ledger(engine, "run"), TrajectoryStore(engine, Objects.open(tmp_path / "store"))
    assert ledger.committed() == 1 and ledger.counts()["trained"] == 1
    store.finish("run-000001-0", "key", None, tokens=1, sampled_tokens=1, segments=1)
    assert store.grade("run-000001-0", Reward(0.5)) > 1
    ledger.group_ready("run-000001")


def test_the_tables_of_the_code_are_those_of_the_migrations(database_url: str) -> None:
    with open_database(database_url).connect() as connection:
        found = compare_metadata(MigrationContext.configure(connection), tables.metadata)
    missing_here = [one for one in found if not (one[0] == "remove_table" and one[1].name in OURS)]
    assert missing_here == []


def test_revisions_are_one_chain_named_after_their_numbers() -> None:
    scripts = ScriptDirectory(Path(migrations.__file__).parent)
    chain = [script.revision for script in scripts.walk_revisions()][::-1]
    assert chain == [f"{number:04d}" for number in range(1, len(chain) + 1)]
    assert scripts.get_heads() == [newest_revision()]


def open_one(url: str, go: Any) -> None:
    go.wait(60)
    open_database(url).dispose()


@pytest.mark.parametrize("release", ["", *RELEASES])
def test_many_processes_migrate_once(database_url: str, release: str, fresh_schema: dict[str, Any]) -> None:
    before = restore(database_url, release) if release else {}
    go = SERVER.Event()
    processes = [SERVER.Process(target=open_one, args=(database_url, go)) for _ in range(4)]
    for process in processes:
        process.start()
    go.set()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    engine = open_database(database_url)
    assert schema(engine) == fresh_schema
    check_kept(before, rows(engine))


def test_a_failed_migration_does_not_change_the_database(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = restore(database_url, RELEASES[0])

    stamp = MigrationContext.stamp

    def fail(context: MigrationContext, scripts: ScriptDirectory, revision: str) -> None:
        if revision == newest_revision():  # by then the statements of every revision have run
            raise OSError("the disk is gone")
        stamp(context, scripts, revision)

    with monkeypatch.context() as broken:
        broken.setattr(MigrationContext, "stamp", fail)
        with pytest.raises(OSError, match="gone"):
            open_database(database_url)
    engine = sa.create_engine(database_url)
    assert rows(engine) == before and "alembic_version" not in sa.inspect(engine).get_table_names()
    assert revision(open_database(database_url)) == newest_revision()


def test_a_newer_database_is_refused(database_url: str) -> None:
    engine = open_database(database_url)
    newer = sa.text("UPDATE alembic_version SET version_num = '9999'")
    writing(engine, lambda connection: connection.execute(newer))
    with pytest.raises(StorageError, match=f"revision 9999; .* up to {newest_revision()}") as caught:
        open_database(database_url)
    assert "newer rollmill" in str(caught.value.hint)
    assert revision(engine) == "9999"


def test_a_rollmill_without_migrations_refuses_a_newer_schema(database_url: str) -> None:
    """0.1.0 compares `schema_version` with 1."""
    with reading(open_database(database_url)) as connection:
        found = connection.exec_driver_sql("SELECT component, version FROM schema_version").all()
    assert [tuple(row) for row in found] == [("trajectories", 2)]
