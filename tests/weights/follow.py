"""Follows a line like an engine: an image, parameters that patches are written into, an audit.

python -m tests.weights.follow STORE     prints how much memory following takes
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rollmill.storage.objects import Objects
from rollmill.weights import HostTensor, LineFollower, Update, WeightStore
from rollmill.weights.format.manifest import describe, root_digest
from rollmill.weights.reading import host_weights as image


def die_at(step: int) -> None:
    """Kills this process before the n-th read of a pack, decoding, write into the image, hash or lease."""
    left = [step]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return call(*args, **kwargs)

        return wrapper

    WeightStore.read_pack = counted(WeightStore.read_pack)  # type: ignore[method-assign]
    Objects.put = counted(Objects.put)  # type: ignore[method-assign]
    for name in ("decode_changes", "scatter", "chunk_digest"):
        setattr(image, name, counted(getattr(image, name)))
    Parameters.write = counted(Parameters.write)  # type: ignore[method-assign]


class Parameters:
    """An engine's copy of the weights."""

    def __init__(self) -> None:
        self.tensors: dict[str, HostTensor] = {}

    def apply(self, update: Update) -> None:
        patches = dict.fromkeys(update.tensors) if update.patches is None else update.patches
        for name, listed in patches.items():
            tensor = update.tensors[name]
            if listed is None:
                self.tensors.setdefault(name, HostTensor(tensor.dtype, tensor.shape, np.zeros_like(tensor.data)))
                self.write(name, tensor.data, slice(None))
            for start, indices, values in listed or ():
                self.write(name, values, start + indices.astype(np.int64))

    def write(self, name: str, values: np.ndarray, at: np.ndarray | slice) -> None:
        self.tensors[name].data.view(values.dtype)[at] = values

    def digest(self) -> str:
        return root_digest(describe(self.tensors))


def follow(store: Path) -> list[tuple[int, str]]:
    """Applies one update after the other, up to the head of the line. Returns (number, digest) of each."""
    follower = LineFollower(WeightStore(Objects.open(store)), "rl", holder="engine-1")
    engine, found = Parameters(), []
    while (update := follower.poll()) is not None:
        engine.apply(update)
        found.append((update.policy.number, engine.digest()))
    assert follower.problem is None
    return found


def memory(store: str) -> None:
    follower = LineFollower(WeightStore(Objects.open(store)), "rl")

    def peak() -> int:  # of this program alone, unlike getrusage, which goes on with the parent's
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    before = peak()
    update = follower.poll()
    assert update is not None, follower.problem
    print(update.policy.number, sum(tensor.data.nbytes for tensor in update.tensors.values()), peak() - before)


if __name__ == "__main__":
    memory(sys.argv[1])
