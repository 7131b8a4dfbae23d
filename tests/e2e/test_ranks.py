"""A trainer on two ranks in a whole run, started by `rollmill train` or by torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollmill.launch.rank_processes import rank_name
from rollmill.runs.run import RunDirectory
from rollmill.telemetry import read_events
from rollmill.weights.reading.weight_store import newest_line
from tests.e2e.small_run import BRIEF_EVALS, DEMO, ONE_REGION, SMALL, small_run
from tests.e2e.test_kill import digests, pid_of, start, stores, wait_for

pytestmark = pytest.mark.slow

STEPS = 4  # several are left when the rank is killed
ALONE = (*ONE_REGION, *BRIEF_EVALS)


def ranks_of(run: RunDirectory) -> dict[int, int]:
    """rank → process id, from /proc."""
    pids = {rank: pid_of(run, rank_name("trainer", rank)) for rank in range(2)}
    return {rank: pid for rank, pid in pids.items() if pid is not None}


@pytest.mark.timeout(900)
def test_a_run_on_two_ranks_survives_a_killed_rank(tmp_path: Path, midtrained: RunDirectory) -> None:
    training = ("stages.rl.training.ranks=2", "stages.rl.training.expert_parallel=2")
    dials = (f"stages.rl.steps={STEPS}", *training, 'device="cpu"')
    run = small_run(tmp_path, "ranks", *dials, *ALONE, base=midtrained)
    weights, ledger, _ = stores(run)
    process = start(run)
    try:
        wait_for(lambda: ledger.committed() >= 1, process, run)
        before, first = digests(weights, "rl"), ranks_of(run)
        assert first.keys() == {0, 1}
        time.sleep(0.3)
        os.kill(first[1], signal.SIGKILL)
        wait_for(lambda: not ranks_of(run).keys() ^ {0, 1} and not ranks_of(run).items() & first.items(), process, run)
        assert process.wait() == 0, (run.path / "train.out").read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    after = digests(weights, "rl")
    assert sorted(after) == list(range(STEPS + 1)) and before.items() <= after.items()
    assert ledger.committed() == STEPS and weights.lines() == ["midtrain", "rl"]
    trained = [id for step in ledger.steps() for id in step.trajectories]
    assert len(trained) == len(set(trained)), "no trajectory is trained twice"
    assert (run.path / "report.html").exists()
    events = list(read_events(run.events))
    assert [event["target"] for event in events if event["kind"] == "restart"] == ["trainer"]
    assert {event["step"] for event in events if event["kind"] == "step"} == set(range(1, STEPS + 1))
    assert (run.logs / "trainer-rank1.log").exists()


@pytest.mark.timeout(900)
def test_a_run_is_resumed_on_more_ranks(tmp_path: Path, midtrained: RunDirectory) -> None:
    """Everything dies on one rank, and goes on on two. Steps that run again may get other bits, and a new line then."""
    dials = (f"stages.rl.steps={STEPS}", 'device="cpu"')
    run = small_run(tmp_path, "more", *dials, *ALONE, base=midtrained)
    weights, ledger, _ = stores(run)
    process = start(run)
    try:
        wait_for(lambda: ledger.committed() >= 1, process, run)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    before, committed = digests(weights, "rl"), ledger.committed()
    resume = ("train", "--resume", str(run.path), "ranks=2", "expert_parallel=2")
    command = [sys.executable, "-c", "from rollmill.cli.main import main; main()", *resume]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert before.items() <= digests(weights, "rl").items() and STEPS == ledger.committed() >= committed
    trained = [id for step in ledger.steps() for id in step.trajectories]
    assert len(trained) == len(set(trained)), "no trajectory is trained twice"
    line = newest_line(weights, "rl")
    if line != "rl":
        first = weights.versions(line)[0]
        assert line == "rl.2" and first.parent is not None and first.parent.line == "rl"
        assert set(first.metadata["abandons"]) <= {f"rl@{number}" for number in digests(weights, "rl")}
    assert weights.versions(line)[-1].step == STEPS
    assert any("state-00001-of-00002" in key for key in weights.objects.list(f"checkpoints/{line}"))
    assert (run.logs / "trainer-rank1.log").exists() and (run.path / "report.html").exists()


@pytest.mark.timeout(900)
def test_ranks_that_torchrun_started(tmp_path: Path) -> None:
    """Each rank runs `rollmill train`: rank 0 drives the run, rank 1 only trains. Mid-training only. Then the run is
    given more steps."""
    ranks = ("stages.midtrain.training.ranks=2", "stages.rl.training.ranks=2")
    dials = ("stages.rl.steps=0", "stages.midtrain.steps=4", *ranks, 'device="cpu"')
    train_on_two_ranks(str(DEMO), "--root", str(tmp_path), "name=outside", *SMALL, *dials, *ALONE)
    run = RunDirectory.open(tmp_path / "outside")
    weights, _, _ = stores(run)
    assert sorted(digests(weights, "midtrain")) == [0, 1] and sorted(digests(weights, "rl")) == [0]
    assert (run.path / "report.html").exists()
    checkpoints = weights.objects.list("checkpoints/midtrain")
    assert any("state-00001-of-00002" in key for key in checkpoints)
    names = {event["process"] for event in read_events(run.events)}
    assert "trainer" in names and not any("rank" in name for name in names)

    before = digests(weights, "midtrain")
    run.rewrite(run.config.model_copy(update={"stages": run.config.stages[:1]}))  # the last stage gets the steps
    train_on_two_ranks("--resume", str(run.path), "steps=5")
    assert [manifest.step for manifest in weights.versions("midtrain")] == [0, 4, 5]
    assert before.items() <= digests(weights, "midtrain").items() and "midtrain.2" not in weights.lines()
    assert RunDirectory.open(run.path).config.stages[-1].steps == 5


def train_on_two_ranks(*arguments: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", "--standalone"]
    rollmill = [sys.executable, "-c", "from rollmill.cli.main import main; main()", "train", *arguments]
    done = subprocess.run([*torchrun, *rollmill], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
