"""Any process makes the schema, on SQLite and on PostgreSQL. One that is too old or too new is refused.

`schemas` holds the SQL of every revision; `python -m tests.storage.test_migrations` writes that of the newest.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from rollmill.errors import StorageError
from rollmill.storage import database, migrations, tables
from rollmill.storage.database import newest_revision, open_database, reading, writing
from tests.processes import SERVER

SCHEMAS = Path(__file__).with_name("schemas")
DIALECTS = ("sqlite", "postgresql")
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
            found["statements"] = {name: " ".join(sql.split()) for name, sql in rows if not name.startswith("sqlite_")}
    return found


def revision(engine: sa.Engine) -> str | None:
    with reading(engine) as connection:
        return database._find_revision(connection)


def statements(dialect: str) -> str:
    """What makes the tables in an empty database: all tables, then their indices by name."""
    found: list[str] = []
    engine = sa.create_mock_engine(f"{dialect}://", lambda ddl, *_: found.append(str(ddl.compile(engine)).strip()))
    tables.metadata.create_all(engine)
    found.sort(key=lambda one: "" if one.startswith("CREATE TABLE") else one.replace("UNIQUE ", ""))
    return "".join(f"{one};\n" for one in found).replace(", \n", ",\n")


def stored(number: str, dialect: str) -> Path:
    return SCHEMAS / f"{number}.{dialect}.sql"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_tables_are_those_of_the_newest_revision(dialect: str) -> None:
    remedy = (
        "databases that exist need a revision: add it, then `python -m tests.storage.test_migrations` stores the SQL"
    )
    assert stored(newest_revision(), dialect).read_text() == statements(dialect), remedy


@pytest.mark.parametrize("number", sorted({path.name.partition(".")[0] for path in SCHEMAS.glob("*.sql")}))
def test_a_database_of_any_revision_becomes_like_a_new_one(database_url: str, number: str) -> None:
    engine = open_database(database_url)
    new = schema(engine)

    def make_older(connection: sa.Connection) -> None:
        tables.metadata.drop_all(connection)
        for statement in stored(number, engine.dialect.name).read_text().split(";\n")[:-1]:
            connection.exec_driver_sql(statement)
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{number}'")

    writing(engine, make_older)
    engine = open_database(database_url)
    assert schema(engine) == new and revision(engine) == newest_revision()


def test_revisions_are_one_chain_named_after_their_numbers() -> None:
    scripts = ScriptDirectory(Path(migrations.__file__).parent)
    chain = [script.revision for script in scripts.walk_revisions()][::-1]
    assert chain == [f"{number:04d}" for number in range(15, 15 + len(chain))]
    assert scripts.get_heads() == [newest_revision()]


def open_one(url: str, go: Any) -> None:
    go.wait(60)
    open_database(url).dispose()


def test_many_processes_make_the_tables_once(database_url: str) -> None:
    go = SERVER.Event()
    processes = [SERVER.Process(target=open_one, args=(database_url, go)) for _ in range(4)]
    for process in processes:
        process.start()
    go.set()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    engine = open_database(database_url)
    assert set(schema(engine)) - {"statements"} == set(tables.metadata.tables)
    assert revision(engine) == newest_revision()


def test_a_failure_leaves_the_database_empty(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(context: MigrationContext, scripts: ScriptDirectory, revision: str) -> None:
        raise OSError("the disk is gone")  # by now the statements have run

    with monkeypatch.context() as broken:
        broken.setattr(MigrationContext, "stamp", fail)
        with pytest.raises(OSError, match="gone"):
            open_database(database_url)
    assert sa.inspect(sa.create_engine(database_url)).get_table_names() == []
    assert revision(open_database(database_url)) == newest_revision()


LATER = """
import sqlalchemy as sa
from alembic import op

revision = "9998"
down_revision = "{before}"


def upgrade() -> None:
    op.add_column("splits", sa.Column("note", sa.Text))
    {then}
"""


@pytest.fixture
def later_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Adds a revision, as a later release would; it ends with a statement of the test."""
    versions = tmp_path / "migrations" / "versions"
    shutil.copytree(database._REVISIONS, versions)
    before = newest_revision()

    def add(then: str) -> None:
        (versions / "r9998_note.py").write_text(LATER.format(before=before, then=then))
        monkeypatch.setattr(database, "_REVISIONS", versions)

    return add


def test_a_later_revision_keeps_all_rows(database_url: str, later_revision: Callable[[str], None]) -> None:
    engine = open_database(database_url)
    row = {"run": "r", "model": "m", "weights": "{}", "updated_at": 1.0}
    writing(engine, lambda connection: connection.execute(tables.splits.insert(), row))
    later_revision("pass")
    with pytest.raises(StorageError, match="reads revision 9998"):
        open_database(database_url, read_only=True)
    with reading(open_database(database_url)) as connection:
        assert connection.exec_driver_sql("SELECT * FROM splits").mappings().one() == {**row, "note": None}
    assert revision(engine) == "9998"


def test_a_later_revision_that_fails_changes_nothing(database_url: str, later_revision: Callable[[str], None]) -> None:
    engine = open_database(database_url)
    before = schema(engine)
    later_revision("raise OSError('the disk is gone')")
    with pytest.raises(OSError, match="gone"):
        open_database(database_url)
    assert schema(engine) == before and revision(engine) == "0015"


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


if __name__ == "__main__":
    for name in DIALECTS:
        stored(newest_revision(), name).write_text(statements(name))
