"""The pool, around real namespace machines. Some tests need machines that can be paused: a thin kind around them says
that it can. Virtual machines, which really can, are in test_qemu.py."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollmill.errors import MachineError, NoCapacity
from rollmill.machines import pool as pool_module
from rollmill.machines.guest import cgroups
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.machine import Machine, MachineHost, Snapshot
from rollmill.machines.namespace.client import NamespaceHost
from rollmill.machines.pool import Pool, PoolConfig
from tests.machines.test_containment import wait_for_processes

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Pausable:
    """Namespace machines whose pause is only noted (they have none)."""

    def __init__(self, host: NamespaceHost) -> None:
        self.host = host
        self.paused: set[Machine] = set()
        self.made = 0
        self.broken = False

    async def create(
        self, image: str, files: Mapping[str, bytes] | None = None, *, snapshot: Snapshot | None = None
    ) -> Machine:
        machine: Any = await self.host.create(image, files, snapshot=snapshot)
        self.made += 1
        machine.capabilities = replace(machine.capabilities, pause=True)

        async def pause() -> None:
            self.paused.add(machine)

        async def resume() -> None:
            if self.broken:
                raise MachineError("it does not go on")
            self.paused.discard(machine)

        machine.pause, machine.resume = pause, resume
        made: Machine = machine
        return made

    async def close(self) -> None: ...


async def _until(what: Any) -> None:
    async with asyncio.timeout(60):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_requests_wait_for_a_place_in_order_and_fail_with_a_time_to_try_again(host: NamespaceHost) -> None:
    pool = Pool(Pausable(host), PoolConfig(most=2, patience_s=0.3, ahead=0))
    first, second = [await pool.create(BUILT_IN) for _ in range(2)]
    with pytest.raises(NoCapacity, match=r"2 machines are there \(pool.most is 2\)") as refused:
        await pool.create(BUILT_IN)
    assert refused.value.retry_after_s > 0
    pool.config = PoolConfig(most=2, patience_s=60, ahead=0)
    waiting = [asyncio.create_task(pool.create(BUILT_IN)) for _ in range(2)]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(first.fork(), 0.2)  # a fork needs a place too
    await first.close()
    await first.close()
    third = await waiting[0]
    assert not waiting[1].done() and pool.counts == {"starting": 0, "ready": 0, "in_use": 2}
    await second.close()
    fourth = await waiting[1]
    await third.close()
    (fork,) = await fourth.fork()
    assert pool.counts["in_use"] == 2
    await asyncio.gather(fork.close(), fourth.close())
    assert pool.counts == {"starting": 0, "ready": 0, "in_use": 0}
    await pool.close()


async def test_grading_waits_behind_no_new_episode_and_episodes_get_their_turn(host: NamespaceHost) -> None:
    pool = Pool(Pausable(host), PoolConfig(most=1, ahead=0))
    first = await pool.create(BUILT_IN)
    order: list[str] = []

    async def take(name: str, machines: MachineHost) -> None:
        machine = await machines.create(BUILT_IN, {"a": b""})
        order.append(name)
        await machine.close()

    waiting = [asyncio.create_task(take(f"episode {number}", pool)) for number in range(2)]
    await _until(lambda: pool._turn.locked())
    waiting += [asyncio.create_task(take(f"grading {number}", pool.grading())) for number in range(2)]
    await _until(lambda: pool._grading_waits == 2)
    given_up = asyncio.create_task(take("never", pool.grading()))
    await _until(lambda: pool._grading_waits == 3)
    given_up.cancel()
    await asyncio.wait([given_up])
    await first.close()
    await asyncio.gather(*waiting)
    assert order == ["grading 0", "grading 1", "episode 0", "episode 1"]
    await pool.close()


async def test_no_machine_starts_while_memory_is_short(
    host: NamespaceHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory, pressure = tmp_path / "meminfo", tmp_path / "pressure"
    monkeypatch.setattr(pool_module, "_MEMORY", memory)
    monkeypatch.setattr(pool_module, "_PRESSURE", pressure)
    pool = Pool(Pausable(host), PoolConfig(reserve_mb=1000, patience_s=0.2))
    memory.write_text("MemTotal:  1 kB\nMemAvailable:  512000 kB\n")
    with pytest.raises(NoCapacity, match="500 MiB of memory are available"):
        await pool.create(BUILT_IN)
    memory.write_text("MemAvailable:  4096000 kB\n")
    machine = await pool.create(BUILT_IN)
    pressure.write_text("some avg10=77.50 avg60=1.00 avg300=0.00 total=1\nfull avg10=0.00\n")
    with pytest.raises(NoCapacity, match="memory pressure is 78 %"):
        await pool.create(BUILT_IN)
    await machine.close()
    await (await pool.create(BUILT_IN)).close()  # with no machine in use, waiting would help nobody
    await pool.close()


async def test_machines_are_ready_before_they_are_needed(host: NamespaceHost) -> None:
    kind = Pausable(host)
    pool = Pool(kind, PoolConfig(ahead=3, pause_after_s=0, patience_s=1))
    first = await pool.create(BUILT_IN)
    pool.expect(BUILT_IN, 5)
    await _until(lambda: pool.counts["ready"] == 3 and len(kind.paused) == 3)
    made = kind.made
    pool.expect(BUILT_IN, 0)  # nothing new
    taken = [await pool.create(BUILT_IN, {"main.py": b"x"}) for _ in range(2)]
    assert kind.made == made and [await each.read("main.py") for each in taken] == [b"x"] * 2
    kind.broken = True  # a machine that does not go on is replaced
    last = await pool.create(BUILT_IN)
    assert kind.made == made + 1 and pool.counts == {"starting": 0, "ready": 0, "in_use": 4}
    kind.broken = False
    pool.expect(BUILT_IN, 1)
    await _until(lambda: pool.counts["ready"] == 1)
    pool.config = PoolConfig(most=5, patience_s=1)
    other = await pool.create(BUILT_IN, snapshot=await last.snapshot())  # no place is free: the ready one gives way
    await asyncio.gather(*(each.close() for each in (first, *taken, last, other)))
    await pool.close()
    assert pool.counts == {"starting": 0, "ready": 0, "in_use": 0}


@pytest.mark.slow
async def test_a_machine_pauses_while_nobody_asks_and_ends_with_its_lease(host: NamespaceHost) -> None:
    kind = Pausable(host)
    pool = Pool(kind, PoolConfig(pause_after_s=0.05, lease_s=3.0))
    machine = await pool.create(BUILT_IN)
    for _ in range(3):
        await _until(lambda: kind.paused)
        assert (await machine.exec(["echo", "on"])).output == b"on\n"
    running = asyncio.create_task(machine.exec(["sleep", "2"]))
    await asyncio.sleep(0.2)
    assert not kind.paused, "a command is running"
    await running
    server = await pool.create(BUILT_IN)
    await server.start(["sleep", "1000"])
    async with asyncio.timeout(60):
        while pool.counts["in_use"] > 1:  # nobody beats for the server
            machine.beat()
            await asyncio.sleep(0.1)
    assert len(kind.paused) == 1, "one with a process of its own is not paused"
    await _until(lambda: pool.counts["in_use"] == 0)
    with pytest.raises(MachineError):
        await machine.exec(["true"])
    await pool.close()


async def test_nothing_is_left_when_the_holder_of_a_pool_is_killed(tmp_path: Path) -> None:
    """No process, no namespace, no mount, no control group, no file."""
    program = """
import asyncio
from rollmill.machines.namespace.client import NamespaceHost
from rollmill.machines.pool import Pool
async def main():
    pool = Pool(NamespaceHost())
    machines = [await pool.create("host-python") for _ in range(3)]
    for machine in machines: await machine.start(["sleep", "9876" + "4.4321"])
    print("up", flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""
    mounts = Path("/proc/self/mountinfo").read_text()
    shared = set(os.listdir("/dev/shm"))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    holder = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=tmp_path, env=environment
    )
    assert holder.stdout is not None
    assert await asyncio.to_thread(holder.stdout.readline) == b"up\n"
    try:
        await wait_for_processes("98764.4321", 3)
        left = _descendants(holder.pid)
        assert len(left) > 6  # the machine host, and two processes per machine
    finally:
        holder.kill()
        holder.wait()
    holder.stdout.close()
    await wait_for_processes("98764.4321", 0)
    await _until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))
    await asyncio.to_thread(_check_groups, left)
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert not os.listdir(tmp_path)
    assert not [name for name in set(os.listdir("/dev/shm")) - shared if "rollmill" in name]


def _check_groups(pids: list[int]) -> None:
    names = tuple(f"rollmill-{pid}-" for pid in pids)
    assert not [name for _, below, _ in os.walk("/sys/fs/cgroup") for name in below if name.startswith(names)]


def _descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, children) for each in (child, *_descendants(child))]


async def test_a_machine_host_of_another_pid_namespace_does_not_sweep_the_groups_of_this_one() -> None:
    """As in another container that sees the same control groups. It sees none of the processes here."""
    host = NamespaceHost()
    machine = await host.create(BUILT_IN)
    if not host.limits["control_groups"] or os.geteuid() != 0:
        await host.close()
        pytest.skip("needs control groups, and root for a pid namespace")
    code = "from rollmill.machines.guest import cgroups; cgroups.sweep()"
    elsewhere = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    await asyncio.to_thread(subprocess.run, elsewhere, check=True)
    assert (await machine.exec(["true"])).exit_code == 0
    other = await host.create(BUILT_IN)
    assert (await other.exec(["true"])).exit_code == 0
    await host.close()


async def test_a_machine_host_with_the_name_of_a_killed_one_has_control_groups() -> None:
    """In a container that is started again, process ids and the number of the namespace may come again."""

    def where(groups: cgroups.Groups) -> list[str]:
        return [os.readlink(f"/proc/self/fd/{file}") for file in groups.parents.values()]

    killed = cgroups.find(1 << 28, 64)
    if killed is None:
        pytest.skip("needs control groups")
    places = where(killed)
    for place, file in zip(places, killed.parents.values(), strict=True):
        os.mkdir(f"{place}/m0")
        os.close(file)
    again = cgroups.find(1 << 28, 64)
    assert again is not None and where(again) == places, "not further up, where others have theirs"
    again.remove()
    for file in again.parents.values():
        os.close(file)
    assert not any(map(os.path.exists, places))


async def test_a_machine_host_that_is_killed_leaves_no_control_group() -> None:
    host = NamespaceHost()
    await host.create(BUILT_IN)
    assert host._process is not None
    pid, machines = host._process.pid, _descendants(host._process.pid)
    host._process.kill()
    await _until(lambda: not any(Path(f"/proc/{each}").exists() for each in machines))
    await host.close()
    await asyncio.to_thread(_check_groups, [pid])
