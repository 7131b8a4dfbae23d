"""Machines: from start to the first command, with `bwrap` beside them in the same run; then virtual machines.

    python -m benchmarks.machines [--quick] [--starts 400] [--bwrap PATH] [--held 200]
                                  [--only namespaces|forks|gradings|qemu]

- p50 and p99 are of the time from `create` to the end of the first command, `true`. One machine at a time; each is
  closed before the next one starts.
- `starts/s` counts create, first command and close, four machines at once.
- CPU is the user and system time per machine: this client, the machine host and its machines, or `bwrap`. Other work on
  the same cores changes it less than the other figures. The kernel frees network namespaces later, in its own threads:
  that is not in it.

`bwrap` is Debian's package bubblewrap. It runs `true` in the same kinds of namespaces (user, mount, pid, net, ipc,
uts), without limits on memory and processes, without a filter of system calls, and without a process that stays for the
next command. Without `bwrap` its row is left out. Both take turns, so that other work on this host meets both.

Forks: a namespace machine with 500 MB of files forks: until the fork is there, and until it has run `true`. Beside it,
the same files are copied inside a machine, with `cp -r` and with `tar`.

Gradings: a hidden test of two calls in one machine, the submission in another; eight at once, and all at once.

Virtual machines have rows of their own, where QEMU is set up. A cold boot counts from the request to
the end of the first command, and includes making the guest's files. Memory of paused machines: each has run a command;
pages that several machines share are divided among them. `ready`: a pool has the machine restored and paused already.

`benchmarks.machines_soak` injects faults.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.output import at_least, at_most, finish
from rollmill.environments.episode import Episode
from rollmill.environments.rewards.script import Script
from rollmill.environments.task import Task
from rollmill.errors import MachineError
from rollmill.machines.images.image import BUILT_IN, load_image
from rollmill.machines.namespace.client import NamespaceConfig, NamespaceHost, NamespaceMachine
from rollmill.machines.pool import Pool, PoolConfig
from rollmill.machines.qemu.host import QemuHost, QemuMachine
from rollmill.machines.qemu.parts import find_parts

PARTS = ("namespaces", "forks", "gradings", "qemu")
AT_ONCE = 4
ROUNDS = 4
ROOT = ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/work"]
LINKS = ("bin", "lib", "lib64")  # into /usr

Start = Callable[[], Awaitable[float]]  # starts a machine, runs `true`, ends it; returns the seconds until `true` ended


@dataclass
class Measured:
    latencies: list[float] = field(default_factory=list)  # seconds, one machine at a time
    starts: int = 0  # AT_ONCE at once
    seconds: float = 0.0  # for these
    cpu: float = 0.0  # seconds, for all of them

    def percentile(self, share: float) -> float:
        """Milliseconds."""
        ordered = sorted(self.latencies)
        return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def figures(self, name: str) -> dict[str, float]:
        return {
            f"{name}_p50_ms": self.percentile(0.5),
            f"{name}_p99_ms": self.percentile(0.99),
            f"{name}_starts_per_s": self.starts / self.seconds,
            f"{name}_cpu_ms": 1e3 * self.cpu / (self.starts + len(self.latencies)),
        }


async def measure(start: Start, count: int, into: Measured) -> None:
    """`count` starts one after the other, then as many, `AT_ONCE` at once."""
    into.latencies += [await start() for _ in range(count)]

    async def worker() -> None:
        for _ in range(count // AT_ONCE):
            await start()

    began = time.monotonic()
    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    into.seconds += time.monotonic() - began
    into.starts += count // AT_ONCE * AT_ONCE


@asynccontextmanager
async def namespaces() -> AsyncIterator[Start]:
    host = NamespaceHost()

    async def start() -> float:
        began = time.monotonic()
        machine = await host.create(BUILT_IN)
        result = await machine.exec(["true"])
        seconds = time.monotonic() - began
        await machine.close()
        assert result.exit_code == 0, result
        return seconds

    await start()  # starts the machine host
    try:
        yield start
    finally:
        await host.close()


def bubblewrap(program: str) -> Start:
    links = [word for name in LINKS if os.path.islink(f"/{name}") for word in ("--symlink", f"usr/{name}", f"/{name}")]
    argv = [program, "--unshare-all", *ROOT, *links, "--chdir", "/work", "true"]

    async def start() -> float:
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(*argv)
        code = await process.wait()
        assert code == 0, f"{' '.join(argv)}: exit code {code}"
        return time.monotonic() - began

    return start


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


async def run(starts: int, bwrap: str | None) -> dict[str, Measured]:
    async with namespaces() as start:
        kinds = {"namespaces": start} | ({"bwrap": bubblewrap(bwrap)} if bwrap else {})
        measured = {name: Measured() for name in kinds}
        for _ in range(ROUNDS):
            for name, start in kinds.items():
                before = cpu_seconds()
                await measure(start, starts // 2 // ROUNDS, measured[name])
                measured[name].cpu += cpu_seconds() - before
        before = cpu_seconds()
    measured["namespaces"].cpu += cpu_seconds() - before  # the machine host has ended: only now its machines count
    return measured


def show(figures: dict[str, dict[str, float]]) -> None:
    table = Table(title="from start to the first command")
    for column in ("", "p50 ms", "p99 ms", "starts/s", "CPU ms"):
        table.add_column(column)
    for name, values in figures.items():
        table.add_row(name, *(f"{value:.1f}" for value in values.values()))
    Console().print(table)


GRADED = Task(
    "graded",
    "f(x) is x + 1",
    submission=("main.py",),
    grading={
        "kind": "script",
        "verdict": "python",
        "test": "from main import f\nfor x in (1, 2, 5): assert f(x) == x + 1",
    },
)


async def measure_gradings(gradings: int) -> dict[str, float]:
    """Hidden tests in one machine with the submission in another, few at once and all at once."""
    submission, figures = {"main.py": b"def f(x):\n    return x + 1\n"}, {}
    for name, at_once in (("few", 8), ("many", gradings)):
        pool, reward, places = Pool(NamespaceHost()), Script(), asyncio.Semaphore(at_once)

        async def grade(reward: Script = reward, pool: Pool = pool, places: asyncio.Semaphore = places) -> None:
            async with places:
                assert (await reward.grade(Episode(GRADED, submission, pool.grading()))).value == 1.0

        await grade()
        before, began = cpu_seconds(), time.monotonic()
        await asyncio.gather(*(grade() for _ in range(gradings)))
        figures[f"gradings_{name}_per_s"] = gradings / (time.monotonic() - began)
        await pool.close()
        figures[f"gradings_{name}_cpu_ms"] = 1e3 * (cpu_seconds() - before) / gradings
    return figures


FILE_KB = 256
# files in folders of 100; what they hold does not matter, nobody compresses it
WRITE = """
import os, sys
for number in range(int(sys.argv[1])):
    os.makedirs(f"tree/{number // 100}", exist_ok=True)
    with open(f"tree/{number // 100}/{number}", "wb") as file:
        file.write(os.urandom(1024) * int(sys.argv[2]))
"""
COPIES = {
    "cp": "cp -r /work/tree /tmp/copy",
    "tar": "mkdir /tmp/copy && tar -C /work -c tree | tar -C /tmp/copy -x",
}


async def measure_forks(megabytes: int, forks: int) -> dict[str, float]:
    host = NamespaceHost(NamespaceConfig(memory_mb=4 * megabytes, disk_mb=megabytes + 64))
    figures: dict[str, float] = {"fork_mb": megabytes}
    try:
        machine = await host.create(BUILT_IN)
        count = megabytes * 1024 // FILE_KB
        await _run(machine, ["python", "-c", WRITE, str(count), str(FILE_KB)])
        figures["fork_shares"] = float(machine.capabilities.shared_fork)
        for name, script in COPIES.items():
            figures[f"fork_{name}_ms"] = 1e3 * await _run(machine, ["sh", "-c", script])
            await _run(machine, ["rm", "-r", "/tmp/copy"])
        if machine.capabilities.shared_fork:  # copies of machines cannot be as large
            took = [await _fork_namespace(machine, number) for number in range(forks)]
            forked, ran = zip(*took, strict=True)
            figures |= {"fork_p50_ms": statistics.median(forked), "fork_worst_ms": max(forked)}
            figures["fork_command_p50_ms"] = statistics.median(ran)
    finally:
        await host.close()
    return figures


async def _fork_namespace(machine: NamespaceMachine, number: int) -> tuple[float, float]:
    """Milliseconds until there is a fork, and until it has run its first command. Both then change a file."""
    began = time.monotonic()
    (child,) = await machine.fork()
    forked = time.monotonic()
    result = await child.exec(["true"])
    ended = time.monotonic()
    assert result.exit_code == 0, result
    path = f"tree/0/{number % 100}"
    before = await machine.read(path)
    assert await child.read(path) == before
    await child.write(path, b"changed")
    assert await machine.read(path) == before
    await machine.write("changed", str(number).encode())
    await child.close()
    return 1e3 * (forked - began), 1e3 * (ended - began)


async def _run(machine: NamespaceMachine, argv: list[str]) -> float:
    """Seconds that a command took."""
    result = await machine.exec(argv, timeout_s=300.0)
    assert result.exit_code == 0, result
    return result.seconds


RESTORE_S = {"aarch64": 0.5, "x86_64": 0.8}
PAUSE_MS = {"aarch64": 100.0, "x86_64": 150.0}


def missing() -> str | None:
    """Why there are no virtual machines here; None if there are."""
    try:
        find_parts()
    except MachineError as error:
        return str(error)
    return None


async def measure_virtual(*, boots: int, restores: int, held: int) -> dict[str, float]:
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


def virtual_bars(figures: dict[str, float]) -> dict[str, dict[str, Any]]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer starts: under a minute")
    parser.add_argument("--starts", type=int, default=400, help="of each kind")
    parser.add_argument("--bwrap", default=shutil.which("bwrap"), help="path of bwrap")
    parser.add_argument("--held", type=int, default=200, help="virtual machines that are held at once, paused")
    parser.add_argument("--only", choices=PARTS, help="measure this alone")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    bars: dict[str, dict[str, Any]] = {}
    if arguments.only in (None, "namespaces"):
        figures, bars = namespace_figures(80 if arguments.quick else arguments.starts, arguments.bwrap)
    if arguments.only in (None, "forks"):
        measured = asyncio.run(measure_forks(64 if arguments.quick else 500, 5 if arguments.quick else 20))
        show_figures("forks of files", measured)
        figures |= measured
        if "fork_p50_ms" in measured:
            bars["fork_p50_ms"] = at_most(measured["fork_p50_ms"], 25.0)
    if arguments.only in (None, "gradings"):
        measured = asyncio.run(measure_gradings(64 if arguments.quick else 256))
        show_figures("gradings, tests apart from the submission", measured)
        figures |= measured
        share = measured["gradings_many_per_s"] / measured["gradings_few_per_s"]
        bars["gradings_many_beside_few"] = at_least(share, 0.5)
    if arguments.only in (None, "qemu"):
        measured = virtual_figures(arguments.quick, arguments.held)
        figures |= measured
        bars |= virtual_bars(measured) if measured else {}
    finish("machines", figures, bars)


def virtual_figures(quick: bool, held: int) -> dict[str, float]:
    if why := missing():
        print(f"no virtual machines: {why}")
        return {}
    few = {"boots": 1, "restores": 6, "held": 8}
    measured = asyncio.run(measure_virtual(**few if quick else {"boots": 3, "restores": 20, "held": held}))
    show_figures("virtual machines", measured)
    return measured


def namespace_figures(starts: int, bwrap: str | None) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    measured = asyncio.run(run(starts, bwrap))
    by_name = {name: each.figures(name) for name, each in measured.items()}
    show(by_name)
    figures = {key: value for values in by_name.values() for key, value in values.items()}
    bars = {
        "namespaces_p50_ms": at_most(figures["namespaces_p50_ms"], 10.0),
        "namespaces_p99_ms": at_most(figures["namespaces_p99_ms"], 30.0),
        "namespaces_starts_per_s": at_least(figures["namespaces_starts_per_s"], 120.0),
    }
    return figures, bars


def show_figures(title: str, figures: dict[str, float]) -> None:
    table = Table(title=title)
    for column in ("", "value"):
        table.add_column(column)
    for name, value in figures.items():
        table.add_row(name, f"{value:.3g}")
    Console().print(table)


if __name__ == "__main__":
    main()
