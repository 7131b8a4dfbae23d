"""A run on three Ray nodes that share no directory: S3, PostgreSQL, Redis and every process are real, and nodes die."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.day_night import KIND
from rollmill.cli.main import app
from rollmill.demo import CONFIG as DEMO
from rollmill.launch.rank_processes import rank_name
from rollmill.runs.opening import describe_run, open_run
from rollmill.runs.run import RunDirectory
from rollmill.runs.shared.presence import Presence
from rollmill.runs.stages import newest_step
from rollmill.runs.status import state_of
from rollmill.storage.objects import Objects
from rollmill.telemetry import read_events
from tests.e2e.small_run import BRIEF_EVALS, small_run
from tests.e2e.test_kill import check_report, check_stores, digests, finished_ids, stores
from tests.launch.chance import TINY, train_first_stage
from tests.launch.ray_nodes import Nodes, ray_nodes
from tests.storage.serving import new_bucket, s3_environment, s3_server

pytestmark = pytest.mark.slow
AWAY_S = 120.0  # against hangs only
LOOK_S = 5.0
STEPS = 16  # fewer may be over before the last losses
SUPERVISOR = "ray::Supervisor"
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
    presence = Presence(Objects.open(run.home_store, patience=60.0))  # a node that starts needs both cores
    driven = looked = time.monotonic()
    while not condition():
        now = time.monotonic()
        if now > looked + LOOK_S:  # each look is several requests to S3
            looked = now
            driven = now if presence.where() is not None else driven
        assert now < driven + AWAY_S, failure(run)
        time.sleep(0.25)


def collected(run: RunDirectory) -> list[dict[str, Any]]:
    state_of(run)
    return read_events(run.events)


def failure(run: RunDirectory) -> str:
    state_of(run)
    return "\n".join(f"{path}\n{path.read_text()[-2000:]}" for path in sorted(run.logs.glob("*.log")))


def process(nodes: Nodes, title: str) -> tuple[int, str] | None:
    """The pid, and the address of the node, of a process whose title begins like this."""
    found = ((pid, address) for pid, address, name in processes(nodes) if name.startswith(title))
    return next(found, None)


def processes(nodes: Nodes) -> Iterator[tuple[int, str, str]]:
    """The pid, the address of the node and the title of each process on a node."""
    spaces = {os.readlink(f"/proc/{node.first}/ns/pid"): node.address for node in nodes.alive}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            address = spaces.get(os.readlink(entry / "ns" / "pid"))
            if address is not None:
                yield int(entry.name), address, (entry / "cmdline").read_bytes().decode(errors="replace").strip("\0")


def command(*words: str) -> str:
    """A command on a host that is no node: it reaches the run's store and nothing else."""
    done = CliRunner().invoke(app, [*words])
    assert done.exit_code == 0, done.output
    return done.output


class Watched:
    """A run that is watched: what it had published or finished at some moment must stay."""

    def __init__(self, run: RunDirectory, nodes: Nodes) -> None:
        self.run, self.nodes, self.began = run, nodes, time.monotonic()
        self.weights, self.ledger, self.trajectories = stores(run)
        self.draw = random.Random(os.urandom(8))
        self.digests: dict[int, str] = {}
        self.finished: set[str] = set()
        self.lost: set[str] = set()  # what was on the nodes that were lost

    def next_moment(self, title: str) -> tuple[int, str]:
        """Waits for one more step, then up to 2 s, and until a process with this title runs. Returns its pid, and the
        address of its node."""
        before = self.ledger.committed()
        wait_for(lambda: self.ledger.committed() > before, self.run)
        time.sleep(self.draw.uniform(0, 2))
        wait_for(lambda: process(self.nodes, title), self.run)
        self.digests.update(digests(self.weights, "rl"))
        self.finished.update(finished_ids(self.trajectories, self.run))
        found = process(self.nodes, title)
        assert found is not None, f"{title} has ended by itself"
        self.say(f"{title} is on {found[1]}")
        return found

    def lose_node_of(self, title: str) -> None:
        """At the next moment, with everything on it."""
        _, address = self.next_moment(title)
        titles = [name.split() for _, on, name in processes(self.nodes) if on == address and name[:9] == "rollmill "]
        there = {words[1] for words in titles if len(words) > 2}  # a role, and its directory
        self.lost |= {role.partition("-")[0] for role in there}
        self.say(f"{address} is lost with {', '.join(sorted(there))}")
        self.nodes.lose(address)

    def say(self, what: str) -> None:
        print(f"{time.monotonic() - self.began:5.0f} s, step {self.ledger.committed()}: {what}", flush=True)


by_itself = pytest.mark.skipif(
    os.environ.get("ROLLMILL_TEST_RAY") != "yes", reason="takes minutes: ROLLMILL_TEST_RAY=yes, as scripts/test --ray"
)


@by_itself
@pytest.mark.timeout(900)
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_run_survives_the_loss_of_every_node(tmp_path: Path, database_url: str, nodes: Nodes) -> None:
    run = described_run(tmp_path, database_url, nodes)
    url, watched = str(run.home_store), Watched(run, nodes)

    # the driver may leave at any moment: here it is killed
    driver = nodes.head.run(*ROLLMILL, "train", "--resume", url, stdout=(tmp_path / "driver").open("w"))
    while Presence(Objects.open(url)).where() is None:
        assert driver.poll() is None, (tmp_path / "driver").read_text()
        time.sleep(0.2)
    time.sleep(watched.draw.uniform(0, 2))
    os.killpg(driver.pid, signal.SIGKILL)
    command("scale", url, "engines=2")

    # the node of the trainer is lost, with whatever else is there
    watched.lose_node_of("rollmill trainer ")
    another = nodes.start_worker()
    # the head is lost, and comes back with what it had written to Redis
    watched.next_moment(SUPERVISOR)
    if nodes.redis:
        nodes.lose(nodes.head.address)
        nodes.wait([nodes.start_head(), another])
    # the run is stopped, and resumed with more steps by a command that ends at once
    watched.next_moment(SUPERVISOR)
    wait_for(lambda: Presence(Objects.open(url)).where(), run)
    assert "training" in command("status", url) and "stopped" in command("stop", url)
    assert "stopped" in command("status", url) and process(nodes, SUPERVISOR) is None
    steps = max(STEPS, watched.ledger.committed() + 5)  # enough for what happens to it from here on
    assert nodes.head.run(*ROLLMILL, "train", "--resume", url, f"steps={steps}", "--detach").wait() == 0
    run = watched.run = open_run(Path(url))
    # the supervisor is killed: Ray brings it back, and it takes over the processes that run
    os.kill(watched.next_moment(SUPERVISOR)[0], signal.SIGKILL)
    # the node of a gateway is lost: with it its open sessions
    watched.lose_node_of("rollmill gateway ")
    if "engine" not in watched.lost:
        nodes.start_worker()
        watched.lose_node_of("rollmill engine-")
    assert {"trainer", "gateway", "engine"} <= watched.lost
    wait_for(lambda: state_of(run).word == "finished", run)
    watched.say("finished")

    check_stores(run, watched.digests, watched.finished)
    events = collected(run)
    check_report(run)
    assert "engine-home-2" in {event["process"] for event in events}
    assert {"trainer", "gateway"} <= {event["target"] for event in events if event["kind"] == "restart"}
    players = {event["process"] for event in events if event["kind"] == "rollout" and event["split"] == "train"}
    assert players == {"dispatcher", "dispatcher-2"}, "both have played"
    objects = Objects.open(url)
    assert {f"cluster/{role}.json" for role in run.config.gateways} <= set(objects.list("cluster"))
    assert "finished" in command("status", url) and "supervisor" in command("logs", url)
    written = b"".join(objects.get(key) for key in objects.list("cluster"))
    assert written and not any(secret.encode() in written for secret in run.secrets.values())


@by_itself
@pytest.mark.timeout(900)
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_two_ranks_go_on_when_the_node_of_either_dies(tmp_path: Path, database_url: str, nodes: Nodes) -> None:
    # nodes have 8 CPUs, and all other roles together ask for 3: there is one rank per node
    roles = ("engine.threads=1", "gateway.replicas=1", "dispatcher.replicas=1")
    ranks = ("stages.rl.training.ranks=2", "stages.rl.training.threads=5", "stages.rl.steps=10")
    run = described_run(tmp_path, database_url, nodes, *roles, *ranks)
    url, watched = str(run.home_store), Watched(run, nodes)
    assert nodes.head.run(*ROLLMILL, "train", "--resume", url, "--detach").wait() == 0
    wait_for(lambda: watched.ledger.committed() > 0, run)
    assert len({address for _, address, name in processes(nodes) if name.startswith("rollmill trainer")}) == 2
    for rank in (1, 0):
        watched.lose_node_of(f"rollmill {rank_name('trainer', rank)} ")
        nodes.start_worker()
    wait_for(lambda: state_of(run).word == "finished", run)
    watched.say("finished")

    check_stores(run, watched.digests, watched.finished)
    events = collected(run)
    check_report(run)
    assert "trainer" in {event["target"] for event in events if event["kind"] == "restart"}
    assert watched.weights.lines() == ["midtrain", "rl"], "no step that ran again has other bits"


def described_run(tmp_path: Path, database_url: str, nodes: Nodes, *settings: str) -> RunDirectory:
    """A run of the demo with a tiny model that has learnt nothing, and a reward for it. Its first stage is over. It is
    its store: no host has its directory. Decode time is simulated: so a step takes seconds, and little of the cores."""
    made = small_run(
        tmp_path / "made",
        "fleet",
        f"store={new_bucket()!r}",
        f"database={database_url!r}",
        f"cluster={{kind='ray',address='{nodes.address}'}}",
        f"engines=[{{region='home',kind='{KIND}',token_s=0.15}}]",
        "gateway.replicas=2",
        "dispatcher.replicas=2",
        *TINY,
        f"stages.rl.steps={STEPS}",
        "stages.rl.groups_per_step=2",
        "stages.rl.training.checkpoint_every=3",
        *BRIEF_EVALS,
        *settings,
    )
    train_first_stage(made)
    describe_run(made)
    (made.path / "run.json").unlink()
    return open_run(Path(str(made.home_store)))


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
    run = open_run(Path(f"{bucket}/{id}"))
    wait_for(lambda: state_of(run).word == "finished", run)
    events = collected(run)
    assert {event["phase"] for event in events if event["kind"] == "phase"} >= {"midtrain", "evaluate before"}
    assert newest_step(run, run.config.stage("midtrain")) == 2
