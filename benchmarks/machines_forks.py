"""Forks of a namespace machine with many files, and copies of the same files beside them. See machines.py."""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.output import at_most
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.namespace.client import NamespaceConfig, NamespaceHost, NamespaceMachine

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


async def measure(megabytes: int, forks: int) -> dict[str, float]:
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
            took = [await _fork(machine, number) for number in range(forks)]
            forked, ran = zip(*took, strict=True)
            figures |= {"fork_p50_ms": statistics.median(forked), "fork_worst_ms": max(forked)}
            figures["fork_command_p50_ms"] = statistics.median(ran)
    finally:
        await host.close()
    return figures


def bars(figures: dict[str, float]) -> dict[str, dict[str, Any]]:
    return {"fork_p50_ms": at_most(figures["fork_p50_ms"], 25.0)} if "fork_p50_ms" in figures else {}


async def _fork(machine: NamespaceMachine, number: int) -> tuple[float, float]:
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
