"""One chunk of a version, read from the store with as few bytes as possible: how an image heals where memory failed.

Only the payloads that cover the chunk are read, as ranges of their packs. A range has no digest of its own; what comes
out is checked against the chunk table at every leg, and where that fails the whole pack is read, checked, and used.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence, Set

import numpy as np

from rollmill.errors import StorageError, WeightsError
from rollmill.types import Version
from rollmill.weights.format.codings import decode_chunk
from rollmill.weights.format.manifest import Chunk, Payload, chunk_digest, layout_of
from rollmill.weights.reading.plan import Leg, LegFailed, LegId, Source, plan_legs

Chunks = dict[int, np.ndarray]  # by their place in the chunk table


def read_chunk(source: Source, version: Version, index: int) -> np.ndarray:
    """The bytes of a chunk, verified: from the nearest snapshot or anchor along the deltas after it."""
    return read_chunks(source, version, {index})[index]


def read_chunks(source: Source, version: Version, indices: Set[int]) -> Chunks:
    """The bytes of several chunks, verified."""
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
                    raise LegFailed(last, f"{chunk.tensor.name} is said to be unchanged and is not")
            return {index: chunks[index] for index in indices}
        except LegFailed as error:
            failure = error
            avoid |= {error.leg.id}


def _covering(legs: Sequence[Leg], indices: Set[int]) -> list[tuple[Leg, list[Payload]]]:
    """The payloads of each leg that the chunks depend on. One that covers several chunks needs all of them before."""
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
    """Where in the chunk table the chunks are that a payload covers."""
    return range(payload.first, payload.first + payload.chunks)


def _decode(leg: Leg, payloads: Iterable[Payload], before: Chunks, source: Source) -> Chunks:
    after: Chunks = {}
    for payload in payloads:
        pack = leg.encoding.packs[payload.pack]
        try:
            data = source.part(leg.manifest, pack, payload.offset, payload.bytes)
            after.update(decode_run(leg, payload, data, before))
        except (StorageError, WeightsError):  # the whole pack tells whether it is damaged, and may be had elsewhere
            try:
                whole = source.pack(leg.manifest, pack)
            except (StorageError, WeightsError) as error:
                raise LegFailed(leg, error.message) from None
            data = whole[payload.offset : payload.offset + payload.bytes]
            after.update(decode_run(leg, payload, data, before))
    return after


def decode_run(leg: Leg, payload: Payload, data: bytes | memoryview, before: Chunks) -> Chunks:
    """The chunks a payload stands for, each one verified; `before` has those of the base where the coding needs one."""
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
