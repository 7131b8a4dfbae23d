"""Fixtures shared by all tests: every test that takes `database_url` runs on SQLite and on a real PostgreSQL.

PostgreSQL is found on PATH or where Linux distributions put it, and started once a session on a Unix socket of its own.
ROLLMILL_TEST_POSTGRES=required makes a missing one an error (continuous integration), =off leaves it out.

Tests marked `kernels` run on a CUDA device or in Triton's interpreter: see tests/kernels.py.

ROLLMILL_TEST_SELECTION names a file of tests/selection.py: of the slow tests only those in the files that it lists run.
ROLLMILL_TEST_DURATIONS=yes notes in tests/durations.json how long the slow tests took.
"""

from __future__ import annotations

import itertools
import json
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

DURATIONS = Path(__file__).with_name("durations.json")
_numbers = itertools.count()
_seconds: Counter[str] = Counter()  # of slow tests, by file; empty in a worker of xdist


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out slow tests that were not chosen. Each worker starts with its share of the others, as they are long."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    slow = [item for item in items if item.get_closest_marker("slow")]
    fast = [item for item in items if not item.get_closest_marker("slow")]
    items.clear()
    if path := os.environ.get("ROLLMILL_TEST_SELECTION"):
        chosen = Path(path).read_text().splitlines()
        config.hook.pytest_deselected(items=[item for item in slow if _file(item.nodeid) not in chosen])
        slow = [item for item in slow if _file(item.nodeid) in chosen]
    for worker in range(workers):  # xdist gives the first worker the first tests, and so on
        first, last = (len(fast) * edge // workers for edge in (worker, worker + 1))
        items += slow[worker::workers] + fast[first:last]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "slow" in report.keywords and "PYTEST_XDIST_WORKER" not in os.environ:
        _seconds[_file(report.nodeid)] += report.duration


def pytest_sessionfinish() -> None:
    if _seconds and os.environ.get("ROLLMILL_TEST_DURATIONS"):
        record(_seconds)


def record(seconds: Mapping[str, float], path: Path = DURATIONS) -> None:
    """Notes how long the slow tests of files took. Other files keep their seconds while they exist."""
    root = DURATIONS.parents[1]
    kept = {file: took for file, took in json.loads(path.read_text()).items() if (root / file).exists()}
    rounded = {file: round(took, 1) for file, took in seconds.items()}
    path.write_text(json.dumps({**kept, **rounded}, indent=0, sort_keys=True) + "\n")


def _file(test: str) -> str:
    return test.partition("::")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("kernels"):
        from tests.kernels import prepare  # imports torch, as every test of a kernel has

        prepare()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh, empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/mill.db"
    directory = request.getfixturevalue("postgresql_directory")
    schema = f"test_{next(_numbers)}"  # a database of its own would take half a second
    _psql(directory, f"CREATE SCHEMA {schema}")
    return f"postgresql+psycopg://rollmill@/postgres?host={directory}&options=-csearch_path%3D{schema}"


@pytest.fixture(scope="session")
def postgresql_directory() -> Iterator[Path]:
    """The socket directory of a running server."""
    wanted = os.environ.get("ROLLMILL_TEST_POSTGRES", "found")
    if wanted == "off":
        pytest.skip("ROLLMILL_TEST_POSTGRES=off")
    programs = _find_programs()
    if programs is None:
        message = "PostgreSQL (initdb, postgres) was not found; install it, or set ROLLMILL_TEST_POSTGRES=off"
        if wanted == "required":
            pytest.fail(message)
        pytest.skip(message)
    # not under tmp_path: its path is too long for a socket, and closed to the user the server runs as
    directory = Path(tempfile.mkdtemp(prefix="rollmill-pg-"))
    identity = _unprivileged(directory)
    try:
        server = _start(programs, directory, identity)
        try:
            yield directory
        finally:
            server.send_signal(signal.SIGQUIT)  # "immediate": nobody will read this data again
            server.wait(30)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _find_programs() -> Path | None:
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "postgres").exists()), None)


def _unprivileged(directory: Path) -> dict[str, object]:
    """PostgreSQL refuses to run as root: arguments for subprocess that make it somebody else."""
    if os.getuid() != 0:
        return {}
    names = {entry.pw_name for entry in pwd.getpwall()}
    user = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
    os.chown(directory, user.pw_uid, user.pw_gid)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _start(programs: Path, directory: Path, identity: dict[str, object]) -> subprocess.Popen[bytes]:
    data = directory / "data"
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "HOME": str(directory)}
    initdb = [programs / "initdb", "-D", data, "-U", "rollmill", "-A", "trust", "-E", "UTF8", "--no-sync"]
    made = subprocess.run(initdb, capture_output=True, env=environment, cwd=directory, **identity)  # type: ignore[call-overload]
    assert made.returncode == 0, made.stderr.decode()
    settings = ["listen_addresses=", f"unix_socket_directories={directory}", "fsync=off", "shared_buffers=16MB"]
    arguments = [part for setting in settings for part in ("-c", setting)]
    server = subprocess.Popen(  # type: ignore[call-overload]
        [programs / "postgres", "-D", data, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=(directory / "log").open("wb"),
        env=environment,
        cwd=directory,
        **identity,
    )
    _wait_until_ready(server, directory)
    return server


def _wait_until_ready(server: subprocess.Popen[bytes], directory: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            return _psql(directory, "SELECT 1")
        except Exception:
            if server.poll() is not None or time.monotonic() > deadline:
                raise AssertionError((directory / "log").read_text()) from None
            time.sleep(0.05)


def _psql(directory: Path, statement: str) -> None:
    import psycopg

    with psycopg.connect(host=str(directory), user="rollmill", dbname="postgres", autocommit=True) as connection:
        connection.execute(statement)
