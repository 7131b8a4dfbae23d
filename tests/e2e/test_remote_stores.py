"""A run whose objects are in S3 and whose index is in PostgreSQL: both real servers, and processes that die."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollmill.cli.main import app
from rollmill.runs.run import RunDirectory
from rollmill.runs.status import state_of
from rollmill.storage.objects import Objects
from rollmill.types import TrajectoryState
from rollmill.weights.reading.weight_store import WeightStore
from tests.e2e.small_run import BRIEF_EVALS, small_run
from tests.e2e.test_kill import pid_of, stage_key, start, stores, wait_for
from tests.storage.serving import new_bucket, s3_environment, s3_server

pytestmark = pytest.mark.slow
SECRET = "a-secret-of-the-bucket"


def copy_objects(source: Objects, target: Objects) -> None:
    for key in source.list(""):
        target.create(key, source.get(key))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_run_in_s3_and_postgresql(
    tmp_path: Path, midtrained: RunDirectory, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**s3_environment(s3_server()), "AWS_SECRET_ACCESS_KEY": SECRET}.items():
        monkeypatch.setenv(name, value)
    run = small_run(tmp_path, "remote", f"store={new_bucket()!r}", f"database={database_url!r}", *BRIEF_EVALS)
    copy_objects(Objects.open(midtrained.home_store), Objects.open(run.home_store))
    weights, ledger, trajectories = stores(run)
    process = start(run)
    try:
        for number, victim in enumerate(("trainer", "gateway")):
            wait_for(lambda number=number: ledger.committed() > number, process, run)  # type: ignore[misc]
            pid = pid_of(run, victim)
            assert pid is not None, f"{victim} is not running"
            os.kill(pid, signal.SIGKILL)
        assert process.wait() == 0, (run.path / "train.out").read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    # nothing is trained twice, everything is graded, and every version verifies, read from S3
    steps = ledger.steps()
    used = [id for step in steps for id in step.trajectories]
    assert len(steps) == run.config.stages[-1].steps and used and len(used) == len(set(used))
    rows = trajectories.list(run=stage_key(run), limit=100_000)
    assert {row.state for row in rows} == {TrajectoryState.graded}
    assert trajectories.load(used[0]).segments and all(ok for _, ok, _ in weights.verify("rl"))
    # the run directory holds neither objects nor index; the other region has its own copy, made from S3
    assert not (run.path / "store").exists() and not (run.path / "mill.db").exists()
    assert WeightStore(Objects.open(run.store_path("away"))).head("rl") == len(steps)
    assert pid_of(run, "store") is None and not (run.logs / "store.log").exists()
    # commands find both, and no file of the run has the bucket's secret
    assert state_of(run).word == "finished" and "→" in state_of(run).result
    shown = CliRunner().invoke(app, ["weights", "show", str(run.path), f"rl@{len(steps)}"])
    assert shown.exit_code == 0 and f"rl@{len(steps)}" in shown.output, shown.output
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert files and not any(SECRET.encode() in path.read_bytes() for path in files)
