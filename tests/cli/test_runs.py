"""`rollmill runs`, `status`, `logs`, `stop`, `rm`: on directories, and on a training that really runs."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmill.runs.lock import holder
from rollmill.runs.opening import describe_run
from rollmill.runs.run import RunDirectory
from rollmill.runs.status import is_finished, state_of
from rollmill.telemetry import append_events
from tests.cli.conftest import Told
from tests.cli.test_train import refused
from tests.launch.served import TINY, published_run
from tests.runs.conftest import make_config
from tests.storage.serving import new_bucket, s3_environment, s3_server

ROLLMILL = [sys.executable, "-c", "from rollmill.cli.main import main; main()"]


def finished_run(root: Path) -> RunDirectory:
    """What a run of two steps leaves behind."""
    run = published_run(root, 3, "stages.rl.steps=2")
    folder = run.home_store / "evals" / run.id
    folder.mkdir(parents=True)
    (folder / "before.json").write_text(json.dumps([{"rate": 0.25, "version": 0}]))
    (folder / "after.json").write_text(json.dumps([{"rate": 0.875, "version": 2}]))
    figures = {"solve_rate_before": 0.25, "solve_rate_after": 0.875, "gain_interval": [0.5, 0.75], "seconds": 9.0}
    (run.path / "report.json").write_text(json.dumps(figures))
    (run.path / "report.html").write_text("<html>")
    return run


def endless_run(root: Path) -> RunDirectory:
    """Mid-training that takes for ever."""
    settings = ("stages.midtrain.steps=100000", "stages.midtrain.training.threads=1", "device=cpu")
    return RunDirectory.create(root, make_config(*settings, *(f"model.{setting}" for setting in TINY)))


def tree(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def wait_until(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    while not condition():
        assert process.poll() is None
        time.sleep(0.05)


def test_runs_lists_state_steps_result_age_and_size(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    finished_run(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    told = rollmill("runs", "--root", tmp_path)
    assert told.code == 0
    head, broken, small = told.out.splitlines()
    assert head.split()[:3] == ["run", "state", "stage"] and broken.split()[:2] == ["broken", "unreadable"]
    assert small.split()[:6] == ["small", "finished", "rl", "2/2", "25", "%"] and "88 %" in small and "KiB" in small
    rows = [json.loads(line) for line in rollmill("runs", "--root", tmp_path, "--json").out.splitlines()]
    assert [row["run"] for row in rows] == ["broken", "small"] and rows[1]["bytes"] > 0


def test_a_stage_on_documents_shows_the_step_it_is_at(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    run = endless_run(tmp_path)
    events = ({"at": 1.0 * step, "kind": "document_step", "stage": "midtrain", "step": step} for step in (11, 12))
    append_events(run.events, "trainer", [*events, {"at": 13.0, "kind": "busy"}])
    assert state_of(run).step == 12 and "midtrain 12/100000" in rollmill("runs", "--root", tmp_path).out


def test_a_narrow_screen_cuts_nothing_of_a_run(
    rollmill: Callable[..., Told], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished_run(tmp_path)
    run.path.rename(tmp_path / "a-run-with-a-name-that-is-longer-than-most-and-still-not-cut-anywhere")
    told = rollmill("runs", "--root", tmp_path)
    assert "not-cut-anywhere" in told.out and "25 % → 88 %" in told.out
    monkeypatch.setenv("COLUMNS", "80")
    told = rollmill("runs", "--root", tmp_path)
    assert "…" not in told.out and "age" in told.out and "size" in told.out


def test_no_runs_at_all(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    assert refused(rollmill("runs", "--root", tmp_path), "there is no run", "rollmill demo")
    for command in ("status", "stop", "rm", "logs"):
        assert refused(rollmill(command, tmp_path), "holds no run", "`rollmill runs`")


def test_scaling_a_run_that_does_not_train_says_that_nothing_runs(
    rollmill: Callable[..., Told], tmp_path: Path
) -> None:
    run = finished_run(tmp_path)
    told = rollmill("scale", run.path, "engines=2")
    assert told.code == 0 and "home: 2 engines" in told.out and "the run is finished: nothing trains now" in told.out
    assert f"`rollmill train --resume {run.path} steps=N`" in told.out
    (run.path / "report.json").unlink()
    told = rollmill("scale", run.path, "engines=1")
    assert "home: 1 engine\n" in told.out and "the run is stopped" in told.out and "steps=N" not in told.out


def test_a_run_that_is_named_by_a_url_keeps_this_name(
    rollmill: Callable[..., Told], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_environment(s3_server()).items():
        monkeypatch.setenv(name, value)
    run = RunDirectory.create(tmp_path / "runs", make_config(f"store={new_bucket()!r}"))
    describe_run(run)
    url = run.home_store
    assert f"rollmill train --resume {url}\n" in rollmill("status", url).out
    assert rollmill("stop", url).out == f"nothing uses {url}\n"
    assert refused(rollmill("logs", url, "trainer"), f"{url} has no log 'trainer'", "none yet")
    assert refused(rollmill("rm", "--yes", url), f"{url} is not a directory", f"`rollmill rm {run.path}`")
    assert run.path.exists()


def test_resuming_a_finished_run_says_so_and_changes_nothing(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    before = tree(run.path)
    told = rollmill("train", "--resume", run.path)
    assert told.code == 0 and f"{run.path} is finished" in told.out
    assert "25.0% → 87.5%" in told.out and "report.html" in told.out
    assert tree(run.path) == before


def test_a_damaged_report_is_named(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    (run.path / "report.json").write_text("{")
    assert refused(rollmill("train", "--resume", run.path), f"{run.path / 'report.json'} is damaged", "delete it")


def test_a_run_is_finished_when_its_last_version_was_evaluated_and_reported(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    assert is_finished(run)
    after = run.home_store / "evals" / run.id / "after.json"
    after.write_text(json.dumps([{"rate": 0.5, "version": 1}]))  # of a run that was extended since
    assert not is_finished(run)
    after.write_text(json.dumps([{"rate": 0.5, "version": 2}]))
    (run.path / "report.json").unlink()
    assert not is_finished(run) and state_of(run).word == "stopped"


@pytest.mark.slow
def test_rm_asks_first(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    for answer in ("n\n", ""):
        done = subprocess.run([*ROLLMILL, "rm", run.path], input=answer, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and run.path.exists() and f"Delete {run.path}" in done.stdout + done.stderr
    subprocess.run([*ROLLMILL, "rm", run.path, "--yes"], check=True)
    assert not run.path.exists()


def test_logs(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    assert rollmill("logs", run.path).out == f"{run.path} has no logs yet\n"
    for folder, name in ((run.logs, "trainer"), (run.path / "services" / "serve-1" / "logs", "gateway")):
        folder.mkdir(parents=True)
        (folder / f"{name}.log").write_text("".join(f"{name} {number}\n" for number in range(100)))
    listed = rollmill("logs", run.path).out.splitlines()
    assert [line.split()[0] for line in listed] == ["trainer", "serve-1/gateway"]
    assert rollmill("logs", run.path, "trainer", "-n", 2).out == "trainer 98\ntrainer 99\n"
    assert rollmill("logs", run.path, "serve-1/gateway", "-n", 1).out == "gateway 99\n"
    assert refused(rollmill("logs", run.path, "trainr"), "no log 'trainr'", "logs here: trainer, serve-1/gateway")
    follower = subprocess.Popen([*ROLLMILL, "logs", run.path, "trainer", "-f", "-n", "1"], stdout=subprocess.PIPE)
    assert follower.stdout is not None
    assert follower.stdout.readline() == b"trainer 99\n"
    with (run.logs / "trainer.log").open("a") as file:
        file.write("a new line\n")
    assert follower.stdout.readline() == b"a new line\n"
    follower.terminate()
    follower.communicate()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_training_is_seen_refused_to_be_removed_and_stopped(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    run = endless_run(tmp_path)
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen([*ROLLMILL, "train", "--resume", str(run.path)], stdout=out, stderr=out)
    try:
        wait_until(lambda: "midtrain  " in (tmp_path / "out").read_text(), process)
        told = rollmill("status", run.path)
        assert (
            "training" in told.out
            and f"process {process.pid}" in told.out
            and re.search(r"midtrain \d+/100000", told.out)
        )
        assert "small  training" in " ".join(rollmill("runs", "--root", tmp_path).out.split("   "))
        assert refused(rollmill("rm", run.path, "--yes"), f"process {process.pid}", f"rollmill stop {run.path}")
        assert refused(rollmill("train", "--resume", run.path), f"process {process.pid}", "rollmill stop")
        told = rollmill("stop", run.path)
        assert told.code == 0 and told.out.endswith("stopped\n")
        assert process.wait() == 130
    finally:
        process.kill()
        process.wait()
    text = (tmp_path / "out").read_text() + (run.logs / "trainer.log").read_text()
    assert f"`rollmill train --resume {run.path}` continues the run" in text and "Traceback" not in text
    assert holder(run.path, "supervisor") is None
    assert rollmill("stop", run.path).out == f"nothing uses {run.path}\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_training_in_the_background_outlives_its_command(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    run = endless_run(tmp_path)
    detached = [*ROLLMILL, "train", "--resume", str(run.path), "--detach"]
    began = subprocess.run(detached, capture_output=True, text=True, check=True)
    by = holder(run.path, "supervisor")
    try:
        assert by is not None and f"`rollmill status {run.path}` shows it" in began.stdout
        assert os.getsid(by.pid) == by.pid, "a terminal that closes does not end it"
        subprocess.run(detached, check=True)
        assert holder(run.path, "supervisor") == by, "there is no second one"
        assert "training" in rollmill("status", run.path).out
        assert rollmill("stop", run.path).out.endswith("stopped\n") and holder(run.path, "supervisor") is None
    finally:
        if by is not None and holder(run.path, "supervisor") == by:
            os.killpg(by.pid, signal.SIGKILL)
    while "continues the run" not in rollmill("logs", run.path, "train").out:  # its last words
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ctrl_c_leaves_its_hint_as_the_last_line_of_the_terminal(tmp_path: Path) -> None:
    run = endless_run(tmp_path)
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [*ROLLMILL, "train", "--resume", str(run.path)], stdin=end, stdout=end, stderr=end, start_new_session=True
    )
    os.close(end)
    shown = b""
    try:
        while b"loss" not in shown:
            shown += os.read(terminal, 65536)
        os.killpg(process.pid, signal.SIGINT)
        while True:
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # the other end is closed: the process has ended
                break
        assert process.wait() == 130
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    last = shown.decode().rstrip().rpartition("\n")[2]
    assert last.removeprefix("\x1b[?25h") == f"stopped; `rollmill train --resume {run.path}` continues the run"
    assert b"Traceback" not in shown and "Traceback" not in (run.logs / "trainer.log").read_text()
