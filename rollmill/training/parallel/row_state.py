"""The tensors of a checkpoint by many ranks: each writes its rows, and any number of ranks can read them.

training/state.py has the layout. Tensors that every rank has alike are written by the first one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rollmill.storage.objects import Objects
from rollmill.training.parallel.sharding import Rows, Sharding
from rollmill.training.state import read_tensors, write_description, write_pieces


def write_state(
    objects: Objects, folder: str, described: Mapping[str, Any], tensors: Mapping[str, Tensor], sharding: Sharding
) -> None:
    """Collective. Durable when this returns; the first rank writes the description last."""
    world = sharding.world
    rows = {name: rows_held(name, tensor, sharding) for name, tensor in tensors.items()}
    own = {name: tensor for name, tensor in tensors.items() if rows[name][world.rank].count}
    prefix = f"state-{world.rank:05d}-of-{world.size:05d}"
    everyone = world.gather(write_pieces(objects, folder, prefix, own))
    if world.first:
        entries = {name: _describe(name, tensor, rows[name], everyone) for name, tensor in tensors.items()}
        write_description(objects, folder, {**described, "tensors": entries})
    world.gather(None)  # nobody goes on before the description is written


def read_state(objects: Objects, folder: str, described: Mapping[str, Any], sharding: Sharding) -> dict[str, Tensor]:
    """The rows of this rank. Not collective: a rank that fails can tell the others."""

    def own(name: str) -> tuple[int, int] | None:
        parameter = _parameter(name)
        if parameter not in sharding.rows:
            return None
        rows = sharding.own(parameter)
        return rows.start, rows.stop

    return read_tensors(objects, folder, described, own)


def rows_held(name: str, tensor: Tensor, sharding: Sharding) -> list[Rows]:
    """Which rows of a tensor of the state each rank writes."""
    parameter = _parameter(name)
    if parameter in sharding.rows:
        return list(sharding.rows[parameter])
    shape = tuple(tensor.shape) or (1,)
    return [Rows(shape, 0, shape[0]), *(Rows(shape, 0, 0) for _ in range(sharding.world.size - 1))]


def _parameter(name: str) -> str:
    return name.partition(".")[2]  # of master.NAME, mean.NAME, square.NAME


def _describe(name: str, tensor: Tensor, rows: list[Rows], everyone: list[dict[str, Any]]) -> dict[str, Any]:
    shape = list(rows[0].shape) if tensor.dim() else []
    pieces = []
    for own, places in zip(rows, everyone, strict=True):
        if own.count:
            offsets, sizes = [own.start, *(0 for _ in shape[1:])], [own.count, *shape[1:]]
            pieces.append({"offsets": offsets[: len(shape)], "sizes": sizes[: len(shape)], **places[name]})
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": shape, "pieces": pieces}
