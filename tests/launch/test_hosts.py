"""A run on one host that another host goes on with: S3, PostgreSQL and every process are real, and hosts are lost."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.day_night import KIND
from rollmill.cli.main import app
from rollmill.demo import CONFIG as DEMO
from rollmill.errors import ConfigError
from rollmill.runs.opening import open_run
from rollmill.runs.run import RunDirectory
from rollmill.runs.shared.presence import Presence
from rollmill.runs.status import state_of
from rollmill.storage.objects import Objects
from tests.e2e.small_run import BRIEF_EVALS, SMALL
from tests.e2e.test_kill import check_report, check_stores, digests, finished_ids, stores
from tests.launch.chance import TINY
from tests.launch.hosts import Host, named_host
from tests.storage.serving import new_bucket, s3_environment, s3_server

pytestmark = pytest.mark.slow
NAME, ROOT = "moved", "/tmp/home/runs"
ROLLMILL = (sys.executable, "-P", "-c", "from rollmill.cli.main import main; main()")


class Driver:
    """`rollmill train` on a host."""

    def __init__(self, host: Host, output: Path, *words: str) -> None:
        self.host, self._output = host, output
        self.process = host.run(*ROLLMILL, "train", *words, stdout=output.open("w"), stderr=subprocess.STDOUT)

    @property
    def said(self) -> str:
        return " ".join(self._output.read_text().split())

    def until(self, condition: Callable[[], object]) -> None:
        """The time limit is that of the test."""
        while not condition():
            assert self.process.poll() is None, self.said[-3000:]
            time.sleep(0.1)


def resume(host: Host, output: Path, url: str, presence: Presence) -> Driver:
    """As a user does who is told that the lost host is not forgotten yet: again and again."""
    while True:
        driver = Driver(host, output, "--resume", url)
        while driver.process.poll() is None:
            if f"on {output.name}," in str(presence.where()):
                return driver
            time.sleep(0.1)
        assert "is driven by process" in driver.said and "a lost host is forgotten" in driver.said, driver.said[-3000:]


def follow_log(reader: Host, writer: Host, url: str, driver: Driver) -> None:
    """`logs -f` on one host shows a line that is written on another."""

    def write(line: str) -> None:
        assert writer.run("bash", "-c", f"echo {line} >> {ROOT}/{NAME}/logs/trainer.log").wait() == 0

    write("first")
    driver.until(lambda: "first" in CliRunner().invoke(app, ["logs", url, "trainer"]).output)
    follower = reader.run(*ROLLMILL, "logs", url, "trainer", "-f", stdout=subprocess.PIPE)
    assert follower.stdout is not None and any("first" in line for line in follower.stdout)
    write("second")
    assert any("second" in line for line in follower.stdout)
    os.killpg(follower.pid, signal.SIGKILL)


def opened(bucket: str) -> RunDirectory | None:
    with contextlib.suppress(ConfigError):  # it has not told what it is
        return next((open_run(Path(f"{bucket}/{id}")) for id in Objects.open(bucket).folders()), None)
    return None


@pytest.mark.timeout(900)
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_another_host_goes_on_with_a_run(
    tmp_path: Path, database_url: str, postgresql_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first host is lost. The second one is away for so long that a third one takes over, and comes back."""
    environment = {**s3_environment(s3_server()), "PYTHONPATH": os.getcwd(), "HOME": str(tmp_path / "home")}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    bucket, draw = new_bucket(), random.Random(os.urandom(8))
    seen_digests: dict[int, str] = {}
    seen_finished: set[str] = set()
    with contextlib.ExitStack() as stack:
        first, second, third = (
            stack.enter_context(named_host(name, tmp_path, postgresql_directory)) for name in ("one", "two", "three")
        )
        engines = ",".join(f"{{region='{region}',kind='{KIND}',token_s=0.1}}" for region in ("home", "away"))
        dials = (f"engines=[{engines}]", "stages.rl.steps=16", "stages.rl.groups_per_step=2", *BRIEF_EVALS)
        settings = (f"store={bucket!r}", f"database={database_url!r}", f"name={NAME}", *SMALL, *TINY, *dials)
        driver = Driver(first, tmp_path / "one", str(DEMO), "--root", ROOT, *settings)
        driver.until(lambda: opened(bucket))
        run = opened(bucket)
        assert run is not None
        url, presence = str(run.home_store), Presence(Objects.open(run.home_store))
        weights, ledger, trajectories = stores(run)

        def next_moment(driver: Driver) -> None:
            before = ledger.committed()
            driver.until(lambda: ledger.committed() > before)
            time.sleep(draw.uniform(0, 1))
            seen_digests.update(digests(weights, "rl"))
            seen_finished.update(finished_ids(trajectories, run))

        next_moment(driver)
        follow_log(third, first, url, driver)
        first.kill()
        driver = resume(second, tmp_path / "two", url, presence)
        next_moment(driver)
        next_moment(driver)
        second.signal(signal.SIGSTOP)
        away, driver = driver, resume(third, tmp_path / "three", url, presence)
        next_moment(driver)
        second.signal(signal.SIGCONT)
        away.process.send_signal(signal.SIGCONT)  # nsenter stops when the command stops that it has started
        assert away.process.wait() == 1 and "on three, " in away.said, away.said[-3000:]
        assert driver.process.wait() == 0, driver.said[-3000:]
        assert state_of(run).word == "finished"

    check_stores(run, seen_digests, seen_finished)
    check_report(run)
    assert weights.lines() == ["midtrain", "rl"], "no step that ran again has other bits"
    assert "finished" in CliRunner().invoke(app, ["status", url]).output
