"""Processes of one node share one server: whichever of them is lost, its own process ends and the others go on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmill.launch.fork_server import Child, ForkServer
from rollmill.launch.launcher import FINAL
from rollmill.launch.launchers.node_process import NodeProcess
from rollmill.launch.role_inputs import hand_to
from rollmill.runs.run import RunDirectory
from rollmill.storage.objects import Objects

# a process that is forked goes on when its parent has died
LATE = """
import os, sys, time
def wait(server=os.getpid()):
    while os.getppid() == server:
        time.sleep(0.01)
if "rollmill.launch.fork_server" in sys.orig_argv:
    os.register_at_fork(after_in_child=wait)
"""


def until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.01)


def sleeper(server: ForkServer, run: RunDirectory, name: str) -> tuple[Child, int]:
    """A role process of this name, and its pid."""
    run.logs.mkdir(exist_ok=True)
    log, title = run.logs / f"{name}.log", f"rollmill {name} {run.path}"
    child = server.start("store", hand_to(run, "store"), (), name=title, environment={}, log=log)
    until(lambda: find(title))
    return child, find(title)[0]


def find(title: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "cmdline").read_bytes().rstrip(b"\0") == title.encode():
                found.append(int(entry.name))
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if parent(int(entry.name)) == pid:
                found.append(int(entry.name))
    return found


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"  # nobody here waits for it
    except OSError:
        return True


def test_processes_of_a_node_share_one_fork_server(make_run: Callable[..., RunDirectory], tmp_path: Path) -> None:
    runs = [make_run(f"name={name}") for name in ("first", "second")]  # two roles with ports of their own
    place = tmp_path / "a directory whose path is too long for the address of a socket" / ("x" * 60)
    servers = [ForkServer(place) for _ in runs]
    (first, first_pid), (second, second_pid) = map(sleeper, servers, runs, ("one", "two"))
    server = parent(first_pid)
    assert parent(second_pid) == server and os.getsid(server) != os.getsid(0), "it belongs to none of them"

    second.signal(signal.SIGKILL)
    assert second.wait(60.0) == -signal.SIGKILL and first.poll() is None
    second, second_pid = sleeper(servers[1], runs[1], "two again")
    assert parent(second_pid) == server
    servers[0].close()  # as if the actor was killed
    until(lambda: gone(first_pid))
    assert second.poll() is None and not gone(second_pid)

    os.kill(server, signal.SIGKILL)
    assert second.wait(60.0) == -signal.SIGKILL
    until(lambda: gone(second_pid))
    second, second_pid = sleeper(servers[1], runs[1], "two at last")
    successor = parent(second_pid)
    assert successor != server
    servers[1].close()
    until(lambda: gone(successor))  # nobody needs it any more
    assert not list(place.iterdir())


def test_a_process_whose_fork_server_dies_while_it_is_forked_ends(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "sitecustomize.py").write_text(LATE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "late"), os.getcwd()]))
    run.logs.mkdir(exist_ok=True)
    server = ForkServer()
    child = server.start(
        "store", hand_to(run, "store"), (), name="rollmill late", environment={}, log=run.logs / "store.log"
    )
    assert server._process is not None
    pid = server._process.pid
    until(lambda: children(pid))
    [forked] = children(pid)
    os.kill(pid, signal.SIGKILL)
    assert child.wait(60.0) == -signal.SIGKILL
    until(lambda: gone(forked))  # it would work for ever, and nobody would know of it


def test_a_node_process_tells_how_its_process_ended(run: RunDirectory, tmp_path: Path) -> None:
    process = NodeProcess(run.id, str(run.home_store), "gateway", str(tmp_path / "nodes"), lambda: "127.0.0.1")
    assert process.poll() == (None, None, "")
    in_the_way = tmp_path / "nodes" / run.id / "fork-server-127.0.0.1"
    in_the_way.touch()
    process.begin("it", "gateway", hand_to(run, "gateway"), (), {}, again=False)
    assert process.poll()[:2] == ("it", 1) and "no fork server on node 127.0.0.1: [Errno 17]" in process.poll()[2]
    in_the_way.unlink()
    process.begin("it", "gateway", hand_to(run, "gateway"), (), {}, again=True)
    until(lambda: process.poll()[1] is not None)
    doing, code, words = process.poll()
    assert (doing, code) == ("it", FINAL) and "tokenizer" in words
    process.begin("it", "gateway", hand_to(run, "gateway"), (), {}, again=False)
    assert process.poll()[1] == FINAL, "it is told to start it again, or does not"
    process.end()
    assert process.poll() == (None, None, "")
    objects = Objects.open(run.home_store)
    assert any(b"tokenizer" in objects.get(key) for key in objects.list("cluster/files/logs/gateway.log"))


def test_what_a_new_engine_waits_for_imports_little() -> None:
    script = "import sys, rollmill.launch.launchers.ray_cluster; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "rollmill.launch.launchers.node_process" in loaded
    assert not {"pydantic", "numpy", "torch", "ray"} & set(loaded)
