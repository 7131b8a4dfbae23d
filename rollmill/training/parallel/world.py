"""Who we are among the ranks, and how they agree. Alone there is no process group, and nothing here costs anything.

Ranks are told who they are as torchrun tells them: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rollmill.errors import TrainingError

# The first rank may wait long for groups to train on while the others wait for it. A rank that dies closes its
# connections, which ends the waiting of the others at once.
PATIENCE = datetime.timedelta(days=30)

T = TypeVar("T")


class World:
    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @property
    def first(self) -> bool:
        """Whether this rank decides, keeps the ledger and reports."""
        return self.rank == 0

    def from_first(self, value: T) -> T:
        """The first rank's value, on every rank."""
        if self.size == 1:
            return value
        box: list[Any] = [value if self.first else None]
        dist.broadcast_object_list(box, 0, device=torch.device("cpu"))
        return box[0]

    def any(self, value: bool) -> bool:
        """Whether it is so on any rank."""
        return self.sum([value])[0] > 0

    def all(self, value: bool) -> bool:
        return not self.any(not value)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each over all ranks, in double precision."""
        if self.size == 1:
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order of rank."""
        if self.size == 1:
            return [value]
        boxes: list[Any] = [None] * self.size
        dist.all_gather_object(boxes, value)
        return boxes

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


ALONE = World()


def join(name: str, device: torch.device, ranks: int, environment: Mapping[str, str] = os.environ) -> World:
    """The world the environment describes, which must be of so many ranks; alone if it describes none.

    `name`: what its ranks come together for. Worlds one after the other may meet at the same address.
    """
    size = int(environment.get("WORLD_SIZE", "1"))
    if size != ranks:
        raise TrainingError(
            f"training.ranks is {ranks}, and the environment describes a world of {size} (WORLD_SIZE)",
            hint="start as many ranks as the configuration says, or unset WORLD_SIZE to have them started",
        )
    if size == 1:
        return ALONE
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise TrainingError(
            f"WORLD_SIZE is {size}, and {', '.join(missing)} not set",
            hint="start the ranks with torchrun, or let `rollmill train` start them",
        )
    backend = "gloo"
    if device.type == "cuda":
        place, present = int(environment.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if place >= present:
            raise TrainingError(
                f"local rank {place} has no GPU: this machine has {present}", hint="training.ranks is one a GPU"
            )
        torch.cuda.set_device(place)
        backend = "cpu:gloo,cuda:nccl"
    rank = int(environment["RANK"])
    meeting, _, _ = next(dist.rendezvous("env://", rank, size, timeout=PATIENCE))
    store = dist.PrefixStore(name, meeting)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    return World(rank, size)
