"""Reads parts of a version: payloads out of whole packs, single chunks, and rows of tensors.

- `fetch` reads whole packs, checks their digests, and yields their payloads with a bounded number of bytes in memory.
- `read_chunks` reads a few chunks with as few bytes as possible. Host weights use it to repair chunks that went bad in
  memory. Only the payloads that cover a chunk are read, as ranges of their packs. A range has no digest of its own, so
  each decoded chunk is checked against the chunk table; if that fails, the whole pack is read, checked and used.
- `read_rows` reads rows of tensors, for a rank that holds only part of a version. It reads only the chunks that contain
  some of the rows, by `read_chunks`, so every byte it returns has been verified.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from rollmill.errors import StorageError, WeightsError
from rollmill.types import Version
from rollmill.weights.format.codings import decode_chunk
from rollmill.weights.format.manifest import Chunk, Manifest, Pack, Payload, TensorEntry, chunk_digest, layout_of
from rollmill.weights.format.tensors import HostTensor
from rollmill.weights.reading.read_plan import Leg, LegFailed, LegId, Source, plan_legs

IN_FLIGHT_BYTES = 128 << 20  # of packs in memory
BATCH_BYTES = 256 << 20  # of chunks in memory for `read_rows`; one group may need more
_THREADS = 4

Chunks = dict[int, np.ndarray]  # by their place in the chunk table
PayloadBytes = list[tuple[Payload, memoryview]]
PendingPacks = list[tuple[int, Future[bytes]]]
ReadPack = Callable[[Manifest, Pack], bytes]
RowRange = tuple[int, int]  # [start, stop) of the leading dimension; a tensor of shape [] has one row


# --- payloads


def fetch(leg: Leg, payloads: Iterable[Payload], read_pack: ReadPack) -> Iterator[PayloadBytes]:
    """Yield the payloads with their bytes, group by group. If all packs fit into IN_FLIGHT_BYTES there is one group, so
    damage anywhere in the leg is known before anything is decoded. Otherwise the next group is read while the caller
    works on this one. Raises LegFailed for a pack that is missing or damaged."""
    by_pack: dict[int, list[Payload]] = collections.defaultdict(list)
    for payload in payloads:
        by_pack[payload.pack].append(payload)
    packs = leg.encoding.packs
    if any(packs[index].bytes > IN_FLIGHT_BYTES for index in by_pack):
        raise LegFailed(leg, f"a pack of more than {IN_FLIGHT_BYTES} bytes")
    groups = _groups({index: packs[index].bytes for index in by_pack})
    with ThreadPoolExecutor(_THREADS, "weights-fetch") as pool:

        def read(group: list[int]) -> PendingPacks:
            return [(index, pool.submit(read_pack, leg.manifest, packs[index])) for index in group]

        reading = read(groups[0])
        for following in [*groups[1:], []]:
            ready = _finish(leg, reading)
            reading = read(following)
            yield [(p, data[p.offset : p.offset + p.bytes]) for index, data in ready for p in by_pack[index]]
            del ready


def _finish(leg: Leg, reading: PendingPacks) -> list[tuple[int, memoryview]]:
    try:
        return [(index, memoryview(future.result())) for index, future in reading]
    except (StorageError, WeightsError) as error:
        raise LegFailed(leg, error.message) from None


def _groups(sizes: dict[int, int]) -> list[list[int]]:
    """Groups of packs that are in memory together: all if they fit, else groups of half of IN_FLIGHT_BYTES."""
    if sum(sizes.values()) <= IN_FLIGHT_BYTES:
        return [list(sizes)]
    groups: list[list[int]] = [[]]
    size = 0
    for index, pack_bytes in sizes.items():
        if groups[-1] and size + pack_bytes > IN_FLIGHT_BYTES // 2:
            groups.append([])
            size = 0
        groups[-1].append(index)
        size += pack_bytes
    return groups


# --- chunks


def read_chunk(source: Source, version: Version, index: int) -> np.ndarray:
    """The verified bytes of one chunk, read from the nearest snapshot or anchor and the deltas after it."""
    return read_chunks(source, version, {index})[index]


def read_chunks(source: Source, version: Version, indices: Set[int]) -> Chunks:
    """The verified bytes of several chunks."""
    avoid: frozenset[LegId] = frozenset()
    failure: LegFailed | None = None
    while True:
        try:
            legs = plan_legs(source.manifest, source.anchor, version, lambda *_: False, avoid)
        except WeightsError as error:
            raise failure or error from None
        try:
            chunks: Chunks = {}
            for leg, payloads in _covering(legs, indices):
                chunks.update(_decode(leg, payloads, chunks, source))
            last = legs[-1]
            for index in indices:
                chunk = last.manifest.chunks[index]
                if chunk_digest(chunks[index].data) != chunk.digest:
                    raise LegFailed(last, f"{chunk.tensor.name} is marked unchanged but differs")
            return {index: chunks[index] for index in indices}
        except LegFailed as error:
            failure = error
            avoid |= {error.leg.id}


def _covering(legs: Sequence[Leg], indices: Set[int]) -> list[tuple[Leg, list[Payload]]]:
    """The payloads of each leg that the chunks depend on. A payload of several chunks needs the base of all of them."""
    needed = set(indices)
    found = []
    for leg in reversed(legs):
        if layout_of(leg.manifest.tensors) != layout_of(legs[-1].manifest.tensors):
            raise LegFailed(legs[-1], f"{leg.manifest.version} has other tensors")
        payloads = [p for p in leg.encoding.payloads if not needed.isdisjoint(places(p))]
        needed.update(itertools.chain.from_iterable(map(places, payloads)))
        found.append((leg, payloads))
    return found[::-1]


def places(payload: Payload) -> range:
    """The rows of the chunk table that a payload covers."""
    return range(payload.first, payload.first + payload.chunks)


def _decode(leg: Leg, payloads: Iterable[Payload], before: Chunks, source: Source) -> Chunks:
    after: Chunks = {}
    for payload in payloads:
        pack = leg.encoding.packs[payload.pack]
        try:
            data = source.part(leg.manifest, pack, payload.offset, payload.bytes)
            after.update(decode_run(leg, payload, data, before))
        except (StorageError, WeightsError):  # the whole pack can be checked, and may be read from another region
            try:
                whole = source.pack(leg.manifest, pack)
            except (StorageError, WeightsError) as error:
                raise LegFailed(leg, error.message) from None
            data = whole[payload.offset : payload.offset + payload.bytes]
            after.update(decode_run(leg, payload, data, before))
    return after


def decode_run(leg: Leg, payload: Payload, data: bytes | memoryview, before: Chunks) -> Chunks:
    """Decode a payload and verify each of its chunks. `before` holds the base's chunks if the coding needs them."""
    run = leg.manifest.chunks[payload.first : payload.first + payload.chunks]
    size = sum(map(Chunk.size, run))
    base = None if payload.coding == "raw" else join([before[index] for index in places(payload)])
    try:
        decoded = decode_chunk(payload.coding, data, base, size, run[0].tensor.width)
    except WeightsError as error:
        raise LegFailed(leg, f"{run[0].tensor.name}: {error.message}") from None
    after: Chunks = {}
    offset = 0
    for index, chunk in zip(places(payload), run, strict=True):
        after[index] = decoded[offset : offset + chunk.size()]
        offset += chunk.size()
        if chunk_digest(after[index].data) != chunk.digest:
            raise LegFailed(leg, f"{chunk.tensor.name} has another digest")
    return after


def join(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


# --- rows


def read_rows(
    source: Source, version: Version, groups: Iterable[Mapping[str, RowRange]]
) -> Iterator[dict[str, HostTensor]]:
    """Yield for each group the rows it names, by tensor. Raises WeightsError or StorageError if they cannot be read."""
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
            index: chunk for name, rows in group.items() for index, chunk in _chunks_with(entries[name], rows, table)
        }
        if wanted and _total_bytes(itertools.chain(wanted.values(), covering.values())) > BATCH_BYTES:
            yield from read()
            batch, wanted = [], {}
        batch.append(dict(group))
        wanted |= covering
    yield from read()


def _chunks_with(
    entry: TensorEntry, rows: RowRange, table: Mapping[str, list[tuple[int, Chunk]]]
) -> Iterator[tuple[int, Chunk]]:
    """The chunks that contain some of the rows, with their places in the chunk table."""
    start, stop = _byte_range(entry, rows)
    for index, chunk in table.get(entry.name, []):
        if max(chunk.start, start) < min(chunk.stop, stop):
            yield index, chunk


def _cut(entry: TensorEntry, rows: RowRange, chunks: list[tuple[int, Chunk]], found: Chunks) -> HostTensor:
    """Copy the rows out of their chunks. Each chunk is freed once used: a tensor is in one group only."""
    start, stop = _byte_range(entry, rows)
    data = np.empty(stop - start, np.uint8)
    for index, chunk in chunks:
        first, last = max(chunk.start, start), min(chunk.stop, stop)
        if first < last:
            data[first - start : last - start] = found.pop(index)[first - chunk.start : last - chunk.start]
    shape = (rows[1] - rows[0], *entry.shape[1:]) if entry.shape else ()
    return HostTensor(entry.dtype, shape, data)


def _byte_range(entry: TensorEntry, rows: RowRange) -> tuple[int, int]:
    row = entry.bytes // max(entry.shape[0], 1) if entry.shape else entry.bytes
    return rows[0] * row, rows[1] * row


def _total_bytes(chunks: Iterable[Chunk]) -> int:
    return sum(map(Chunk.size, chunks))
