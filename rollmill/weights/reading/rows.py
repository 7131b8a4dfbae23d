"""Rows of tensors, read from the store without the rest: how a rank of many gets what it holds of a version.

Only chunks that have some of the rows are read, as repair.py reads them: each is verified against the chunk table, and
so is every byte that is handed out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from rollmill.types import Version
from rollmill.weights.format.manifest import Chunk, TensorEntry
from rollmill.weights.format.tensors import HostTensor
from rollmill.weights.reading.chunks import Chunks, read_chunks
from rollmill.weights.reading.plan import Source

BATCH_BYTES = 256 << 20  # of chunks that are in memory together, or those of one group

RowRange = tuple[int, int]  # [start, stop) of the leading dimension; a tensor of shape [] has one row


def read_rows(
    source: Source, version: Version, groups: Iterable[Mapping[str, RowRange]]
) -> Iterator[dict[str, HostTensor]]:
    """For each group the rows it names, by tensor. WeightsError or StorageError if they cannot be had."""
    table: dict[str, list[tuple[int, Chunk]]] = {}
    for index, chunk in enumerate(source.manifest(version).chunks):
        table.setdefault(chunk.tensor.name, []).append((index, chunk))
    entries = {entry.name: entry for entry in source.manifest(version).tensors}
    batch: list[dict[str, RowRange]] = []
    wanted: dict[int, Chunk] = {}

    def read() -> Iterator[dict[str, HostTensor]]:
        found = read_chunks(source, version, wanted.keys())
        for group in batch:
            yield {name: _cut(entries[name], rows, table.get(name, []), found) for name, rows in group.items()}

    for group in groups:
        covering = {
            index: chunk for name, rows in group.items() for index, chunk in _covering(entries[name], rows, table)
        }
        if wanted and _bytes(itertools.chain(wanted.values(), covering.values())) > BATCH_BYTES:
            yield from read()
            batch, wanted = [], {}
        batch.append(dict(group))
        wanted |= covering
    yield from read()


def _covering(
    entry: TensorEntry, rows: RowRange, table: Mapping[str, list[tuple[int, Chunk]]]
) -> Iterator[tuple[int, Chunk]]:
    """The chunks that have some of the rows, and their places in the chunk table."""
    start, stop = _bytes_of(entry, rows)
    for index, chunk in table.get(entry.name, []):
        if max(chunk.start, start) < min(chunk.stop, stop):
            yield index, chunk


def _cut(entry: TensorEntry, rows: RowRange, chunks: list[tuple[int, Chunk]], found: Chunks) -> HostTensor:
    """The rows in memory of their own. Chunks are given up as they are used: a tensor is in one group only."""
    start, stop = _bytes_of(entry, rows)
    data = np.empty(stop - start, np.uint8)
    for index, chunk in chunks:
        first, last = max(chunk.start, start), min(chunk.stop, stop)
        if first < last:
            data[first - start : last - start] = found.pop(index)[first - chunk.start : last - chunk.start]
    shape = (rows[1] - rows[0], *entry.shape[1:]) if entry.shape else ()
    return HostTensor(entry.dtype, shape, data)


def _bytes_of(entry: TensorEntry, rows: RowRange) -> tuple[int, int]:
    row = entry.bytes // max(entry.shape[0], 1) if entry.shape else entry.bytes
    return rows[0] * row, rows[1] * row


def _bytes(chunks: Iterable[Chunk]) -> int:
    return sum(map(Chunk.size, chunks))
