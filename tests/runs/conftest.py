from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollmill.config import load_config
from rollmill.runs.run import RunConfig, RunDirectory
from tests.e2e.small_run import DEMO


def make_config(*overrides: str) -> RunConfig:
    return load_config(RunConfig, DEMO, ["name=small", *overrides])


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunDirectory]:
    return lambda *overrides: RunDirectory.create(tmp_path, make_config(*overrides))


@pytest.fixture
def run(make_run: Callable[..., RunDirectory]) -> RunDirectory:
    return make_run()
