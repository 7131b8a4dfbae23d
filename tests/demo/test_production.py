"""`rollmill cycle run` under those who bring the users. No users come here, and nothing is served."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollmill.runs.cycle_journal import Journal
from rollmill.runs.lock import Holder, holder
from rollmill.runs.run import RunDirectory
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights.reading.channels import Channels
from tests.launch.served import published_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
DRIVE = """
import sys
from pathlib import Path
from rollmill.launch.launchers.local import LocalLauncher
from rollmill.runs.run import RunDirectory
from rollmill.demo.production import Production
from rollmill.demo.simulated_users import load_population
run, steady = RunDirectory.open(Path(sys.argv[1])), load_population("steady")
Production(run, run, LocalLauncher(run), batch=0).drive(1, lambda state: steady)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = published_run(tmp_path, 1)
    Channels(Objects.open(run.home_store)).move("live", Version("rl", 0))
    return run


def start(run: RunDirectory) -> tuple[subprocess.Popen[str], Holder]:
    """A process that drives a cycle, and its `cycle run`, which waits for conversations."""
    starter = subprocess.Popen([sys.executable, "-c", DRIVE, str(run.path)], stderr=subprocess.PIPE, text=True)
    journal = Journal(open_database(run.database_url), run.id)
    while journal.current() is None:
        assert starter.poll() is None
        time.sleep(0.05)
    driver = holder(run.path, "cycle")
    assert driver is not None and driver.pid != starter.pid
    return starter, driver


def test_a_driver_is_killed_with_the_process_that_started_it(run: RunDirectory) -> None:
    """Else it would hold the lock of the cycle when somebody goes on."""
    starter, driver = start(run)
    starter.kill()
    starter.wait()
    deadline = time.monotonic() + 30.0
    while holder(run.path, "cycle") is not None:
        if time.monotonic() > deadline:
            os.kill(driver.pid, signal.SIGKILL)
            pytest.fail("the driver goes on alone")
        time.sleep(0.05)


def test_a_driver_that_was_stopped_is_no_cycle_that_is_over(run: RunDirectory) -> None:
    starter, driver = start(run)
    os.kill(driver.pid, signal.SIGTERM)
    _, told = starter.communicate()
    assert starter.returncode == 1 and "was stopped: 0 of 1 cycles are over" in told
