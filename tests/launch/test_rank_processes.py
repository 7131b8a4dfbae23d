"""Ranks start and end together."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from rollmill.errors import ConfigError, RollmillError
from rollmill.launch.fork_server import Child, ForkServer
from rollmill.launch.launcher import FINAL
from rollmill.launch.launchers.local import LocalLauncher, _end_all
from rollmill.launch.rank_processes import begin_run, outside_rank, outside_world, places
from rollmill.runs.run import RunDirectory


@pytest.fixture
def cluster(run: RunDirectory) -> Iterator[LocalLauncher]:
    cluster = LocalLauncher(run)
    yield cluster
    cluster.stop()


def test_the_environment_of_ranks() -> None:
    first, second = places(2)
    assert first.pop("RANK") == first.pop("LOCAL_RANK") == "0"
    assert second.pop("RANK") == second.pop("LOCAL_RANK") == "1"
    assert first == second and first["WORLD_SIZE"] == first["LOCAL_WORLD_SIZE"] == "2"
    assert places(1) == [{}]


def test_ranks_started_by_torchrun(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not outside_world() and outside_rank() == 0
    with pytest.raises(ConfigError, match="already holds a run"):
        begin_run(run.path.parent, run.config)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert outside_world() and outside_rank() == 1
    assert begin_run(run.path.parent, run.config) == run, "the first rank has created it"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert begin_run(run.path.parent, run.config) == run, "all were started again"


class OfCode(Child):
    """A child that runs a line of Python."""

    def __init__(self, code: str) -> None:
        super().__init__(ForkServer(), 0)
        self._process = subprocess.Popen([sys.executable, "-c", code])

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        return self._process.returncode

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


def test_the_error_is_that_of_the_rank_with_the_final_exit_code() -> None:
    """Rank 0 was killed, another exits with FINAL, a third still runs."""
    codes = ["import os, signal; os.kill(os.getpid(), signal.SIGKILL)", f"raise SystemExit({FINAL})"]
    processes = [OfCode(code) for code in (*codes, "import time; time.sleep(600)")]
    processes[0].wait(60)
    assert _end_all(processes) == (1, FINAL)
    assert all(process.poll() is not None for process in processes)


@pytest.mark.slow
def test_a_world_of_another_size_is_refused(run: RunDirectory, cluster: LocalLauncher) -> None:
    cluster.start("trainer", "midtrain", ranks=2)
    with pytest.raises(RollmillError, match=r"training\.ranks is 1, but the environment describes 2 ranks"):
        while True:
            cluster.watch()
            time.sleep(0.05)
