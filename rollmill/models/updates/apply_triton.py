"""Triton kernels that write changes into parameters and audit parameters, many tensors in one launch.

A table describes a launch: one row per program, with an address and what the program does from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from rollmill.models.updates.bits import bits_of

_SCATTER = 2048  # changes per program
_AUDIT_TILE, _AUDIT_BLOCK = 1 << 15, 1 << 8  # elements per program, and words at once
_WORD = 8  # bytes
_DTYPES = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}
GOLDEN = 0x9E3779B97F4A7C15  # see rollmill.weights.format.chunk_audit
_GOLDEN = tl.constexpr(GOLDEN)
_FIRST_FACTOR, _SECOND_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)


@triton.jit
def scatter(addresses, firsts, counts, index, value, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    elements = tl.load(addresses + row).to(tl.pointer_type(DTYPE))
    change = tl.arange(0, BLOCK)
    there = change < tl.load(counts + row)
    change += tl.load(firsts + row)
    tl.store(elements + tl.load(index + change, there, other=0), tl.load(value + change, there, other=0), there)


@triton.jit
def audit(
    addresses, positions, counts, slots, sums,
    DTYPE: tl.constexpr, LANE_BITS: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_POSITION: tl.constexpr,
):  # fmt: skip
    """A word of DTYPE has LANES elements of LANE_BITS bits. WIDE: float32 elements audited as bfloat16."""
    row = tl.program_id(0)
    words = tl.load(addresses + row).to(tl.pointer_type(DTYPE))
    count = tl.load(counts + row) // LANES
    place = tl.arange(0, BLOCK)
    position = (tl.load(positions + row) + place * LANES).to(tl.uint64) * _GOLDEN
    total = tl.zeros([BLOCK], dtype=tl.uint64)
    for first in range(0, count - BLOCK + 1, BLOCK):
        total += mixed(tl.load(words + first + place), position, LANE_BITS, LANES, WIDE)
        position += BLOCK_POSITION
    first = count // BLOCK * BLOCK
    inside = first + place < count
    rest = mixed(tl.load(words + first + place, inside, other=0), position, LANE_BITS, LANES, WIDE)
    total += tl.where(inside, rest, 0)
    # addition modulo 2^64 gives the same sum in any order
    tl.atomic_add(sums + tl.load(slots + row), tl.sum(total, axis=0).to(tl.int64), sem="relaxed")


@triton.jit
def mixed(word, position, LANE_BITS: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr):
    """The sum over a word's elements. `position` is the first element's position times GOLDEN."""
    total = tl.zeros_like(position)
    for lane in tl.static_range(LANES):
        bits = ((word >> (lane * LANE_BITS)) & ((1 << LANE_BITS) - 1)).to(tl.uint32)
        if WIDE:
            bits = (bits >> 16) | (((bits & 0xFFFF) != 0).to(tl.uint32) << 16)
        key = position + bits
        key = (key ^ (key >> 30)) * _FIRST_FACTOR
        key = (key ^ (key >> 27)) * _SECOND_FACTOR
        total += key ^ (key >> 31)
        position += _GOLDEN
    return total


class ScatterTable(NamedTuple):
    """Changes of one width, and per program: the address that indices count from, its first change, its number of
    changes."""

    addresses: Tensor
    firsts: Tensor
    counts: Tensor
    indices: Tensor  # int32
    values: Tensor  # integers of the parameters' width

    def run(self) -> None:
        if self.addresses.numel():
            dtype = _DTYPES[self.values.element_size()]
            scatter[(self.addresses.numel(),)](*self, DTYPE=dtype, BLOCK=_SCATTER, num_warps=4)

    def rehearse(self) -> None:
        """Compiles the kernel with a launch that writes nothing, so that `run` only has to launch."""
        nothing = torch.zeros_like(self.counts[:1])
        self._replace(addresses=self.addresses[:1], firsts=self.firsts[:1], counts=nothing).run()


def scatter_table(runs: Sequence[tuple[int, int]], indices: Tensor, values: Tensor) -> ScatterTable:
    """The table for `runs` of (address, number of changes). The changes of all runs are stored in order."""
    addresses, lengths = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    run, offset = _cut(lengths, _SCATTER)
    counts = np.minimum(lengths[run] - offset, _SCATTER).astype(np.int32)
    firsts = (np.cumsum(lengths) - lengths)[run] + offset
    row_address, row_first, row_count = (
        torch.from_numpy(row).to(indices.device) for row in (addresses[run], firsts, counts)
    )
    return ScatterTable(row_address, row_first, row_count, indices, values)


class _AuditKind(NamedTuple):
    """The properties that tensors of one launch share."""

    width: int
    wide: bool
    aligned: bool  # addresses and sizes are multiples of a word


class AuditTable(NamedTuple):
    """Per program: the address of its elements, their position, their number, and the sum they go to."""

    kind: _AuditKind
    addresses: Tensor
    positions: Tensor
    counts: Tensor
    slots: Tensor

    def run(self, sums: Tensor) -> None:
        (width, wide, aligned), *rows = self
        dtype, lanes = (tl.uint64, _WORD // width) if aligned else (_DTYPES[width], 1)
        shape = dtype, 8 * width, lanes, wide, _AUDIT_BLOCK, lanes * _AUDIT_BLOCK * GOLDEN % 2**64
        audit[(self.addresses.numel(),)](*rows, sums, *shape, num_warps=4)


class AuditTables(NamedTuple):
    tables: list[AuditTable]
    sums: Tensor  # one per parameter

    def rehearse(self) -> None:
        for table in self.tables:
            nothing = torch.zeros_like(table.counts[:1])
            table._replace(addresses=table.addresses[:1], counts=nothing).run(self.sums)


def audit_tables(tensors: Sequence[tuple[Tensor, torch.dtype]]) -> AuditTables:
    """The tables for parameters of one device, each audited as its form."""
    device = tensors[0][0].device
    kinds: dict[_AuditKind, list[tuple[int, int, int]]] = {}
    for slot, (tensor, form) in enumerate(tensors):
        width, address, size = tensor.element_size(), bits_of(tensor).data_ptr(), tensor.numel()
        wide, whole = tensor.dtype != form, size * width // _WORD * _WORD // width if address % _WORD == 0 else 0
        for aligned, start, end in ((True, 0, whole), (False, whole, size)):
            if start < end:
                kinds.setdefault(_AuditKind(width, wide, aligned), []).append((slot, start, end))
    tables = []
    for kind, runs in kinds.items():
        slots, starts, ends = np.array(runs, dtype=np.int64).T
        addresses = np.array([tensors[slot][0].data_ptr() for slot in slots], dtype=np.int64)
        run, offset = _cut(ends - starts, _AUDIT_TILE)
        positions = starts[run] + offset
        counts = np.minimum(ends[run] - positions, _AUDIT_TILE).astype(np.int32)
        rows = addresses[run] + positions * kind.width, positions, counts, slots[run].astype(np.int32)
        tables.append(AuditTable(kind, *(torch.from_numpy(row).to(device) for row in rows)))
    return AuditTables(tables, torch.zeros(len(tensors), dtype=torch.int64, device=device))


def run_audits(tables: AuditTables) -> list[int]:
    tables.sums.zero_()
    for table in tables.tables:
        table.run(tables.sums)
    return [total % 2**64 for total in tables.sums.tolist()]


def _cut(lengths: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts lengths into parts of at most `step`. Returns, per part, which length it belongs to and its offset."""
    pieces = -(-lengths // step)
    which = np.repeat(np.arange(len(lengths)), pieces)
    return which, (np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * step
