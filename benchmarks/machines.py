"""Machines: from start to the first command, with `bwrap` beside them in the same run; then virtual machines.

    python -m benchmarks.machines [--quick] [--starts 400] [--bwrap PATH] [--held 200]
                                  [--only namespaces|forks|qemu|held] [--no-soak]

- p50 and p99 are of the time from `create` to the end of the first command, `true`. One machine at a time; each is
  closed before the next one starts.
- `starts/s` counts create, first command and close, four machines at once.
- CPU is the user and system time per machine: this client, the machine host and its machines, or `bwrap`. Other work on
  the same cores changes it less than the other figures. The kernel frees network namespaces later, in its own threads:
  that is not in it.

`bwrap` is Debian's package bubblewrap. It runs `true` in the same kinds of namespaces (user, mount, pid, net, ipc,
uts), without limits on memory and processes, without a filter of system calls, and without a process that stays for the
next command. Without `bwrap` its row is left out. Both take turns, so that other work on this host meets both.

Forks (machines_forks.py): a namespace machine with 500 MB of files forks: until the fork is there, and until it has run
`true`. Beside it, the same files are copied inside a machine, with `cp -r` and with `tar`.

Virtual machines (machines_qemu.py) have rows of their own, where QEMU is set up. A cold boot counts from the request to
the end of the first command, and includes making the guest's files. Memory of paused machines: each has run a command;
pages that several machines share are divided among them. `ready`: a pool has the machine restored and paused already.

Last comes the soak (machines_soak.py): cycles of start, exec, fork and kill with injected faults.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machines_forks, machines_qemu, machines_soak
from benchmarks.output import at_least, at_most, finish
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.namespace.client import NamespaceHost

PARTS = ("namespaces", "forks", "qemu", "held")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer starts: under a minute")
    parser.add_argument("--starts", type=int, default=400, help="of each kind")
    parser.add_argument("--bwrap", default=shutil.which("bwrap"), help="path of bwrap")
    parser.add_argument("--held", type=int, default=200, help="virtual machines that are held at once, paused")
    parser.add_argument("--no-soak", action="store_true", help="leave the soak out")
    parser.add_argument("--only", choices=PARTS, help="measure this alone; held: paused virtual machines")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    bars: dict[str, dict[str, Any]] = {}
    if arguments.only in (None, "namespaces"):
        figures, bars = namespace_figures(80 if arguments.quick else arguments.starts, arguments.bwrap)
    if arguments.only in (None, "forks"):
        measured = asyncio.run(machines_forks.measure(64 if arguments.quick else 500, 5 if arguments.quick else 20))
        show_figures("forks of files", measured)
        figures |= measured
        bars |= machines_forks.bars(measured)
    if arguments.only in (None, "qemu", "held"):
        measured = virtual_figures(arguments.only == "held", arguments.quick, arguments.held)
        figures |= measured
        bars |= machines_qemu.bars(measured) if measured else {}
    soaks = {} if arguments.no_soak else soak_cycles(arguments.only, arguments.quick)
    for kind, cycles in soaks.items():
        soaked = asyncio.run(machines_soak.soak(kind, cycles))
        show_figures(f"soak, {kind}: {dict(soaked.outcomes.most_common())}", soaked.figures(kind))
        figures |= soaked.figures(kind)
        bars |= soaked.bars(kind)
    finish("machines", figures, bars)


def virtual_figures(only_held: bool, quick: bool, held: int) -> dict[str, float]:
    if why := machines_qemu.missing():
        print(f"no virtual machines: {why}")
        return {}
    if only_held:
        measured = asyncio.run(machines_qemu.measure_held(held))
    else:
        few = {"boots": 1, "restores": 6, "held": 8}
        measured = asyncio.run(machines_qemu.measure(**few if quick else {"boots": 3, "restores": 20, "held": held}))
    show_figures("virtual machines", measured)
    return measured


def soak_cycles(only: str | None, quick: bool) -> dict[str, int]:
    cycles = {"namespace": 60 if quick else 2000}
    if not machines_qemu.missing():
        cycles["qemu"] = 4 if quick else 40
    return {kind: count for kind, count in cycles.items() if only is None or only.startswith(kind)}


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
