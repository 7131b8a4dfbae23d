"""A follower as a separate process: its memory, and kill -9 at every step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import HostTensor, Publisher, WeightStore
from rollmill.weights.reading.leases import Leases
from tests.weights.build import history
from tests.weights.follow import die_at, follow
from tests.weights.worker import in_child


def killed_following(store: Path, step: int) -> int:
    """Follows in a child that is killed, with SIGKILL, before its n-th step. Returns its exit code."""

    def work() -> None:
        die_at(step)
        follow(store)

    return os.waitstatus_to_exitcode(os.waitpid(in_child(work), 0)[1])


def trained(tensors: dict[str, HostTensor], number: int) -> dict[str, HostTensor]:
    """Moves one element in a hundred by one unit in the last place."""
    for tensor in tensors.values():
        tensor.data.view(np.uint16)[number::100] += 1
    return tensors


@pytest.mark.slow
def test_following_takes_one_image_and_a_bounded_amount_beside_it(tmp_path: Path) -> None:
    """A snapshot of 256 MiB, and deltas after it."""
    random = np.random.default_rng(0)
    block = (0x3C00 + random.integers(0, 512, 1 << 20)).astype(np.uint16)
    tensors = {
        f"layers.{n}.weight": HostTensor("bf16", (8192, 8192 // 4), np.tile(block, 16).view(np.uint8)) for n in range(8)
    }
    publisher = Publisher(WeightStore(Objects.open(tmp_path)), "rl", snapshot_every=100)
    for number in range(3):
        publisher.publish(number, trained(tensors, number) if number else tensors)
    command = [sys.executable, "-m", "tests.weights.follow", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    number, image, peak = map(int, done.stdout.split())
    assert (number, image) == (2, 256 << 20)
    assert image <= peak <= image + (512 << 20)


# from nothing: the snapshot's pack, its hashes, the delta's pack, decoding, writing, hashing, the lease, parameters
@pytest.mark.parametrize("step", [0, 1, 4, 7, 8, 9, 10, 12, 14, 16, 18, 20])
def test_a_follower_killed_at_any_step_converges_when_it_is_started_again(tmp_path: Path, step: int) -> None:
    versions = history(3)
    store = WeightStore(Objects.open(tmp_path))
    publisher = Publisher(store, "rl")
    for number, tensors in enumerate(versions):
        publisher.publish(number, tensors)
    assert killed_following(tmp_path, step) == -signal.SIGKILL
    assert follow(tmp_path) == [(2, store.manifest(Version("rl", 2)).digest)]
    assert all(ok for _, ok, _ in store.verify("rl")), "a reader's death does not change the store"
    assert [lease.number for lease in Leases(store.objects, "rl").held()] == [2]
