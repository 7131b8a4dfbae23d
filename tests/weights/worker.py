"""A process that publishes or copies and is killed, truly, just before its n-th step towards the disk.

python -m tests.weights.worker publish STORE FIRST LAST KILL_AT
python -m tests.weights.worker copy SOURCE TARGET KILL_AT
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollmill.storage.objects import Objects
from rollmill.weights import Mirror, Publisher, WeightStore
from tests.weights.build import history


def die_at(step: int) -> None:
    """Replace the calls that make a write durable or visible by ones that kill this process before the n-th."""
    left = [step]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return call(*args, **kwargs)

        return wrapper

    os.fsync, os.link, os.replace = counted(os.fsync), counted(os.link), counted(os.replace)
    os.unlink, os.mkdir = counted(os.unlink), counted(os.mkdir)


def publish(store: str, first: str, last: str, kill_at: str) -> None:
    versions = history(int(last) + 1)
    publisher = Publisher(WeightStore(Objects.open(Path(store))), "rl", snapshot_every=2)
    publisher.resume()
    die_at(int(kill_at))
    for number in range(int(first), int(last) + 1):
        publisher.publish(number, versions[number])


def copy(source: str, target: str, kill_at: str) -> None:
    mirror = Mirror(Objects.open(source), Objects.open(Path(target)))
    die_at(int(kill_at))
    mirror.copy("rl")


if __name__ == "__main__":
    {"publish": publish, "copy": copy}[sys.argv[1]](*sys.argv[2:])
