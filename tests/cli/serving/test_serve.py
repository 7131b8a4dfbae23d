from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rollmill.config import load_config
from rollmill.runs.run import RunConfig, RunDirectory
from tests.cli.conftest import Told
from tests.cli.test_train import MICRO, refused


def test_a_directory_without_a_run(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    assert refused(rollmill("serve", tmp_path), "holds no run", "`rollmill runs`")


def test_a_run_without_weights(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, load_config(RunConfig, MICRO))
    assert refused(rollmill("serve", run.path), "'rl' has no version yet", f"--resume {run.path}")
    told = rollmill("serve", run.path, "--version", 3)
    assert refused(told, "rl@3", "")
    assert run.secrets["production_key"] not in told.err + told.out
    assert refused(rollmill("serve", run.path, "--version", "lve"), "'lve' is neither", "channels here")
