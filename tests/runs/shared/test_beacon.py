"""A run on one host with its objects in S3, as commands on another host see it, which reach nothing but the store."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollmill.cli.main import app
from rollmill.errors import ConfigError, RollmillError, StorageError
from rollmill.launch.launchers.local import Local, terminable
from rollmill.runs.opening import describe_run, need_index, open_run
from rollmill.runs.run import RunDirectory
from rollmill.runs.saved import KEY
from rollmill.runs.shared import beacon
from rollmill.runs.shared.beacon import Beacon, driven_elsewhere
from rollmill.runs.shared.presence import Presence
from rollmill.storage.objects import Objects
from tests.runs.conftest import make_config
from tests.storage.serving import new_bucket, s3_environment, s3_server

SMALL = ("layers=1", "width=16", "heads=2", "kv_heads=1", "head_dim=8", "mlp_width=16", "expert_width=8")
ENDLESS = ("stages.midtrain.steps=100000", "stages.midtrain.training.threads=1")
TRAIN = "from rollmill.cli.main import main; main()"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    for name, value in s3_environment(s3_server()).items():
        monkeypatch.setenv(name, value)
    settings = (*ENDLESS, *(f"model.{setting}" for setting in SMALL), f"store={new_bucket()!r}")
    return RunDirectory.create(tmp_path / "runs", make_config(*settings))


def until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.1)


@pytest.mark.slow
def test_a_run_of_another_host_is_seen_scaled_and_stopped_by_the_url_of_its_objects(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, presence = str(run.home_store), Presence(Objects.open(run.home_store))
    train = [sys.executable, "-P", "-c", TRAIN, "train", "--resume", str(run.path)]
    driver = subprocess.Popen(train, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        until(lambda: presence.where() or driver.poll() is not None)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setattr(socket, "gethostname", lambda: "another-host")

        def command(*words: str) -> str:
            return CliRunner().invoke(app, [*words]).output

        assert "training" in (said := command("status", url)) and f"process {driver.pid} on" in said
        there = open_run(Path(url))
        until(lambda: command("status", url) and (there.events / "trainer.jsonl").exists())
        with (run.logs / "trainer.log").open("a") as log:
            log.write("a line of the trainer\n")
        until(lambda: "a line of the trainer" in command("logs", url, "trainer"))
        assert there.path.is_relative_to(tmp_path / "home") and "home: 3 engines" in command("scale", url, "engines=3")
        refused = CliRunner().invoke(app, ["train", "--resume", url])
        assert isinstance(refused.exception, RollmillError) and "is driven by process" in str(refused.exception)
        with (run.logs / "trainer.log").open("a") as log:
            log.write("another line\n")
        until(lambda: "another line" in command("logs", url, "trainer"))
        assert "stopped" in command("stop", url) and driver.wait(60) == 130, driver.communicate()
        assert "stopped" in command("status", url) and presence.where() is None and not presence.asked_to_stop()
    finally:
        driver.kill()
        driver.wait()


def test_a_run_is_not_resumed_where_its_index_is_not(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index in SQLite is a file of the host where the run began: another host would begin an empty one."""
    describe_run(run)
    objects, first = Objects.open(run.home_store), socket.gethostname()
    described = objects.get(KEY)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
    monkeypatch.setattr(Local, "open", lambda *_: pytest.fail("it was started"))
    there = open_run(Path(str(run.home_store)))
    assert there.path != run.path
    for name in (str(run.home_store), str(there.path)):
        refused = CliRunner().invoke(app, ["train", "--resume", name])
        assert isinstance(refused.exception, ConfigError), refused.output
        assert "is an SQLite database on another host" in str(refused.exception)
        assert f"give the command on {first}, where {run.path} is the run" in str(refused.exception.hint)
    for command in (["cycle", "run"], ["cycle", "status"], ["serve"], ["eval"], ["gate"], ["trajectories", "list"]):
        refused = CliRunner().invoke(app, [*command, str(run.home_store), *(["3"] if command == ["gate"] else [])])
        assert isinstance(refused.exception, ConfigError), refused.output
        assert "is an SQLite database on another host" in str(refused.exception)
    assert not (there.path / "mill.db").exists() and objects.get(KEY) == described
    # one that other hosts reach too
    shared = tmp_path / "shared.db"
    for database in (f"sqlite:///{shared}", "postgresql://mill@db/mill"):
        shared.touch()
        need_index(replace(there, config=there.config.model_copy(update={"database": database})))
    shared.unlink()
    with pytest.raises(ConfigError, match="is an SQLite database on another host"):
        need_index(replace(there, config=there.config.model_copy(update={"database": f"sqlite:///{shared}"})))


def test_a_run_is_not_resumed_where_its_database_does_not_answer(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = "postgresql+psycopg://mill:a-secret@127.0.0.1:1/mill?connect_timeout=2"
    describe_run(replace(run, config=run.config.model_copy(update={"database": away})))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
    monkeypatch.setattr(Local, "open", lambda *_: pytest.fail("it was started"))
    refused = CliRunner().invoke(app, ["train", "--resume", str(run.home_store)])
    assert isinstance(refused.exception, ConfigError), refused.output
    assert "the database cannot be used" in str(refused.exception) and "~/.pgpass" in str(refused.exception.hint)
    assert "a-secret" not in str(refused.exception), "the store has no password"


def test_a_supervisor_that_was_killed_on_this_host_is_in_nobodys_way(run: RunDirectory) -> None:
    """Its lock is free, although the store says for a while that it drives the run."""
    code = "import sys, time; from pathlib import Path; from rollmill.runs.shared.beacon import Beacon; "
    code += "from rollmill.runs.run import RunDirectory; "
    code += "Beacon(RunDirectory.open(Path(sys.argv[1]))).__enter__(); print('told', flush=True); time.sleep(600)"
    killed = subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE)
    assert killed.stdout is not None and killed.stdout.readline() == b"told\n"
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    presence = Presence(Objects.open(run.home_store))
    assert f"process {killed.pid} on {socket.gethostname()}" in str(presence.where())
    with Beacon(run):
        assert f"process {os.getpid()} on" in str(presence.where())
    assert presence.where() is None


def test_a_supervisor_gives_way_to_one_that_has_taken_the_run_over(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beacon, "LOOK_S", 0.05)
    monkeypatch.setattr(beacon, "RENEW_S", 0.1)
    presence, other = Presence(Objects.open(run.home_store)), "process 1 on another-host, in /runs/small"
    with terminable(), pytest.raises(RollmillError, match=f"is driven by {other} now"), Beacon(run):
        cached = replace(run, path=tmp_path / "of-another-user")  # on this host, with a lock of its own
        assert driven_elsewhere(run) is None and f"process {os.getpid()} on" in str(driven_elsewhere(cached))
        for _ in range(600):
            presence.renew(other, 0.0)  # as if this one had been away
            time.sleep(0.1)
    assert presence.said() == (other, 0.0), "it is left alone"


def test_a_store_that_does_not_answer_at_first_is_told_later(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beacon, "LOOK_S", 0.05)
    objects, describe, failures = Objects.open(run.home_store), beacon.describe_run, [StorageError("away")] * 2

    def fails_first(described: RunDirectory) -> None:
        if failures:
            raise failures.pop()
        describe(described)

    monkeypatch.setattr(beacon, "describe_run", fails_first)
    presence = Presence(objects)
    presence.ask_to_stop()  # of a supervisor that is gone
    with terminable(), Beacon(run):
        until(lambda: objects.head(KEY) is not None and not presence.asked_to_stop())
        time.sleep(0.3)  # nothing stops it
    assert presence.where() is None
