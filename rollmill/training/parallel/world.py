"""Which rank this process is, and how ranks agree.

A rank learns who it is from the variables torchrun sets: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.

A rank that ends closes its connections, and the others stop at once. One that hangs is found by hangs.py.
`hang_minutes` bounds how much later one rank may come to a collective than another, not a step, which has many. What
only the first rank does, and may take long (waiting for groups, importing, indexing), goes through
`from_first_slowly`, which tells the others every now and then to go on waiting.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from rollmill.errors import TrainingError
from rollmill.training.parallel.hangs import watching

_BEATS = 4  # in the patience
_GRACE = 1.5  # torch times out later than hangs.py, which names ranks

T = TypeVar("T")


class World:
    def __init__(self, rank: int, size: int, store: dist.Store, patience: datetime.timedelta) -> None:
        self.rank = rank
        self.size = size
        self._store, self._patience = store, patience
        # of this rank, in the order in which all ranks made them: hangs are looked for in these
        self.groups: list[dist.ProcessGroup] = [dist.group.WORLD] if dist.group.WORLD is not None else []

    @property
    def first(self) -> bool:
        """Whether this rank decides, keeps the ledger and reports."""
        return self.rank == 0

    def from_first(self, value: T) -> T:
        """The first rank's value, on every rank."""
        box: list[Any] = [value if self.first else None]
        dist.broadcast_object_list(box, 0, device=torch.device("cpu"))
        return box[0]

    def from_first_slowly(self, make: Callable[[], T]) -> T:
        """What `make` returns on the first rank, on every rank, however long it takes; or the TrainingError that it
        raises. Nothing in it is collective."""
        while not self.first:
            told: Any = (False, None)
            done, found = self.from_first(told)
            if done:
                return cast(T, _unless_error(found))
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(self._patience.total_seconds() / _BEATS):
                self.from_first((False, None))

        beating = threading.Thread(target=beat, name="beat", daemon=True)
        beating.start()
        try:
            value: T | TrainingError = make()
        except TrainingError as error:
            value = error
        finally:
            ended.set()
            beating.join()
        return _unless_error(self.from_first((True, value))[1])

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a rank that hangs ends all ranks within the patience, and is named (hangs.py)."""
        return watching(self._store, self.rank, self.size, self._patience.total_seconds(), self.groups)

    def all(self, value: bool) -> bool:
        """Whether it is true on every rank."""
        return self.sum([not value])[0] == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value summed over all ranks, in double precision."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order of rank."""
        boxes: list[Any] = [None] * self.size
        dist.all_gather_object(boxes, value)
        return boxes

    def leave(self) -> None:
        dist.destroy_process_group()


def _unless_error(value: T | TrainingError) -> T:
    if isinstance(value, TrainingError):
        raise value
    return value


def join(
    name: str, device: torch.device, environment: Mapping[str, str] = os.environ, hang_minutes: float = 30.0
) -> World:
    """Meet the ranks that the environment describes. Collective.

    `name`: what they meet for. Groups of ranks may meet at the same address one after the other. `hang_minutes`: how
    long a rank waits for the others in a collective.
    """
    size = int(environment["WORLD_SIZE"])
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise TrainingError(
            f"WORLD_SIZE is {size}, but these are not set: {', '.join(missing)}",
            hint="start the ranks with torchrun, or let `rollmill train` start them",
        )
    backend = "gloo"
    if device.type == "cuda":
        place, present = int(environment.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if place >= present:
            raise TrainingError(
                f"local rank {place} has no GPU: this machine has {present}",
                hint="set training.ranks to the number of GPUs",
            )
        torch.cuda.set_device(place)
        backend = "cpu:gloo,cuda:nccl"
    rank = int(environment["RANK"])
    patience = datetime.timedelta(minutes=hang_minutes)
    meeting, _, _ = next(dist.rendezvous("env://", rank, size, timeout=patience))
    store = dist.PrefixStore(name, meeting)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_GRACE * patience)
    return World(rank, size, store, patience)
