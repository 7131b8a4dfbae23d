"""The memory of publishing and following: the peak resident size of each role in its own process.

    python -m benchmarks.weights_memory publisher|follower|lent MEBIBYTES STORE RECORDING

Called by `benchmarks.weights`. A process first runs the same with a tiny model, so that imports and compiled code are
not counted. It then reports how far its peak rose.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.recordings import Recording
from benchmarks.weights_synthetic import Law, draw_weights, update
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights.format.tensors import HostTensor, Tensors
from rollmill.weights.reading.line_follower import Follower
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.regions.mirror import Mirror
from rollmill.weights.writing.publisher import Publisher

LINE, OTHER_LINE = "main", "other"
VERSIONS = 3  # a snapshot and two deltas
ALLOWANCE = 256 << 20  # for a publisher's packs and payloads in flight, beside its copy of the weights


def measure(mebibytes: int, recording: Recording, folder: Path) -> dict[str, float]:
    """By role: how many bytes the peak rose. `model`: the bytes of the weights."""
    figures: dict[str, float] = {}
    for role in ("publisher", "follower", "lent"):
        command = [sys.executable, "-m", "benchmarks.weights_memory", role, str(mebibytes)]
        done = subprocess.run(
            [*command, str(folder), str(recording.folder)], check=True, stdout=subprocess.PIPE, text=True
        )
        figures |= json.loads(done.stdout.splitlines()[-1])
    return figures


def peak_rise(call: Callable[[], None]) -> int:
    """How many bytes the peak resident size rises above the current size."""
    if not _reset_peak():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        call()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _publish(objects: Objects, tensors: Tensors, step: Callable[[int], None]) -> None:
    """Publishes two lines, the second from the end of the first, with one publisher at a time."""
    for line in (LINE, OTHER_LINE):
        publisher = Publisher(WeightStore(objects), line)
        for number in range(VERSIONS):
            if number:
                step(number)
            publisher.publish(number, tensors, Version(LINE, VERSIONS - 1) if line != LINE and number == 0 else None)
        del publisher


def _follow(source: Objects, *, lent: bool) -> None:
    """Follows version by version, like an engine that keeps up in a region with a mirror; if lent, two lines."""
    with tempfile.TemporaryDirectory() as folder:
        mirror = Mirror(source, Objects.open(folder))
        follower = Follower(mirror.target, LINE)
        for line in (LINE, OTHER_LINE) if lent else (LINE,):
            if line != LINE:
                follower.lend(line)
            for number in range(VERSIONS):
                mirror.copy(line, number=number)
                update = follower.poll()
                assert update is not None and update.policy.number == number, follower.problem


def _tiny() -> dict[str, HostTensor]:
    """One tensor large enough for compiled code, and a smaller one."""
    random = np.random.default_rng(0)
    return {
        name: HostTensor("bf16", (rows, 1024), random.integers(0, 1 << 16, rows * 1024, np.uint16).view(np.uint8))
        for name, rows in (("large", 2048), ("small", 64))
    }


def _nudge(tensors: dict[str, HostTensor], number: int) -> None:
    for tensor in tensors.values():
        tensor.data.view(np.uint16)[number::97] ^= 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=("publisher", "follower", "lent"))
    parser.add_argument("mebibytes", type=int)
    parser.add_argument("store", type=Path)
    parser.add_argument("recording", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tiny = _tiny()
        _publish(Objects.open(folder), tiny, lambda number: _nudge(tiny, number))
        _follow(Objects.open(folder), lent=arguments.role == "lent")
    objects = Objects.open(arguments.store)
    if arguments.role == "publisher":
        tensors, law = draw_weights(arguments.mebibytes), Law.of(Recording(arguments.recording))
        update(tensors, law, seed=0)
        rise = peak_rise(lambda: _publish(objects, tensors, lambda number: _step(tensors, law, number)))
        figures = {"publisher": rise, "model": sum(tensor.data.nbytes for tensor in tensors.values())}
    else:
        figures = {arguments.role: peak_rise(lambda: _follow(objects, lent=arguments.role == "lent"))}
    print(json.dumps(figures), flush=True)
    os._exit(0)  # exit at once, without freeing gigabytes in order


def _step(tensors: dict[str, HostTensor], law: Law, number: int) -> None:
    update(tensors, law, seed=number)


if __name__ == "__main__":
    main()
