"""How ranks exchange the bytes of a version, so that they publish it together without a gather.

Canonical chunks are fixed ranges of a tensor, and it is fixed which rank holds which part of a chunk. A rank that holds
most of a chunk owns it (ranks that hold equally much take turns). The others send their parts to the owner, and each
rank publishes the chunks it owns (weights/writing/publisher.py). The digest is the one a single process would publish.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import layout_in, to_host
from rollmill.models.kernels.forms import is_quantised
from rollmill.models.quantize import quantises
from rollmill.training.parallel.sharding import Rows, Sharding, local, part_rows, whole_matrix, whole_state
from rollmill.training.parallelism import FormExport
from rollmill.weights.format.manifest import Layout
from rollmill.weights.format.tensors import HostTensor
from rollmill.weights.writing.encoder import ChunkRow, rows_of
from rollmill.weights.writing.publisher import ChunkKey, OwnChunks

PartRows = Mapping[str, Sequence[Rows]]  # name of a tensor of a version → each rank's rows of it
ROUND_BYTES = 256 << 20  # of chunks that are assembled at a time


class HeldBytes(NamedTuple):
    """Bytes [start, stop) of a tensor, which `rank` holds."""

    rank: int
    start: int
    stop: int


class Parcel(NamedTuple):
    """A chunk, the rank that assembles it, and which rank holds which bytes of it."""

    row: ChunkRow
    owner: int
    held: Sequence[HeldBytes]


class ChunkExchange:
    """FormBytes of a sharded decoder: the chunks that this rank publishes, with what other ranks hold of them."""

    def __init__(self, sharding: Sharding, form: str, layout: Layout, rows: PartRows) -> None:
        self._sharding, self._form, self._layout, self._rows = sharding, form, layout, rows
        self._parcels = plan_parcels(layout, rows)
        rank = sharding.world.rank
        self.owned = {(parcel.row.tensor, parcel.row.chunk) for parcel in self._parcels if parcel.owner == rank}

    def export(self, model: Decoder) -> FormExport:
        mine, rank = host_parts(model, self._sharding, self._form), self._sharding.world.rank
        found: dict[ChunkKey, np.ndarray] = {}
        for parcels in _rounds(self._parcels):
            arrived = iter(self._exchange(parcels, mine))
            for parcel in parcels:
                if parcel.owner == rank:
                    found[parcel.row.tensor, parcel.row.chunk] = self._assemble(parcel, mine, arrived)
        return FormExport(mine, OwnChunks(self._layout, found))

    def published(self, exported: FormExport, digest: str) -> None: ...

    def _exchange(self, parcels: Sequence[Parcel], mine: Mapping[str, HostTensor]) -> Iterator[np.ndarray]:
        """Send what others own; what they send, in the order of chunks and ranks."""
        world = self._sharding.world
        away = [(parcel, held) for parcel in parcels for held in parcel.held if held.rank != parcel.owner]
        leaving: list[list[np.ndarray]] = [[] for _ in range(world.size)]
        arriving = [0] * world.size
        for parcel, held in away:
            if held.rank == world.rank:
                leaving[parcel.owner].append(self._own_bytes(parcel, held, mine))
            elif parcel.owner == world.rank:
                arriving[held.rank] += held.stop - held.start
        sent = torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *itertools.chain(*leaving)]))
        arrived = torch.empty(sum(arriving), dtype=torch.uint8)
        if away:
            dist.all_to_all_single(arrived, sent, arriving, [sum(map(len, parts)) for parts in leaving])
        streams, cursors = arrived.numpy(), [0, *itertools.accumulate(arriving)]
        for parcel, held in away:
            if parcel.owner == world.rank:
                start = cursors[held.rank]
                cursors[held.rank] += held.stop - held.start
                yield streams[start : cursors[held.rank]]

    def _assemble(self, parcel: Parcel, mine: Mapping[str, HostTensor], arrived: Iterator[np.ndarray]) -> np.ndarray:
        if len(parcel.held) == 1:
            return self._own_bytes(parcel, parcel.held[0], mine)
        data = np.empty(parcel.row.size, np.uint8)
        for held in parcel.held:
            own = held.rank == parcel.owner
            start, stop = held.start - parcel.row.start, held.stop - parcel.row.start
            data[start:stop] = self._own_bytes(parcel, held, mine) if own else next(arrived)
        return data

    def _own_bytes(self, parcel: Parcel, held: HeldBytes, mine: Mapping[str, HostTensor]) -> np.ndarray:
        name = parcel.row.tensor
        first = self._rows[name][held.rank].elements[0] * parcel.row.width if name in self._rows else 0
        return mine[name].data[held.start - first : held.stop - first]


def exchange_of(model: Decoder, sharding: Sharding, form: str) -> ChunkExchange:
    layout = layout_in(whole_state(model, sharding), form)  # names and shapes of whole tensors
    found = {name: part_rows(name, shape, sharding, form) for name, _, shape in layout}
    return ChunkExchange(sharding, form, layout, {name: rows for name, rows in found.items() if rows is not None})


def plan_parcels(layout: Layout, rows: PartRows) -> list[Parcel]:
    """Every chunk of the layout with its owner. The same on all ranks."""
    parcels: list[Parcel] = []
    for tensor, chunks in itertools.groupby(rows_of(layout), key=lambda row: row.tensor):
        parcels += _parcels_of(list(chunks), rows.get(tensor))
    return parcels


def _parcels_of(chunks: Sequence[ChunkRow], rows: Sequence[Rows] | None) -> Iterator[Parcel]:
    """The chunks of one tensor. Its shards are sorted once: a look at every rank for every chunk would be quadratic."""
    width = chunks[0].width
    # tensors that all ranks hold whole count as the first rank's
    elements = [each.elements for each in rows] if rows is not None else [(0, chunks[-1].stop // width)]
    shards = sorted((start * width, stop * width, rank) for rank, (start, stop) in enumerate(elements) if start < stop)
    starts, stops = [start for start, _, _ in shards], [stop for _, stop, _ in shards]  # they do not overlap
    for row in chunks:
        inside = shards[bisect.bisect_right(stops, row.start) : bisect.bisect_left(starts, row.stop)]
        held = sorted(HeldBytes(rank, max(row.start, start), min(row.stop, stop)) for start, stop, rank in inside)
        most = max(each.stop - each.start for each in held)
        able = [each.rank for each in held if each.stop - each.start == most]
        yield Parcel(row, able[row.place % len(able)], held)


@torch.no_grad()
def host_parts(model: Decoder, sharding: Sharding, form: str) -> dict[str, HostTensor]:
    """This rank's rows of the tensors of a version, in the served form. Collective."""
    found: dict[str, HostTensor] = {}
    for name, tensor in model.state_dict().items():
        own = local(tensor)
        if not (is_quantised(form) and name in sharding.rows and quantises(name, own)):
            found |= to_host({name: own}, form)
            continue
        whole = whole_matrix(name, own, sharding)
        parts = to_host({name: whole if len(whole) else whole.new_zeros(1, *whole.shape[1:])}, form)
        for part, host in parts.items():
            rows = part_rows(part, host.shape, sharding, form)
            first = 0 if rows is None or own.dim() == 3 else rows[sharding.world.rank].start
            found[part] = host if rows is None else _cut(host, first, len(own))
    return found


def _cut(part: HostTensor, first: int, count: int) -> HostTensor:
    """A copy of some rows: a view would keep the whole matrix in memory."""
    row = math.prod(part.shape[1:]) * part.width
    return HostTensor(part.dtype, (count, *part.shape[1:]), part.data[first * row : (first + count) * row].copy())


def _rounds(parcels: Sequence[Parcel]) -> Iterator[list[Parcel]]:
    found: list[Parcel] = []
    room = ROUND_BYTES
    for parcel in parcels:
        if found and parcel.row.size > room:
            yield found
            found, room = [], ROUND_BYTES
        found.append(parcel)
        room -= parcel.row.size
    if found:
        yield found
