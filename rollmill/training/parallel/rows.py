"""Which rows of a tensor a rank holds. All shards are ranges of the first dimension, so of a tensor's memory too."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from rollmill.training.parallel.mesh import Meshes
    from rollmill.training.parallel.world import World


@dataclass(frozen=True)
class Rows:
    """Rows [start, stop) of a tensor of `shape`."""

    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def elements(self) -> tuple[int, int]:
        """The range of elements, in row-major order."""
        row = math.prod(self.shape[1:])
        return self.start * row, self.stop * row


@dataclass(frozen=True)
class Shards:
    """What a sharded decoder knows of the ranks."""

    world: World
    meshes: Meshes
    rows: Mapping[str, Sequence[Rows]]  # name of a parameter → what of it each rank holds

    def own(self, name: str) -> Rows:
        return self.rows[name][self.world.rank]

    def gather_of(self, name: str) -> Callable[[Tensor], Tensor]:
        """What makes a tensor whole that is sharded as this parameter is."""
        from rollmill.training.parallel.exchange import gather_rows

        return functools.partial(gather_rows, counts=[rows.count for rows in self.rows[name]])


@torch.no_grad()
def whole_matrix(name: str, tensor: Tensor, shards: Shards) -> Tensor:
    """A parameter with all rows its codes depend on. Scales are shared by rows of a matrix; stacked experts have their
    own, and each is whole where it is."""
    return tensor if tensor.dim() == 3 else shards.gather_of(name)(tensor)


def own_rows(name: str, whole: Tensor, shards: Shards) -> Tensor:
    """What `whole_matrix` was made from."""
    rows = shards.own(name)
    return whole if whole.dim() == 3 else whole[rows.start : rows.stop]


def shards_of(model: nn.Module) -> Shards | None:
    """None for a model that is whole."""
    return getattr(model, "shards", None)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is on this rank, sharing its memory: all of it, where it is whole."""
    own = getattr(tensor, "to_local", None)
    return tensor if own is None else own()
