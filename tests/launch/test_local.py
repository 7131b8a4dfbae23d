"""Role processes on this machine. The tests use the store role: it is real and starts fast."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollmill.chat.tokenizer import Tokenizer
from rollmill.errors import RollmillError
from rollmill.launch import launcher
from rollmill.launch.fork_server import ForkServer
from rollmill.launch.launcher import TERMINATED
from rollmill.launch.launchers.local import LocalLauncher
from rollmill.launch.role_inputs import hand_to
from rollmill.launch.services import while_watching
from rollmill.runs.exits import last_words
from rollmill.runs.run import SECRETS, RunDirectory
from rollmill.telemetry import read_events
from tests.chat.conftest import tokenizer  # noqa: F401


@pytest.fixture
def cluster(run: RunDirectory) -> Iterator[LocalLauncher]:
    cluster = LocalLauncher(run)
    yield cluster
    cluster.stop()


def pid_of(run: RunDirectory, role: str) -> int | None:
    """From /proc: the test asks the system, not the supervisor."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                title = (entry / "cmdline").read_bytes().decode().rstrip("\0")
            except (OSError, UnicodeDecodeError):
                continue
            if title == f"rollmill {role} {run.path}":
                return int(entry.name)
    return None


def kill(run: RunDirectory, role: str, deadly: signal.Signals = signal.SIGKILL) -> int:
    while (pid := pid_of(run, role)) is None:  # just started: /proc does not know its arguments yet
        time.sleep(0.01)
    os.kill(pid, deadly)
    return pid


def until(condition: Callable[[], bool], cluster: LocalLauncher | None = None) -> None:
    while not condition():
        if cluster is not None:
            cluster.watch()
        time.sleep(0.01)


def answers(run: RunDirectory) -> bool:
    request = urllib.request.Request(
        f"{run.url('store')}/list?prefix=", headers={"Authorization": f"Bearer {run.secrets['store_token']}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=1) as response:
            return response.status == 200
    except OSError:
        return False


@pytest.mark.parametrize("deadly", [signal.SIGKILL, signal.SIGTERM])
def test_a_service_that_dies_is_restarted_at_the_same_address(
    run: RunDirectory, cluster: LocalLauncher, deadly: signal.Signals
) -> None:
    """Also one that exits with 0 after SIGTERM: the run needs it."""
    cluster.start("store", service=True)
    until(lambda: answers(run), cluster)
    first = kill(run, "store", deadly)
    until(lambda: pid_of(run, "store") not in (None, first) and answers(run), cluster)
    assert not cluster.ended("store")
    cluster.stop()
    assert pid_of(run, "store") is None and not answers(run)


def test_when_the_fork_server_dies_its_roles_are_restarted(run: RunDirectory, cluster: LocalLauncher) -> None:
    cluster.start("store", service=True)
    until(lambda: answers(run), cluster)
    store = pid_of(run, "store")
    os.kill(int(Path(f"/proc/{store}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    until(lambda: pid_of(run, "store") not in (None, store) and answers(run), cluster)


def test_modules_in_the_current_directory_are_not_imported(
    run: RunDirectory, cluster: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is often started in a directory full of somebody's files."""
    for name in ("json", "random", "rollmill"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current directory')\n")
    monkeypatch.chdir(tmp_path)
    cluster.start("store", service=True)
    until(lambda: answers(run), cluster)


def test_a_role_that_exits_with_0_is_not_restarted(run: RunDirectory, cluster: LocalLauncher) -> None:
    cluster.start("store")
    until(lambda: answers(run))
    kill(run, "store", signal.SIGTERM)  # it exits with 0
    until(lambda: cluster.ended("store"), cluster)
    assert pid_of(run, "store") is None


def test_too_many_restarts_end_the_run_with_the_end_of_the_log(
    run: RunDirectory, cluster: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "MAX_RESTARTS", 1)
    with socket.socket() as other:
        other.bind(("127.0.0.1", run.ports["store"]))
        other.listen()
        cluster.start("store", service=True)
        with pytest.raises(RollmillError) as raised:
            until(lambda: False, cluster)
    assert "'store' stopped with exit code 1" in raised.value.message
    assert "address already in use" in raised.value.message
    assert "store.log" in str(raised.value.hint) and f"--resume {run.path}" in str(raised.value.hint)
    assert (run.logs / "store.log").read_text().count("Traceback") >= 2  # it was restarted


def test_the_cause_is_told_also_if_other_lines_follow_it(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    begin, cause = "trainer begins, process 7\n", "error: judge: the variable JUDGE_KEY is not set"
    log.write_text(f"{begin}{cause} {'x' * 700}\nhint: set it\nUnclosed client session\nclient_session: <…>\n")
    told = last_words(tmp_path, "trainer")
    assert told.startswith("judge: the variable JUDGE_KEY is not set xxx") and told.endswith(" hint: set it")
    log.write_text(f"{begin}{cause}\n{begin}half of it\nthe end\n")  # the next process was killed
    assert last_words(tmp_path, "trainer") == "half of it the end"


def test_a_role_that_ran_long_starts_with_a_fresh_count_of_restarts(
    run: RunDirectory, cluster: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "MAX_RESTARTS", 1)
    monkeypatch.setattr(launcher, "STEADY_S", 0.0)
    cluster.start("store", service=True)
    for _ in range(2):  # one more than it may be restarted
        killed = kill(run, "store")
        until(lambda: pid_of(run, "store") not in (None, killed), cluster)  # noqa: B023


def test_exit_code_3_is_final(run: RunDirectory, cluster: LocalLauncher) -> None:
    cluster.start("gateway", service=True)
    with pytest.raises(RollmillError, match=r"exit code 3: config: .*tokenizer\.json") as raised:
        until(lambda: False, cluster)
    assert "hint: " in raised.value.message
    assert (run.logs / "gateway.log").read_text().count("config: ") == 1  # it was not restarted


@pytest.mark.parametrize("in_the_way", ["logs", "logs/store.log/directory"])
def test_a_log_that_cannot_be_opened(run: RunDirectory, cluster: LocalLauncher, in_the_way: str) -> None:
    (run.path / in_the_way).parent.mkdir(parents=True, exist_ok=True)
    (run.path / in_the_way).touch()
    with pytest.raises(
        RollmillError, match=r"'store' cannot be started: its log .*store\.log cannot be opened"
    ) as told:
        cluster.start("store", service=True)
    assert "is the disk full" in str(told.value.hint)


def test_a_log_that_is_removed_while_its_process_dies(run: RunDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    """The server is told to open a log in a directory that is gone by then."""
    server = ForkServer()
    log = run.path / "gone" / "store.log"
    child = server.start("store", hand_to(run, "store"), (), name="rollmill store", environment={}, log=log)
    assert child.wait(60.0) == 1
    server.close()
    [line] = capfd.readouterr().err.splitlines()
    assert line == f"rollmill: {log} cannot be opened: No such file or directory"


def test_work_ends_when_a_process_it_needs_cannot_be_kept_alive(run: RunDirectory, cluster: LocalLauncher) -> None:
    cluster.start("gateway", service=True)  # it has no tokenizer
    with pytest.raises(RollmillError, match="exit code 3"):
        asyncio.run(while_watching(cluster, asyncio.sleep(3600), lambda: None))


async def test_the_result_of_watched_work(cluster: LocalLauncher) -> None:
    assert await while_watching(cluster, asyncio.sleep(0, "result"), lambda: None) == "result"


SUPERVISOR = """
import os, signal, sys, time
from pathlib import Path
from rollmill.launch.launchers.local import LocalLauncher
from rollmill.runs.run import RunDirectory
cluster = LocalLauncher(RunDirectory.open(Path(sys.argv[1])))
cluster.start("store", service=True)
if sys.argv[2] == "at once":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


def test_processes_end_when_their_supervisor_is_killed(run: RunDirectory) -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(run.path), "later"])
    until(lambda: answers(run))
    supervisor.kill()
    supervisor.wait()
    until(lambda: pid_of(run, "store") is None)


def test_a_supervisor_killed_at_once_leaves_no_process_behind(run: RunDirectory) -> None:
    subprocess.run([sys.executable, "-c", SUPERVISOR, str(run.path), "at once"], check=False)
    time.sleep(0.1)  # until /proc knows its arguments
    until(lambda: pid_of(run, "store") is None)


@pytest.mark.slow
def test_mid_training_that_is_stopped_early_does_not_exit_with_0(make_run: Callable[..., RunDirectory]) -> None:
    """Otherwise RL would start from half-trained weights."""
    small = ("layers=1", "width=16", "heads=2", "kv_heads=1", "head_dim=8", "mlp_width=16", "expert_width=8")
    endless = ("stages.midtrain.steps=100000", "stages.midtrain.training.threads=1")
    run = make_run(*endless, *(f"model.{setting}" for setting in small))
    command = [sys.executable, "-m", "rollmill.launch.role", "trainer", str(run.path), "midtrain"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)
    until(lambda: process.poll() is not None or any(e["kind"] == "document_step" for e in read_events(run.events)))
    process.terminate()
    _, errors = process.communicate()
    assert process.returncode == TERMINATED, errors.decode()


DOORS = [  # a role, a request that asks for a token, and the secrets that open it
    ("store", "GET", "/list?prefix=", {"store_token"}),
    ("gateway", "POST", "/forget", {"admin_token"}),
    ("gateway", "DELETE", "/sessions/none", {"admin_token", "rollout_key"}),
    ("gateway", "DELETE", "/engines/none", {"admin_token", "engine_token"}),
    ("engine-home", "POST", "/hint", {"engine_token"}),
]


@pytest.mark.slow
def test_each_token_opens_one_door(run: RunDirectory, cluster: LocalLauncher, tokenizer: Tokenizer) -> None:  # noqa: F811
    tokenizer.save(run.tokenizer)
    (run.path / "run.json").unlink()  # it has all secrets: no role opens it
    for role in {role for role, *_ in DOORS}:
        cluster.start(role, *(("line", "rl", "bf16") if role.startswith("engine") else ()), service=True)
    for role, method, path, opening in DOORS:
        until(lambda role=role: status(run.url(role), "GET", "/health") is not None, cluster)
        for secret in SECRETS:
            headers = {"Authorization": f"Bearer {run.secrets[secret]}"}
            refused = status(run.url(role), method, path, headers) in (401, 403)
            assert refused == (secret not in opening), (role, path, secret)
        assert status(run.url(role), method, path) == 401


def status(url: str, method: str, path: str, headers: dict[str, str] | None = None) -> int | None:
    """None if nobody listens."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url + path, headers=headers or {}, method=method), timeout=5
        ) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None
