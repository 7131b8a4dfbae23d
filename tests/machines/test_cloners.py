"""Cloners: the processes whose clones are machines (namespace/slot.py)."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmill.errors import MachineError
from rollmill.machines.guest import cgroups
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.namespace import host as machine_host
from rollmill.machines.namespace.client import NamespaceHost

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEPT, SPARE = 32, 8
# a cloner whose users nobody has mapped, in a process without threads
CANNOT_PREPARE = """
from types import SimpleNamespace
from rollmill.machines.namespace.slot import Cloner
cloner = Cloner(SimpleNamespace(own_user=True), None, lambda pid: None)
cloner.prepare()
cloner.ask()
try:
    cloner.take()
except OSError as error:
    print(type(error).__name__, error)
cloner.end()
"""
# killed between the first and the last step
KILLED_MEANWHILE = """
import os, signal, time
from rollmill.machines.guest import image_root
def map_users(pid):
    print(pid, flush=True)
    time.sleep(0.3)  # it sleeps by then
    os.kill(os.getpid(), signal.SIGKILL)
image_root.open_users(map_users)
"""


def children(host: NamespaceHost) -> tuple[list[int], list[int]]:
    """Process ids of the cloners of a machine host, and of its machines."""
    assert host._process is not None
    own = host._process.pid
    found: tuple[list[int], list[int]] = ([], [])
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_bytes().rpartition(b")")[2].split()[1]) == own:
                is_machine = os.readlink(path / "ns/pid") != os.readlink(f"/proc/{own}/ns/pid")
                found[is_machine].append(int(path.name))
        except OSError:  # it has just ended
            continue
    return found


def wait_for(state: Callable[[], object]) -> None:
    while not state():
        time.sleep(0.005)


async def test_a_killed_cloner_is_replaced(any_host: NamespaceHost) -> None:
    first = await any_host.create(BUILT_IN, {"a": b"1"})
    cloners, _ = children(any_host)
    for cloner in cloners:
        os.kill(cloner, signal.SIGKILL)
    machines = await asyncio.gather(*(any_host.create(BUILT_IN) for _ in range(16)))  # more than are made ahead
    results = await asyncio.gather(*(machine.exec(["true"]) for machine in machines))
    assert [result.exit_code for result in results] == [0] * 16
    assert await first.read("a") == b"1", "a machine does not need its cloner"
    await asyncio.gather(*(machine.close() for machine in [first, *machines]))


async def test_a_machine_that_died_before_anyone_used_it_is_not_handed_out(host: NamespaceHost) -> None:
    await (await host.create(BUILT_IN)).close()
    assert host._process is not None
    await asyncio.to_thread(wait_for, lambda: children(host)[1])
    os.kill(host._process.pid, signal.SIGSTOP)  # so that it hears of the request before it hears of the deaths
    try:
        creating = asyncio.create_task(host.create(BUILT_IN))
        await asyncio.to_thread(wait_for, lambda: host._creating)
        spares = [os.pidfd_open(pid) for pid in children(host)[1]]
        for spare in spares:
            signal.pidfd_send_signal(spare, signal.SIGKILL)
        await asyncio.to_thread(wait_for, lambda: len(select.select(spares, [], [], 1)[0]) == len(spares))
    finally:
        os.kill(host._process.pid, signal.SIGCONT)
    for spare in spares:
        os.close(spare)
    machine = await creating
    assert (await machine.exec(["true"])).exit_code == 0
    await machine.close()


async def test_a_host_with_more_open_files_than_select_takes_hands_machines_out() -> None:
    """A machine takes about six of them, so 200 machines are enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this user may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    machine = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220  what counts here is the number of its pidfd
    try:
        pidfd = os.pidfd_open(machine.pid)
        high = fcntl.fcntl(pidfd, fcntl.F_DUPFD_CLOEXEC, 1500)
        assert not machine_host._is_readable(high)
        machine.kill()
        machine.wait()
        assert machine_host._is_readable(high)
        os.close(high)
        os.close(pidfd)
    finally:
        machine.kill()
        machine.wait()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_groups_left_by_a_host_of_the_same_process_id_are_removed(tmp_path: Path) -> None:
    """As after a restart of a container. Otherwise there would be no control groups for this one, without a word."""
    name, place = f"rollmill-{os.getpid()}-1", tmp_path / "own"
    (place / name / "m0/user.slice").mkdir(parents=True)
    first = cgroups._nearest(str(tmp_path), "/own", name, unified=False)
    assert first is not None and os.path.samestat(os.fstat(first), (place / name).stat()) and not os.listdir(first)
    second = cgroups._nearest(str(tmp_path), "/own", name, unified=False)  # that of a host that lives stays
    assert (
        second is not None and os.path.samestat(os.fstat(second), (tmp_path / name).stat()) and (place / name).exists()
    )
    os.close(first)
    os.close(second)


async def test_machines_are_born_in_their_groups(host: NamespaceHost) -> None:
    if not host.limits["control_groups"]:
        pytest.skip("no control groups here")
    machine = await host.create(BUILT_IN)
    _, machines = children(host)
    assert machines and host._process is not None
    groups = [Path(f"/proc/{pid}/cgroup").read_text() for pid in machines]
    assert all(f"/rollmill-{host._process.pid}-" in group and "/m" in group for group in groups)
    assert len(set(groups)) == len(machines), "each in one of its own"
    await machine.close()


async def test_one_machine_after_the_other_in_a_slot_finds_nothing_of_it(host: NamespaceHost) -> None:
    """A slot has users, limits and a host name; files, network and shared memory are of the machine."""
    leave = (
        "import os, socket; open('/tmp/a', 'w'); open('/work/a', 'w'); open(os.path.expanduser('~/a'), 'w')\n"
        "held = [socket.create_server(('127.0.0.1', 4711)) for _ in range(1)]\n"
        "socket.create_connection(('127.0.0.1', 4711)).close()"
    )
    look = "ls -A /work /tmp; ls ~; cat /proc/net/tcp /proc/sysvipc/shm | wc -l; cat /proc/net/unix | wc -l"
    machine = await host.create(BUILT_IN)
    seen = {(await machine.exec(["sh", "-c", look])).output}
    await machine.close()
    for _ in range(24):  # in each slot that is made ahead, more than once
        machine = await host.create(BUILT_IN)
        seen.add((await machine.exec(["sh", "-c", look])).output)
        assert (await machine.exec(["python", "-c", leave])).exit_code == 0
        await machine.close()
    assert len(seen) == 1


async def test_cloners_that_nobody_needs_end_while_others_come_and_go(host: NamespaceHost) -> None:
    machines = await asyncio.gather(*(host.create(BUILT_IN) for _ in range(KEPT + SPARE + 20)))
    assert len(children(host)[0]) >= len(machines)
    await asyncio.gather(*(machine.close() for machine in machines))
    assert len(children(host)[0]) > KEPT + SPARE, "the next wave finds them"
    async with asyncio.timeout(60.0):
        while len(children(host)[0]) > KEPT + SPARE:
            await (await host.create(BUILT_IN)).close()


async def test_the_holder_of_users_ends_with_a_process_that_is_killed_meanwhile(tmp_path: Path) -> None:
    with (tmp_path / "holder").open("w") as file:
        killed = subprocess.run([sys.executable, "-c", KILLED_MEANWHILE], stdout=file, check=False)  # noqa: ASYNC221
    assert killed.returncode == -signal.SIGKILL
    holder = int((tmp_path / "holder").read_text())
    for _ in range(100):
        if not Path(f"/proc/{holder}").exists():
            return
        await asyncio.sleep(0.05)
    os.kill(holder, signal.SIGKILL)
    pytest.fail("it was left")


async def test_no_more_machines_are_made_ahead_than_wanted(host: NamespaceHost) -> None:
    for _ in range(2 * SPARE):
        machine = await host.create(BUILT_IN)
        await machine.exec(["true"])
        assert len(children(host)[1]) <= 1 + SPARE
        await machine.close()


async def test_a_cloner_says_why_it_cannot_go_on() -> None:
    words = [sys.executable, "-c", CANNOT_PREPARE]
    done = subprocess.run(words, capture_output=True, text=True, check=True)  # noqa: ASYNC221
    assert done.stdout == "PermissionError [Errno 1] Operation not permitted\n"


async def test_few_open_files_are_an_error_of_one_request(host: NamespaceHost, tmp_path: Path) -> None:
    await (await host.create(BUILT_IN)).close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(MachineError, match="may not open more files"):
            await host.create(BUILT_IN)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await (await host.create(BUILT_IN)).close()
    directory = os.open(tmp_path, os.O_RDONLY)  # which is no control group: the files of a slot are not there
    before = os.listdir("/proc/self/fd")
    for parents in ({"": directory}, {"memory": directory, "pids": directory}):
        with pytest.raises(OSError, match="memory"):
            cgroups.Groups("any", parents, {"memory": 1, "pids": 1}).make_slot(0)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    os.close(directory)
