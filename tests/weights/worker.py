"""Processes that are killed in the middle of their work.

python -m tests.weights.worker STORE SEED LAST    publishes as fast as it can until fenced (exit 3)

`copy` and `publish` kill their process before its n-th step towards the disk. `killed_at`, `stopped_at` and `run_ranks`
kill or stop children of this process at their n-th call of the object store.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollmill.errors import WeightsError
from rollmill.storage.objects import Objects
from rollmill.weights import Mirror, Publisher, WeightStore
from rollmill.weights.format.tensors import Tensors
from tests.weights.build import history, make_tensors, train_step
from tests.weights.ranks import PipeRank, own_chunks

FENCED = 3


class Mortal:
    """A store's backend that signals this process just before (even) or after (odd) one of its calls."""

    def __init__(self, backend: Any, step: int, number: int = signal.SIGKILL) -> None:
        self._backend, self._left, self._number = backend, step, number
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._backend, name)

        def counted(*args: Any) -> Any:
            self._count()
            result = call(*args)
            self._count()
            return result

        return counted

    def _count(self) -> None:
        with self._lock:
            if self._left == 0:
                os.kill(os.getpid(), self._number)
            self._left -= 1


def mortal(path: Path, step: int, number: int = signal.SIGKILL) -> Objects:
    objects = Objects.open(path)
    return Objects(Mortal(objects._backend, step, number), objects.url)


def in_child(work: Callable[[], None]) -> int:
    """Runs `work` in a child. Returns its process id. It exits with 3 if it is fenced, with 1 for other errors."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except WeightsError as error:
        status = FENCED if "fenced" in error.message else 1
        if status == 1:
            traceback.print_exc()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def killed_at(path: Path, step: int, work: Callable[[Objects], object]) -> bool:
    """Runs `work` in a child on the store at `path`. Returns False if it ended before that call."""
    _, status = os.waitpid(in_child(lambda: (work(mortal(path, step)), None)[1]), 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def stopped_at(path: Path, step: int, work: Callable[[Objects], object]) -> int | None:
    """The same with SIGSTOP. Returns the child's process id, or None if it ended before."""
    child = in_child(lambda: (work(mortal(path, step, signal.SIGSTOP)), None)[1])
    _, status = os.waitpid(child, os.WUNTRACED)
    return child if os.WIFSTOPPED(status) else None


def die_at(step: int) -> None:
    """Replaces the calls that make a write durable or visible: the n-th one kills this process first."""
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


def publish(store: Path, first: int, last: int, kill_at: int) -> None:
    versions = history(last + 1)
    publisher = Publisher(WeightStore(Objects.open(store)), "rl", snapshot_every=2)
    publisher.resume()
    die_at(kill_at)
    for number in range(first, last + 1):
        publisher.publish(number, versions[number])


def copy(source: str, target: Path, kill_at: int) -> None:
    mirror = Mirror(Objects.open(source), Objects.open(target))
    die_at(kill_at)
    mirror.copy("rl")


def race(store: str, seed: str, last: str) -> None:
    """A trainer that continues from the head of the line until another one takes over.

    The last version of the previous writer may appear just after the head was read. Then it starts again, as under a
    supervisor.
    """
    publisher = Publisher(WeightStore(Objects.open(Path(store))), "rl", snapshot_every=4)
    try:
        head = publisher.resume()
        tensors: Tensors = publisher.store.load(head.version) if head else make_tensors()
        while publisher.last is None or publisher.last.number < int(last):
            number = publisher.last.number + 1 if publisher.last else 0
            tensors = train_step(tensors, 1000 * int(seed) + number)
            publisher.publish(number, tensors)
            print(number, flush=True)
    except WeightsError as error:
        if "has diverged" in error.message:
            return race(store, seed, last)
        print(error.message, flush=True)
        sys.exit(FENCED if "fenced" in error.message else 1)


def run_ranks(path: Path, size: int, last: int, killed: int = 0, kill_at: int = -1) -> list[int]:
    """Processes that publish together; one is killed at its n-th call of the store. Returns their exit codes."""
    up, down = ([os.pipe() for _ in range(size)] for _ in range(2))

    def work(me: int) -> None:
        objects = mortal(path, kill_at) if me == killed and kill_at >= 0 else Objects.open(path)
        ranks, versions = PipeRank(me, up, down), history(last + 1)
        publisher = Publisher(WeightStore(objects), "rl", snapshot_every=2, ranks=ranks)
        for number, tensors in enumerate(versions):
            publisher.publish(number, own_chunks(tensors, me, size), metadata={"step": number})

    children = [in_child(lambda me=me: work(me)) for me in range(size)]  # type: ignore[misc]
    for reader, writer in (*up, *down):
        os.close(reader), os.close(writer)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    race(*sys.argv[1:])
