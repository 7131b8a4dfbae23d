from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollmill.runs.run import RunDirectory
from tests.e2e.small_run import small_run


@pytest.fixture(scope="session")
def midtrained(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Mid-trained weights that every test of this folder starts from. The first worker that asks makes them for all."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # the directory that all workers share
    done = root / "midtrained.done"
    with (root / "midtrained.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            run = small_run(root / "midtrained", "base")
            command = [sys.executable, "-m", "rollmill.launch.role", "trainer", str(run.path), "midtrain"]
            subprocess.run(command, check=True)
            done.write_text(str(run.path))
    return RunDirectory.open(Path(done.read_text()))
