"""How a rank gets its rows of some weights. No process ever holds them whole.

    stored_rows    a version in the store      reads the chunks that have some of its rows, a few at a time
    drawn_rows     random weights of a seed    draws all values, some at a time, and keeps its rows
    (a mapping)    a version kept in memory    the rows that this rank published

Each gives tensors by name, this rank's rows only, some parameters at a time; `fill_rows` copies them into the model. No
rank waits for another here, so a rank that fails can tell the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from rollmill.models import quantize
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder, initial_values
from rollmill.training.parallel.sharding import Sharding, local, part_rows, whole_state
from rollmill.types import Version
from rollmill.weights.format.manifest import TensorEntry
from rollmill.weights.format.tensors import HostTensor, Tensors
from rollmill.weights.reading.chunks import RowRange, read_rows
from rollmill.weights.reading.weight_store import WeightStore


@torch.no_grad()
def fill_rows(model: Decoder, sharding: Sharding, batches: Iterable[Tensors]) -> None:
    """Copy rows into a sharded model. A batch has all parts of each of its parameters."""
    state = model.state_dict()
    for batch in batches:
        for name in dict.fromkeys(map(quantize.owner, batch)):
            held = local(state[name])
            if held.numel():
                parts = {part: batch[part] for part in quantize.part_names(name) if part in batch}
                placed = {part: quantize.place(parts[part], held.device) for part in parts}
                first = sharding.own(name).start if name in sharding.rows else 0
                held.copy_(quantize.dequantise_rows(name, placed, first))


def stored_rows(
    model: Decoder, sharding: Sharding, store: WeightStore, version: Version, form: str
) -> Iterator[Tensors]:
    """This rank's rows of a version. Raises WeightsError before anything is read if it is of another model."""
    entries = {entry.name: entry for entry in store.manifest(version, form).tensors}
    quantize.check_layout(whole_state(model, sharding), entries)
    groups: dict[str, dict[str, RowRange]] = {}
    for entry in entries.values():
        groups.setdefault(quantize.owner(entry.name), {})[entry.name] = _own(entry, sharding, form)
    return read_rows(store.source(form), version, groups.values())


def _own(entry: TensorEntry, sharding: Sharding, form: str) -> RowRange:
    rows = part_rows(entry.name, entry.shape, sharding, form)
    if rows is None:
        return 0, entry.shape[0] if entry.shape else 1
    own = rows[sharding.world.rank]
    return own.start, own.stop


def drawn_rows(config: ModelConfig, sharding: Sharding, seed: int) -> Iterator[Tensors]:
    """This rank's rows of the random weights that `Decoder.initialise` gives."""
    shapes = {name: rows[0].shape for name, rows in sharding.rows.items()}
    pieces = initial_values(shapes, config.layers, seed)
    for name, drawn in itertools.groupby(pieces, key=lambda piece: piece[0]):
        rows = sharding.own(name)
        start, stop = rows.elements
        kept = np.empty(stop - start, np.float32)
        for _, first, values in drawn:
            lower, upper = max(first, start), min(first + len(values), stop)
            if lower < upper:
                kept[lower - start : upper - start] = values[lower - first : upper - first].numpy()
        yield {name: HostTensor("fp32", (rows.count, *rows.shape[1:]), kept.view(np.uint8))}
