"""Which rank this process is, and how ranks agree.

A rank learns who it is from the variables torchrun sets: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rollmill.errors import TrainingError

# The first rank may wait long for groups to train on, and the others wait for it. If a rank dies, its connections close
# and the others stop waiting at once.
PATIENCE = datetime.timedelta(days=30)

T = TypeVar("T")


class World:
    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @property
    def first(self) -> bool:
        """Whether this rank decides, keeps the ledger and reports."""
        return self.rank == 0

    def from_first(self, value: T) -> T:
        """The first rank's value, on every rank."""
        box: list[Any] = [value if self.first else None]
        dist.broadcast_object_list(box, 0, device=torch.device("cpu"))
        return box[0]

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


def join(name: str, device: torch.device, environment: Mapping[str, str] = os.environ) -> World:
    """Meet the ranks that the environment describes. Collective.

    `name`: what they meet for. Groups of ranks may meet at the same address one after the other.
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
    meeting, _, _ = next(dist.rendezvous("env://", rank, size, timeout=PATIENCE))
    store = dist.PrefixStore(name, meeting)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    return World(rank, size)
