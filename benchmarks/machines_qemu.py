"""Virtual machines under QEMU, for `python -m benchmarks.machines`: boot, restore, fork, exec, paused machines."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.output import at_least, at_most
from rollmill.errors import MachineError
from rollmill.machines.images.image import BUILT_IN, load_image
from rollmill.machines.pool import Pool, PoolConfig
from rollmill.machines.qemu.host import QemuHost
from rollmill.machines.qemu.machine import QemuMachine
from rollmill.machines.qemu.parts import find_parts

RESTORE_S = {"aarch64": 0.5, "x86_64": 0.8}
PAUSE_MS = {"aarch64": 100.0, "x86_64": 150.0}


def missing() -> str | None:
    """Why there are no virtual machines here; None if there are."""
    try:
        find_parts()
    except MachineError as error:
        return str(error)
    return None


async def measure(*, boots: int, restores: int, held: int) -> dict[str, float]:
    boot_s = [await _boot() for _ in range(boots)]
    host = QemuHost()
    try:
        template = await host.template(load_image(BUILT_IN, None))
        restored = [await _start(host) for _ in range(restores)]
        restore_s = [seconds for seconds, _ in restored]
        machine = await host.create(BUILT_IN)
        for _ in range(5):
            await machine.exec(["true"])  # translated code is warm
        over_ms = [await _round_trip(machine) for _ in range(30)]
        ping_ms = [1e3 * await _timed(lambda: machine.vm.ask_init({"op": "ping"})) for _ in range(30)]
        pause_ms = [1e3 * (await machine.snapshot()).state.stood_still_s for _ in range(8)]
        fork_s = [await _fork(machine) for _ in range(4)]
        await machine.close()
        paused = await _hold(host, held)
        ready_s = await _take_ready(host, 6)
        return {
            "qemu_boot_s": statistics.median(boot_s),
            "qemu_restore_p50_s": statistics.median(restore_s),
            "qemu_restore_worst_s": max(restore_s),
            "qemu_restore_cpu_s": statistics.median(cpu for _, cpu in restored),
            "qemu_boot_over_restore": statistics.median(boot_s) / statistics.median(restore_s),
            "qemu_exec_over_ms": statistics.median(over_ms),
            "qemu_ping_ms": statistics.median(ping_ms),
            "qemu_fork_pause_p50_ms": statistics.median(pause_ms),
            "qemu_fork_pause_worst_ms": max(pause_ms),
            "qemu_fork_to_exec_s": statistics.median(fork_s),
            "qemu_slowdown": template.capabilities.slowdown,
            "qemu_ready_to_exec_p50_s": statistics.median(ready_s),
            **paused,
        }
    finally:
        await host.close()


def bars(figures: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Of what was measured."""
    architecture = find_parts().architecture.name
    wanted = {
        "qemu_restore_p50_s": (at_most, RESTORE_S[architecture]),
        "qemu_boot_over_restore": (at_least, 8.0),
        "qemu_fork_pause_p50_ms": (at_most, PAUSE_MS[architecture]),
        "qemu_exec_over_ms": (at_most, 5.0),
        "qemu_paused_mib": (at_most, 64.0),
        "qemu_resume_ms": (at_most, 30.0),
    }
    return {key: bar(figures[key], limit) for key, (bar, limit) in wanted.items() if key in figures}


async def _boot() -> float:
    host = QemuHost()
    try:
        return (await host.template(load_image(BUILT_IN, None))).boot_s
    finally:
        await host.close()


async def _start(host: QemuHost) -> tuple[float, float]:
    """Seconds from the request for a machine to the end of its first command, and CPU seconds of its QEMU until then.

    Other work on the same cores changes the second less than the first.
    """
    began = time.monotonic()
    machine = await host.create(BUILT_IN)
    result = await machine.exec(["true"])
    seconds = time.monotonic() - began
    assert result.exit_code == 0, result
    fields = Path(f"/proc/{machine.vm.process.pid}/stat").read_text().rpartition(")")[2].split()
    cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    await machine.close()
    return seconds, cpu


async def _round_trip(machine: QemuMachine) -> float:
    """Milliseconds of a command beyond the time that the command itself ran."""
    began = time.monotonic()
    result = await machine.exec(["true"])
    return 1e3 * (time.monotonic() - began - result.seconds)


async def _timed(work: Callable[[], Awaitable[None]]) -> float:
    began = time.monotonic()
    await work()
    return time.monotonic() - began


async def _fork(machine: QemuMachine) -> float:
    """Seconds from the request for a fork to the end of its first command."""
    began = time.monotonic()
    (fork,) = await machine.fork()
    await fork.exec(["true"])
    seconds = time.monotonic() - began
    await fork.close()
    return seconds


async def _take_ready(host: QemuHost, count: int) -> list[float]:
    """Seconds from the request to the end of the first command, of machines that a pool has ready, paused."""
    pool, seconds = Pool(host, PoolConfig(ahead=count, pause_after_s=0)), []
    machines = [await pool.create(BUILT_IN)]
    pool.expect(BUILT_IN, count)
    while pool.counts["ready"] < count:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    pool.expect(BUILT_IN, 0)
    for _ in range(count):
        began = time.monotonic()
        machines.append(machine := await pool.create(BUILT_IN))
        await machine.exec(["true"])
        seconds.append(time.monotonic() - began)
    await asyncio.gather(*(machine.close() for machine in machines))
    return seconds


async def measure_held(count: int) -> dict[str, float]:
    """Only `count` machines held at once: about a third of a second per machine on two idle cores."""
    host = QemuHost()
    try:
        return await _hold(host, count)
    finally:
        await host.close()


async def _hold(host: QemuHost, count: int) -> dict[str, float]:
    """Hold `count` machines at once that have run a command, paused; then resume some. As many start as there are
    processors."""
    machines: list[QemuMachine] = []
    began, numbers = time.monotonic(), iter(range(count))

    async def start() -> None:
        for _ in numbers:
            machine = await host.create(BUILT_IN)
            machines.append(machine)
            await machine.exec(["true"])
            await machine.pause()

    try:
        await asyncio.gather(*(start() for _ in range(os.cpu_count() or 1)))
        held_s = time.monotonic() - began
        sizes = [_share_mib(machine) for machine in machines]
        resume_ms = [await _resume(machine) for machine in machines[:: max(1, count // 20)]]
    finally:
        await asyncio.gather(*(machine.close() for machine in machines))
    return {
        "qemu_held": count,
        "qemu_held_start_s": held_s,
        "qemu_paused_mib": statistics.mean(sizes),
        "qemu_paused_worst_mib": max(sizes),
        "qemu_resume_ms": statistics.median(resume_ms),
        "qemu_resume_worst_ms": max(resume_ms),
    }


async def _resume(machine: QemuMachine) -> float:
    """Milliseconds until a paused machine has answered a ping."""
    began = time.monotonic()
    await machine.resume()
    await machine.vm.ask_init({"op": "ping"})
    milliseconds = 1e3 * (time.monotonic() - began)
    await machine.pause()
    return milliseconds


def _share_mib(machine: QemuMachine) -> float:
    """The memory of a QEMU process; pages that several share are divided among them."""
    for line in Path(f"/proc/{machine.vm.process.pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise OSError("no Pss")
