"""Payloads of a leg, out of packs that are whole and checked, with a bounded number of bytes in memory."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from rollmill.errors import StorageError, WeightsError
from rollmill.weights.format.manifest import Manifest, Pack, Payload
from rollmill.weights.reading.plan import Leg, LegFailed

IN_FLIGHT_BYTES = 128 << 20
_THREADS = 4

Fetched = list[tuple[Payload, memoryview]]
Reading = list[tuple[int, Future[bytes]]]
ReadPack = Callable[[Manifest, Pack], bytes]


def fetch(leg: Leg, payloads: Iterable[Payload], read_pack: ReadPack) -> Iterator[Fetched]:
    """The payloads with their bytes, group by group. Where all of them fit into what may be in flight there is only one
    group: damage anywhere in the leg is then known before any of it is decoded. Otherwise the next group is read while
    the caller works on this one. LegFailed for a pack that is missing or damaged."""
    by_pack: dict[int, list[Payload]] = collections.defaultdict(list)
    for payload in payloads:
        by_pack[payload.pack].append(payload)
    packs = leg.encoding.packs
    if any(packs[index].bytes > IN_FLIGHT_BYTES for index in by_pack):
        raise LegFailed(leg, f"a pack of more than {IN_FLIGHT_BYTES} bytes")
    groups = _groups({index: packs[index].bytes for index in by_pack})
    with ThreadPoolExecutor(_THREADS, "weights-fetch") as pool:

        def read(group: list[int]) -> Reading:
            return [(index, pool.submit(read_pack, leg.manifest, packs[index])) for index in group]

        reading = read(groups[0])
        for following in [*groups[1:], []]:
            ready = _finish(leg, reading)
            reading = read(following)
            yield [(p, data[p.offset : p.offset + p.bytes]) for index, data in ready for p in by_pack[index]]
            del ready


def _finish(leg: Leg, reading: Reading) -> list[tuple[int, memoryview]]:
    try:
        return [(index, memoryview(future.result())) for index, future in reading]
    except (StorageError, WeightsError) as error:
        raise LegFailed(leg, error.message) from None


def _groups(sizes: dict[int, int]) -> list[list[int]]:
    """Packs that are in memory together: all of them if they fit, else groups of half of what does."""
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
