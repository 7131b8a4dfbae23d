"""Any process makes the schema, on SQLite and on PostgreSQL. One that is too old or too new is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from rollmill.errors import StorageError
from rollmill.storage import database, migrations
from rollmill.storage.database import newest_revision, open_database, reading, writing
from rollmill.trajectories import tables
from tests.processes import SERVER

OURS = "alembic_version"  # the table about the schema itself


def schema(engine: sa.Engine) -> dict[str, Any]:
    """All tables, columns, keys and indices; of SQLite the statements too, which say that numbers are not reused."""
    look = sa.inspect(engine)
    found: dict[str, Any] = {
        name: {
            "columns": [(c["name"], str(c["type"]), c["nullable"], c.get("default")) for c in look.get_columns(name)],
            "primary key": look.get_pk_constraint(name)["constrained_columns"],
            "foreign keys": sorted(
                (k["constrained_columns"], k["referred_table"], k["referred_columns"])
                for k in look.get_foreign_keys(name)
            ),
            "unique": sorted(one["column_names"] for one in look.get_unique_constraints(name)),
            "indices": sorted((i["name"], i["column_names"], bool(i["unique"])) for i in look.get_indexes(name)),
        }
        for name in look.get_table_names()
        if name != OURS
    }
    if engine.dialect.name == "sqlite":
        with engine.connect() as connection:
            rows = connection.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE tbl_name != ?", (OURS,))
            found["statements"] = {name: sql for name, sql in rows if not name.startswith("sqlite_")}
    return found


def revision(engine: sa.Engine) -> str | None:
    with reading(engine) as connection:
        return database._find_revision(connection)


@pytest.fixture
def schema_of_the_code(database_url: str, tmp_path: Path) -> dict[str, Any]:
    """The schema that `tables.py` says, in another database of the same dialect."""
    if database_url.startswith("sqlite"):
        engine = sa.create_engine(f"sqlite:///{tmp_path}/of_the_code.db")
    else:
        url = sa.make_url(database_url)
        name = str(url.query["options"]).partition("=")[2] + "_of_the_code"
        with sa.create_engine(url).begin() as connection:
            connection.exec_driver_sql(f'CREATE SCHEMA "{name}"')
        engine = sa.create_engine(url.update_query_dict({"options": f"-csearch_path={name}"}))
    tables.metadata.create_all(engine)
    return schema(engine)


def test_the_tables_of_the_code_are_those_of_the_migrations(
    database_url: str, schema_of_the_code: dict[str, Any]
) -> None:
    found = schema(open_database(database_url))
    assert set(found) - {"statements"} == set(tables.metadata.tables)
    assert found == schema_of_the_code


def test_revisions_are_one_chain_named_after_their_numbers() -> None:
    scripts = ScriptDirectory(Path(migrations.__file__).parent)
    chain = [script.revision for script in scripts.walk_revisions()][::-1]
    assert chain == [f"{number:04d}" for number in range(15, 15 + len(chain))]
    assert scripts.get_heads() == [newest_revision()]


def open_one(url: str, go: Any) -> None:
    go.wait(60)
    open_database(url).dispose()


def test_many_processes_migrate_once(database_url: str, schema_of_the_code: dict[str, Any]) -> None:
    go = SERVER.Event()
    processes = [SERVER.Process(target=open_one, args=(database_url, go)) for _ in range(4)]
    for process in processes:
        process.start()
    go.set()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert schema(open_database(database_url)) == schema_of_the_code


def test_a_failed_migration_does_not_change_the_database(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(context: MigrationContext, scripts: ScriptDirectory, revision: str) -> None:
        raise OSError("the disk is gone")  # by now the statements have run

    with monkeypatch.context() as broken:
        broken.setattr(MigrationContext, "stamp", fail)
        with pytest.raises(OSError, match="gone"):
            open_database(database_url)
    assert sa.inspect(sa.create_engine(database_url)).get_table_names() == []
    assert revision(open_database(database_url)) == newest_revision()


def test_a_newer_database_is_refused(database_url: str) -> None:
    engine = open_database(database_url)
    newer = sa.text("UPDATE alembic_version SET version_num = '9999'")
    writing(engine, lambda connection: connection.execute(newer))
    with pytest.raises(StorageError, match=f"revision 9999; .* up to {newest_revision()}") as caught:
        open_database(database_url)
    assert "newer rollmill" in str(caught.value.hint)
    assert revision(engine) == "9999"


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("found", ["0001", "0014", None])
def test_a_database_from_before_is_refused_and_left_as_it_is(
    database_url: str, found: str | None, read_only: bool
) -> None:
    engine = open_database(database_url)
    older = f"UPDATE alembic_version SET version_num = '{found}'" if found else "DROP TABLE alembic_version"
    writing(engine, lambda connection: connection.exec_driver_sql(older))
    writing(engine, lambda connection: connection.exec_driver_sql("DROP TABLE splits"))
    before = schema(engine)
    with pytest.raises(StorageError, match=f"revision {found or '0001'}; .* from 0015 on") as caught:
        open_database(database_url, read_only=read_only)
    assert "`rollmill trajectories export` of the release that wrote it" in str(caught.value.hint)
    assert schema(engine) == before and revision(engine) == (found or "0001")
