"""Which rows of a tensor a rank holds. A shard is a range of the first dimension, so also a range of memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rollmill.models.host_tensors import round_to_form_
from rollmill.models.quantize import POWER, owner, quantises
from rollmill.training.parallel.collectives import gather_rows
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
class Sharding:
    """Which rows of each parameter are on which rank."""

    world: World
    meshes: Meshes
    rows: Mapping[str, Sequence[Rows]]  # name of a parameter → each rank's rows

    def own(self, name: str) -> Rows:
        return self.rows[name][self.world.rank]

    def gather_of(self, name: str) -> Callable[[Tensor], Tensor]:
        """Gathers a tensor that is sharded like this parameter."""
        return functools.partial(gather_rows, counts=[rows.count for rows in self.rows[name]])


def whole_state(model: nn.Module, sharding: Sharding) -> dict[str, Tensor]:
    """The tensors of a version with the shapes that a single process has, without memory."""
    return {
        name: torch.empty(sharding.rows[name][0].shape if name in sharding.rows else tensor.shape, device="meta")
        for name, tensor in model.state_dict().items()
    }


@torch.no_grad()
def whole_matrix(name: str, tensor: Tensor, sharding: Sharding) -> Tensor:
    """A parameter with all rows that its codes depend on. Rows of a matrix share scales, so it is gathered; stacked
    experts have their own scales, and each expert is whole on its rank. Collective."""
    return tensor if tensor.dim() == 3 else sharding.gather_of(name)(tensor)


def own_rows(name: str, whole: Tensor, sharding: Sharding) -> Tensor:
    """This rank's rows of a result of `whole_matrix`."""
    rows = sharding.own(name)
    return whole if whole.dim() == 3 else whole[rows.start : rows.stop]


def part_rows(name: str, shape: tuple[int, ...], sharding: Sharding, form: str) -> Sequence[Rows] | None:
    """Which rows of a tensor of a version each rank holds, given its shape in `form`: the rows of its parameter.
    None if every rank holds all of it."""
    rows = sharding.rows.get(owner(name))
    if rows is None:
        return None
    # codes have the parameter's rows, and so have all tensors of stacked experts; other scales may cover several rows
    if name != owner(name) and len(rows[0].shape) == 2 and (form == "fp8" or name.endswith(POWER)):
        return None
    return [Rows((each.shape[0], *shape[1:]), each.start, each.stop) for each in rows]


@torch.no_grad()
def rounded(name: str, tensor: Tensor, form: str, sharding: Sharding) -> Tensor:
    """The rows of a parameter as a quantised form serves them, in their own type. Collective."""
    gathers = quantises(name, tensor)
    found = (whole_matrix(name, tensor, sharding) if gathers else tensor).clone()
    if found.numel():
        round_to_form_([(name, found)], form)
    return own_rows(name, found, sharding) if gathers else found


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is on this rank, sharing its memory. A plain tensor (a buffer) is all here."""
    from torch.distributed.tensor import DTensor  # seconds, which only ranks that shard should wait for

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
