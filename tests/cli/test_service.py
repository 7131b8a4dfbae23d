"""`rollmill serve` and `rollmill eval` as processes, beside a process that holds the run as a training does."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollmill.gateway.routing.fleet import Fleet
from rollmill.launch.launchers.local import LocalLauncher
from rollmill.runs.lock import exclusive
from rollmill.runs.run import RunDirectory
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import TrajectoryState, Version
from rollmill.weights.reading.channels import Channels
from rollmill.weights.reading.leases import Leases
from tests.launch.served import published_run
from tests.runs.checkpoints import make_chat_checkpoint
from tests.test_repo import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROLLMILL = [sys.executable, "-c", "from rollmill.cli.main import main; main()"]


class Serving:
    """`rollmill serve …` in a process group of its own; `told` is what it has printed."""

    def __init__(self, output: Path, *arguments: object) -> None:
        self._output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [*ROLLMILL, "serve", *map(str, arguments)], stdout=file, stderr=file, start_new_session=True
            )

    @property
    def told(self) -> str:
        return self._output.read_text()

    def wait_for(self, words: str) -> None:
        while words not in self.told:
            assert self.process.poll() is None, self.told
            time.sleep(0.05)

    def ask(self, wrong_key: str | None = None) -> dict[str, str]:
        """Run the printed curl line. Its parts are taken from the output: not every machine has curl."""
        [line] = re.findall(r"curl .*", self.told)
        parts = re.fullmatch(r"curl (\S+) -H \"Authorization: Bearer \$\(cat (\S+)\)\" -d '(.*)'", line)
        assert parts is not None, line
        url, file, body = parts.groups()
        key = wrong_key or Path(file).read_text().strip()
        request = urllib.request.Request(url, body.encode(), {"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=60) as response:
            message: dict[str, str] = json.load(response)["choices"][0]["message"]
            return message


@contextmanager
def served(output: Path, *arguments: object) -> Iterator[Serving]:
    serving = Serving(output, *arguments)
    try:
        serving.wait_for("Ctrl-C stops it.")
        yield serving
        os.killpg(serving.process.pid, signal.SIGINT)  # as Ctrl-C does: the whole group of the terminal
        assert serving.process.wait() == 0, serving.told
        assert serving.told.endswith("stopped\n") and "Traceback" not in serving.told
    finally:
        if serving.process.poll() is None:
            serving.process.kill()
            serving.process.wait()


def no_tracebacks(run: RunDirectory) -> bool:
    logs = list(run.path.rglob("logs/*.log"))
    assert logs
    return not any("Traceback" in log.read_text() for log in logs)


def test_serving_follows_a_channel_beside_a_training_run(tmp_path: Path) -> None:
    run = published_run(tmp_path, 3)
    channels = Channels(Objects.open(run.home_store))
    channels.move("live", Version("rl", 1))
    channels.move("live", Version("rl", 2))
    with exclusive(run.path, "supervisor"), served(tmp_path / "out", run.path, "--version", "live") as serving:
        assert f"serving rl@2, following channel live of {run.path}\n" in serving.told
        assert "model    rollmill" in serving.told and f"API key  in {run.path / 'api-key'}" in serving.told
        assert run.secrets["production_key"] not in serving.told
        assert serving.ask()["role"] == "assistant"
        with pytest.raises(urllib.error.HTTPError) as refused:  # a wrong key is told how to get a right one
            serving.ask(wrong_key="wrong")
        assert refused.value.code == 401 and b"`rollmill keys create RUN`" in refused.value.read()
        # a rollback reaches users, and the user of the terminal sees it
        subprocess.run([*ROLLMILL, "weights", "rollback", str(run.path), "live"], check=True, stdout=subprocess.DEVNULL)
        serving.wait_for("now serving rl@1")
        assert serving.ask()["role"] == "assistant"
        # a second one has ports and a session log of its own
        with served(tmp_path / "second", run.path, "--version", "rl@0", "--host", "0.0.0.0") as second:
            assert f"serving rl@0 of {run.path}\n" in second.told
            assert second.ask()["role"] == "assistant"
            held = {lease.holder: lease.number for lease in Leases(Objects.open(run.home_store), "rl").held()}
            assert held == {"serve-1-engine-home": 1, "serve-2-engine-home": 0}
    assert no_tracebacks(run)
    # the conversations are in the run's own log, for the next `serve` to seal
    assert (run.path / "services" / "serve-1" / "gateway" / "sessions.log").stat().st_size > 0


def test_evaluating_beside_a_training_run(tmp_path: Path) -> None:
    settings = ("evals.attempts=2", "evals.family_tasks=0", "evals.fresh_tasks=9", "evals.greedy=false")
    run = published_run(tmp_path, 2, *settings)
    with exclusive(run.path, "supervisor"):
        command = [*ROLLMILL, "eval", str(run.path), "--version", "rl@1", "--tasks", "3"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "evaluate rl@1: " in done.stdout and "heldout" in done.stdout and "/6" in done.stdout
    rows = TrajectoryStore(open_database(run.database_url), Objects.open(run.home_store)).list()
    assert len(rows) == 12 and {row.state for row in rows} == {TrajectoryState.graded}
    assert no_tracebacks(run)


def test_evaluating_on_the_tasks_of_another_file(tmp_path: Path) -> None:
    """With its own harness, limits and suite; the run itself, and what it is evaluated on, stay as they are."""
    run = published_run(tmp_path, 2)
    before = (run.path / "run.json").read_text()
    tasks = [{"id": f"t{number}", "instruction": "hello", "grading": {"code": ""}} for number in range(4)]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (tmp_path / "mine.py").write_text(REWARD)
    (tmp_path / "other.toml").write_text(SUITE)
    command = [*ROLLMILL, "eval", str(run.path), "--version", "rl@1", "--suite", str(tmp_path / "other.toml"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads(done.stdout.splitlines()[-1])["results"]
    assert (result["label"], result["version"], result["attempts"]) == ("other-version-1", 1, 8)
    assert set(result["by_task"]) == {"t0", "t1", "t2", "t3"} and result["reward"] == 0.5
    assert (result["oldest"], result["newest"]) == (1, 1)
    rows = TrajectoryStore(open_database(run.database_url), Objects.open(run.home_store)).list()
    assert {row.run for row in rows} == {f"{run.id}/eval-other-version-1"} and len(rows) == 8
    assert (run.path / "run.json").read_text() == before and no_tracebacks(run)


REWARD = """
from rollmill import Grade, Reward


class Half(Reward):
    name = "half"

    async def grade(self, episode):
        return Grade(0.5)
"""
SUITE = """
name = "other"
rewards = [{kind = "mine:Half"}]
[tasks]
kind = "jsonl"
path = "other.jsonl"
heldout_share = 1.0
[harness]
kind = "chat"
[rollouts]
max_answer_tokens = 8
[evals]
attempts = 2
greedy = false
"""


def test_serving_a_checkpoint_directory(tmp_path: Path) -> None:
    make_chat_checkpoint(tmp_path / "My Model")
    with served(tmp_path / "out", tmp_path / "My Model", "--root", tmp_path / "runs") as serving:
        assert f"serving main-checkpoint@0 of {tmp_path / 'My Model'}\n" in serving.told
        assert serving.ask()["role"] == "assistant"
    [path] = (tmp_path / "runs").iterdir()
    assert path.name.startswith("served-my-model-") and no_tracebacks(RunDirectory.open(path))


GUIDE = (ROOT / "docs" / "guides" / "lending-engines.md").read_text()


def test_engines_are_lent_to_training_as_the_guide_says(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", GUIDE, re.S)
    lending = {**tomllib.loads(block)["lending"], "quiet_s": 0.5}
    settings = [f"lending.{name}={value}" for name, value in lending.items()]
    run = published_run(tmp_path, 2, 'engines=[{region="home",count=2}]', *settings)
    Channels(Objects.open(run.home_store)).move("live", Version("rl", 0))
    fleet = Fleet(open_database(run.database_url), run.id, run.secrets["engine_token"])
    serve = shlex.split(re.findall(r"\$ rollmill serve (.*)", GUIDE)[0].replace("runs/demo", str(run.path)))
    launcher = LocalLauncher(run)  # training, as far as lending sees it
    try:
        launcher.start("gateway", service=True)
        with served(tmp_path / "out", *serve) as serving:
            while not (lent := [each.name for each in fleet.registered()]):
                time.sleep(0.1)
            assert lent in (["lent-serve-1-engine-home"], ["lent-serve-1-engine-home-2"])
            assert serving.ask()["role"] == "assistant"
            url = RunDirectory.open(run.path / "services" / "serve-1").url("gateway")
            with urllib.request.urlopen(f"{url}/health", timeout=60) as response:
                engines = json.load(response)["engines"]
            served_now = {each["lent"]: each["policy"]["number"] for each in engines}
            assert served_now == {None: 0, "rl": 1}, "users get the live version, training its newest"
            assert "now serving" not in serving.told
        assert fleet.registered() == []
    finally:
        launcher.stop()
    assert no_tracebacks(run)
