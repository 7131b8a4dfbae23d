"""A run on three Ray nodes that share no directory: S3, PostgreSQL, Redis and every process are real, and nodes die."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollmill.cli.main import app
from rollmill.cluster.naming import describe_run
from rollmill.cluster.presence import Presence
from rollmill.cluster.run import RunDirectory
from rollmill.cluster.stages import newest_step
from rollmill.cluster.state import state_of
from rollmill.demo import CONFIG as DEMO
from rollmill.storage.objects import Objects
from rollmill.telemetry import read_events
from tests.cluster.ray_nodes import Nodes, ray_nodes
from tests.e2e.conftest import midtrained  # noqa: F401
from tests.e2e.small_run import BRIEF_EVALS, small_run
from tests.e2e.test_kill import check_stores, digests, finished_ids, stores
from tests.e2e.test_remote_stores import copy_objects
from tests.storage.serving import new_bucket, s3_environment, s3_server

pytestmark = pytest.mark.slow
AWAY_S = 120.0  # against hangs only
ROLLMILL = (sys.executable, "-P", "-c", "from rollmill.cli.main import main; main()")


@pytest.fixture
def nodes(tmp_path: Path, postgresql_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    environment = s3_environment(s3_server())
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with ray_nodes(tmp_path, postgresql_directory, {**environment, "PYTHONPATH": os.getcwd()}) as nodes:
        yield nodes


def wait_for(condition: Callable[[], object], run: RunDirectory) -> None:
    """Fails if nobody drives the run for long: Ray takes a while to bring a supervisor back."""
    driven = time.monotonic()
    while not condition():
        if Presence(Objects.open(run.home_store)).where() is not None:
            driven = time.monotonic()
        assert time.monotonic() < driven + AWAY_S, failure(run)
        time.sleep(0.2)


def collected(run: RunDirectory) -> list[dict[str, Any]]:
    state_of(run)
    return read_events(run.events)


def failure(run: RunDirectory) -> str:
    state_of(run)
    return "\n".join(f"{path}\n{path.read_text()[-2000:]}" for path in sorted(run.logs.glob("*.log")))


def gateway_node(run: RunDirectory) -> str:
    found = re.search(rb"//([0-9.]+):", Objects.open(run.home_store).get("cluster/gateway.json"))
    assert found is not None
    return found[1].decode()


def supervisor_pid(nodes: Nodes) -> int | None:
    """The process of the supervisor's actor, on whatever node it is."""
    spaces = {os.readlink(f"/proc/{node.first}/ns/pid") for node in nodes.alive}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            title = (entry / "cmdline").read_bytes()
            if title.startswith(b"ray::Supervisor") and os.readlink(entry / "ns" / "pid") in spaces:
                return int(entry.name)
    return None


def command(*words: str) -> str:
    """A command on a host that is no node: it reaches the run's store and nothing else."""
    done = CliRunner().invoke(app, [*words])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.skipif(
    os.environ.get("ROLLMILL_TEST_RAY") != "yes", reason="takes minutes: scripts/test --ray runs it, by itself"
)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_run_survives_the_loss_of_every_node(
    tmp_path: Path,
    midtrained: RunDirectory,  # noqa: F811
    database_url: str,
    nodes: Nodes,
) -> None:
    run = described_run(tmp_path, midtrained, database_url, nodes)
    url = str(run.home_store)
    weights, ledger, trajectories = stores(run)
    draw = random.Random(os.urandom(8))
    seen_digests: dict[int, str] = {}
    seen_finished: set[str] = set()

    def moment_after(step: int, *, driven: bool = False) -> None:
        """A random moment after a step is committed; with `driven` there is a supervisor. What is published or
        finished by then must stay."""
        wait_for(lambda: ledger.committed() >= step, run)
        time.sleep(draw.uniform(0, 2))
        if driven:
            wait_for(lambda: supervisor_pid(nodes) and Presence(Objects.open(url)).where(), run)
        seen_digests.update(digests(weights, "rl"))
        seen_finished.update(finished_ids(trajectories, run))

    # the driver may leave at any moment: here it is killed
    driver = nodes.head.run(*ROLLMILL, "train", "--resume", url, stdout=(tmp_path / "driver").open("w"))
    while Presence(Objects.open(url)).where() is None:
        assert driver.poll() is None, (tmp_path / "driver").read_text()
        time.sleep(0.2)
    time.sleep(draw.uniform(0, 2))
    os.killpg(driver.pid, signal.SIGKILL)
    command("scale", url, "engines=2")

    # the node of the gateway is lost: with it its open sessions, and whatever else is there
    moment_after(1)
    nodes.lose(gateway_node(run))
    another = nodes.start_worker()
    # the head is lost, and comes back with what it had written to Redis
    moment_after(2)
    if nodes.redis:
        nodes.lose(nodes.head.address)
        nodes.wait([nodes.start_head(), another])
    # the run is stopped, and resumed by a command that ends at once
    moment_after(3, driven=True)
    assert "training" in command("status", url) and "stopped" in command("stop", url)
    assert "stopped" in command("status", url) and supervisor_pid(nodes) is None
    assert nodes.head.run(*ROLLMILL, "train", "--resume", url, "--detach").wait() == 0
    # the supervisor is killed: Ray brings it back, and it takes over the processes that run
    moment_after(4, driven=True)
    pid = supervisor_pid(nodes)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    moment_after(5)
    nodes.lose(gateway_node(run))
    wait_for(lambda: state_of(run).word == "finished", run)

    check_stores(run, seen_digests, seen_finished)
    events = collected(run)
    assert "engine-home-2" in {event["process"] for event in events}
    assert "gateway" in {event["target"] for event in events if event["kind"] == "restart"}
    assert "finished" in command("status", url) and "supervisor" in command("logs", url)
    objects = Objects.open(url)
    written = b"".join(objects.get(key) for key in objects.list("cluster"))
    assert written and not any(secret.encode() in written for secret in run.secrets.values())


def described_run(tmp_path: Path, base: RunDirectory, database_url: str, nodes: Nodes) -> RunDirectory:
    """A run that is not started yet, mid-trained already. It is its store: no host has its directory."""
    made = small_run(
        tmp_path / "made",
        "fleet",
        f"store={new_bucket()!r}",
        f"database={database_url!r}",
        f"cluster={{kind='ray',address='{nodes.address}'}}",
        "engines=[{region='home'}]",
        "stages.rl.steps=6",
        "stages.rl.groups_per_step=2",
        *BRIEF_EVALS,
    )
    copy_objects(Objects.open(base.home_store), Objects.open(made.home_store))
    describe_run(made)
    (made.path / "run.json").unlink()
    return RunDirectory.open(Path(str(made.home_store)))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_run_begins_on_a_node_with_ranks_that_meet(tmp_path: Path, database_url: str, nodes: Nodes) -> None:
    bucket = new_bucket()
    begun = nodes.head.run(
        *(*ROLLMILL, "train", str(DEMO), "--detach", "--root", "/tmp/home/runs"),
        *(f"store={bucket!r}", f"database={database_url!r}", "name=ranks", "cluster={kind='ray'}"),
        *("stages.midtrain.steps=2", "stages.midtrain.training.ranks=2", "stages.midtrain.training.threads=1"),
        *("stages.rl.steps=0", "engines=[{region='home'}]", *BRIEF_EVALS),
        stdout=(tmp_path / "driver").open("w"),
    )
    assert begun.wait() == 0, (tmp_path / "driver").read_text()
    [id] = Objects.open(bucket).folders()
    run = RunDirectory.open(Path(f"{bucket}/{id}"))
    wait_for(lambda: state_of(run).word == "finished", run)
    events = collected(run)
    assert {event["phase"] for event in events if event["kind"] == "phase"} >= {"midtrain", "evaluate before"}
    assert newest_step(run, run.config.stage("midtrain")) == 2
