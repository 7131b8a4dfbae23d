from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollmill.config import load_config
from rollmill.runs.run import RunConfig, RunDirectory
from tests.cli.conftest import Told
from tests.cli.test_train import MICRO, refused


def test_a_directory_without_a_run(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    assert refused(rollmill("eval", tmp_path), "holds no run", "`rollmill runs`")


def test_a_run_without_weights(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, load_config(RunConfig, MICRO))
    assert refused(rollmill("eval", run.path), "'rl' has no version yet", f"--resume {run.path}")
    assert refused(rollmill("eval", run.path, "--version", 3), "rl@3", "")


@pytest.mark.parametrize("option", ["--tasks", "--attempts"])
def test_zero_tasks_or_attempts_are_refused(rollmill: Callable[..., Told], tmp_path: Path, option: str) -> None:
    assert rollmill("eval", tmp_path, option, 0).code == 2
