"""`[cluster] kind = "package.module:Class"`: a cluster of one's own, driven by the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollmill.cli.main import app
from rollmill.config import Config
from rollmill.errors import ConfigError, RollmillError
from rollmill.runs.run import RunConfig, RunDirectory
from tests.e2e.small_run import DEMO

ASKED: list[str] = []  # of the cluster and its launcher, in order


class OwnConfig(Config):
    rooms: int = 1


class Own:
    elsewhere = False

    def __init__(self, config: OwnConfig) -> None:
        self._rooms = config.rooms

    def check(self, config: RunConfig) -> None:
        if not self._rooms:
            raise ConfigError("there is no room")
        ASKED.append("check")

    def open(self, run: RunDirectory) -> OwnLauncher:
        return OwnLauncher()

    def submit(self, run: RunDirectory) -> None:
        ASKED.append(f"submit {run.config.name}")

    def collect(self, run: RunDirectory) -> str | None:
        return "a node of its own"

    def halt(self, run: RunDirectory) -> None: ...


class Elsewhere(Own):
    elsewhere = True


class OwnLauncher:
    """It starts nothing, and cannot keep it alive."""

    def start(self, role: str, *arguments: str, threads: int = 1, service: bool = False, ranks: int = 1) -> None:
        ASKED.append(" ".join(("start", role, *arguments)))

    def rescale(self, run: RunDirectory) -> None: ...

    def running(self) -> list[str]:
        return []

    def ended(self, role: str) -> bool:
        return False

    def watch(self) -> None:
        raise RollmillError("a launcher of its own gave up")

    def stop_roles(self) -> None: ...

    def stop(self) -> None:
        ASKED.append("stop")


@pytest.fixture(autouse=True)
def _forgets() -> None:
    ASKED.clear()


def train(tmp_path: Path, name: str, *words: str) -> Any:
    kind = f"cluster.kind={__name__}:{name}"
    return CliRunner().invoke(app, ["train", str(DEMO), "name=own", kind, "--root", str(tmp_path), *words])


def test_a_run_is_checked_started_and_stopped_by_it(tmp_path: Path) -> None:
    ended = train(tmp_path, "Own")
    assert isinstance(ended.exception, RollmillError) and "gave up" in str(ended.exception), ended.output
    assert ASKED == ["check", "start trainer midtrain", "stop"]


def test_it_refuses_by_its_own_settings_before_anything_is_written(tmp_path: Path) -> None:
    for words in ((), ("--dry-run",)):
        refused = train(tmp_path, "Own", "cluster.rooms=0", *words)
        assert isinstance(refused.exception, ConfigError) and "there is no room" in str(refused.exception)
    wrong = train(tmp_path, "Own", "cluster.room=1")
    assert "did you mean 'rooms'" in str(wrong.exception)
    assert ASKED == [] and not (tmp_path / "own").exists()


def test_the_supervisor_may_live_there(tmp_path: Path) -> None:
    left = train(tmp_path, "Elsewhere", "--detach")
    assert left.exit_code == 0 and "trains in the background" in left.output, left.output
    assert ASKED == ["check", "submit own"]
    status = CliRunner().invoke(app, ["status", str(tmp_path / "own")], env={"COLUMNS": "200"})
    assert "a node of its own" in status.output, (status.output, status.exception)
