"""Machines under faults: start, exec, fork, kill, again and again.

    python -m benchmarks.machines_soak [--cycles 2000] [--virtual 40] [--seed 1] [--quick]

A few workers take machines from one pool. In a cycle a machine starts, runs a command, and perhaps forks or is saved
and restored. Faults are injected at random: the process of a machine is killed, a caller is cancelled in the middle, a
machine is closed while its command runs, a command kills everything it can reach, the pool is full, and sometimes the
whole machine host is killed. A result that is there must be right. A failure must be typed: MachineError, or OSError
where the Protocol says so. In the end no process, open file, control group or asyncio task may be left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from benchmarks.machines import missing
from benchmarks.output import at_most, finish
from rollmill.errors import MachineError
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.machine import Machine, MachineHost
from rollmill.machines.namespace.client import NamespaceHost
from rollmill.machines.pool import Pool, PoolConfig
from rollmill.machines.qemu.host import QemuHost

WORKERS = 4
_PR_SET_CHILD_SUBREAPER = 36
_LIMIT_S = 300.0  # of one cycle; a longer one hangs
_FAULTS = {"none": 50, "kill": 15, "cancel": 15, "close": 10, "ruin": 10, "host": 0.4}  # how often, in percent


@dataclass
class Soaked:
    cycles: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # results that are not right, failures that are not typed, hangs
    orphans: int = 0  # processes
    left: list[str] = field(default_factory=list)  # open files, tasks, control groups

    def figures(self, name: str) -> dict[str, float]:
        injected = sum(count for outcome, count in self.outcomes.items() if outcome != "well")
        return {
            f"soak_{name}_cycles": self.cycles,
            f"soak_{name}_faults": injected,
            f"soak_{name}_untyped": len(self.wrong),
            f"soak_{name}_orphans": self.orphans,
            f"soak_{name}_leaks": len(self.left),
            f"soak_{name}_s": self.seconds,
        }

    def bars(self, name: str) -> dict[str, dict[str, Any]]:
        figures = self.figures(name)
        return {key: at_most(figures[key], 0) for key in figures if key.endswith(("untyped", "orphans", "leaks"))}


async def soak(kind: str, cycles: int, seed: int = 1) -> Soaked:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what loses its parent becomes ours, and is found
    await asyncio.to_thread(int)  # its threads are there for the whole time
    files, tasks, result = _open_files(), asyncio.all_tasks(), Soaked()
    host: MachineHost = NamespaceHost() if kind == "namespace" else QemuHost()
    pool = Pool(host, PoolConfig(most=WORKERS + 3, patience_s=30.0, ahead=2, pause_after_s=0.2))
    await (await pool.create(BUILT_IN)).close()  # boots the template
    pool.expect(BUILT_IN, 2)
    numbers, began = iter(range(cycles)), time.monotonic()
    known: set[int] = set()

    async def worker() -> None:
        for number in numbers:
            known.update(_children(os.getpid()))
            await _cycle(pool, host, random.Random(f"{seed} {number}"), result)
            result.cycles += 1

    await asyncio.gather(*(worker() for _ in range(WORKERS)))
    result.seconds = time.monotonic() - began
    await pool.close()
    await _count_what_is_left(result, files, tasks, known)
    return result


async def _cycle(pool: Pool, host: MachineHost, draw: random.Random, result: Soaked) -> None:
    (fault,) = draw.choices(list(_FAULTS), list(_FAULTS.values()))
    made: list[Machine] = []
    steps = [asyncio.Event() for _ in range(3)]
    work = asyncio.create_task(_use(pool, draw, made, steps, ruin=fault == "ruin"))
    breaking = asyncio.create_task(_break(fault, draw, host, made, steps, work))
    try:
        async with asyncio.timeout(_LIMIT_S):
            await asyncio.wait([work])
        outcome = "cancelled" if work.cancelled() else work.result()
    except MachineError as error:
        outcome = type(error).__name__
    except TimeoutError:
        outcome = "hangs"
    except OSError as error:  # a machine that has ended cannot be saved, and has no files. Any cycle may lose its own
        outcome = f"OSError {error.errno}"
    except Exception as error:
        outcome = f"untyped {error!r}"
    breaking.cancel()
    await asyncio.wait([breaking])
    work.cancel()
    await asyncio.wait([work])
    for machine in made:
        with contextlib.suppress(MachineError):
            await machine.close()
    result.outcomes[outcome if len(outcome) < 40 else outcome[:40]] += 1
    if outcome.startswith(("untyped", "hangs", "wrong")):
        result.wrong.append(f"{fault}: {outcome}")


async def _use(pool: Pool, draw: random.Random, made: list[Machine], steps: list[asyncio.Event], *, ruin: bool) -> str:
    """One machine's life, in three steps. Returns how it went: well, ruined, or wrong."""
    word = str(draw.random()).encode()
    steps[0].set()
    machine = await pool.create(BUILT_IN, {"word": word})
    made.append(machine)
    steps[1].set()
    if ruin:
        await machine.exec(["sh", "-c", "kill -9 -1; sleep 0.1; kill -9 1"], timeout_s=60.0)
    result = await machine.exec(["cat", "word"], timeout_s=60.0)
    if result.stopped is not None:
        return f"stopped by {result.stopped}"
    if result.output != word:
        return f"wrong output {result.output[:80]!r}"
    branch = draw.random()
    steps[2].set()
    if branch < 0.3:
        made += (children := await machine.fork(draw.choice([1, 1, 2])))
        read = [await each.read("word") for each in children]
    elif branch < 0.5:
        snapshot = await machine.snapshot()
        made.append(other := await pool.create(BUILT_IN, snapshot=snapshot))
        read = [await other.read("word")]
        await pool.release(snapshot)
    else:
        read = [await machine.read("word")]
    return "well" if set(read) == {word} else f"wrong file {read!r:.80}"


async def _break(
    fault: str, draw: random.Random, host: MachineHost, made: list[Machine], steps: list[asyncio.Event], work: Any
) -> None:
    """Inject a fault at some moment of a machine's life: soon or late after one of its steps began."""
    step, late = draw.choice(steps), 10 ** draw.uniform(-3, 0)
    await step.wait()
    await asyncio.sleep(late * (0.005 if isinstance(host, NamespaceHost) else 1.0))
    if fault == "cancel":
        work.cancel()
    elif fault == "close" and made:
        await made[-1].close()
    elif fault in ("kill", "host"):
        victims = _children(os.getpid())
        if fault == "kill" and isinstance(host, NamespaceHost):
            victims = [each for pid in victims for each in _children(pid)]
        if victims and (fault == "kill" or isinstance(host, NamespaceHost)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(victims), signal.SIGKILL)


async def _count_what_is_left(
    result: Soaked, files: Counter[str], tasks: set[asyncio.Task[Any]], known: set[int]
) -> None:
    """Whatever ended a moment ago has a moment to go."""
    for _ in range(100):
        gc.collect()
        _reap()
        result.orphans = len(_children(os.getpid()))
        groups = await asyncio.to_thread(_groups, known)
        others = [f"task {task!r}" for task in asyncio.all_tasks() - tasks]
        result.left = [*(_open_files() - files).elements(), *others, *groups]
        if not result.orphans and not result.left:
            return
        await asyncio.sleep(0.1)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _children(pid: int) -> list[int]:
    try:
        return [
            int(each)
            for thread in os.listdir(f"/proc/{pid}/task")
            for each in open(f"/proc/{pid}/task/{thread}/children").read().split()
        ]
    except OSError:
        return []


def _open_files() -> Counter[str]:
    """What the open files of this process are. Memory files have the same name again, so they are counted."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            found[link] += not link.startswith(("anon_inode:[event", "/proc/"))
    return found


def _groups(pids: set[int]) -> list[str]:
    """Control groups that machine hosts made."""
    names = {f"rollmill-{pid}" for pid in pids}
    return [folder for folder, below, _ in os.walk("/sys/fs/cgroup") if names & set(below)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=2000, help="of namespace machines")
    parser.add_argument("--virtual", type=int, default=40, help="of virtual machines")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="100 cycles of namespace machines, 4 of virtual ones")
    arguments = parser.parse_args()
    counts = (
        {"namespace": 100, "qemu": 4} if arguments.quick else {"namespace": arguments.cycles, "qemu": arguments.virtual}
    )
    figures, bars = {}, {}
    if counts["qemu"] and (why := missing()):
        print(f"no virtual machines: {why}")
        counts["qemu"] = 0
    for kind, cycles in counts.items():
        if cycles:
            soaked = asyncio.run(soak(kind, cycles, arguments.seed))
            print(kind, dict(soaked.outcomes.most_common()), soaked.wrong[:10], "left:", soaked.left)
            figures |= soaked.figures(kind)
            bars |= soaked.bars(kind)
    finish("machines_soak", figures, bars)


if __name__ == "__main__":
    main()
