from __future__ import annotations

import subprocess
import sys

import pytest

from rollmill.cluster.run import RunDirectory
from tests.e2e.small_run import small_run


@pytest.fixture(scope="session")
def midtrained(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Mid-trained weights that every test of this folder starts from."""
    run = small_run(tmp_path_factory.mktemp("base"), "base")
    command = [sys.executable, "-m", "rollmill.cluster.role", "midtrain", str(run.path)]
    subprocess.run(command, check=True)
    return run
