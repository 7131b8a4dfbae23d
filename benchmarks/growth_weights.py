"""The laws of benchmarks/growth.py about weights, ranks and engines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from rollmill.inference.engine_sections import EnginesSection, engine_specs
from rollmill.storage.objects import Objects
from rollmill.training.parallel.row_layout import Rows
from rollmill.training.parallel.shard_publisher import plan_parcels
from rollmill.training.parallel.token_split import split
from rollmill.weights.format.codings import encode_full
from rollmill.weights.format.manifest import (
    Base,
    Encoding,
    Manifest,
    Pack,
    Payload,
    chunk_digest,
    digest_bytes,
    parse_manifest,
    root_digest,
)
from rollmill.weights.format.tensors import HostTensor
from rollmill.weights.reading.host_weights import Image
from rollmill.weights.reading.patches import Patches
from rollmill.weights.reading.read_plan import Leg, Source
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.regions.collection import collect
from rollmill.weights.writing.encoder import entries_of
from rollmill.weights.writing.publisher import Publisher


def seconds(call: Callable[[], object], times: int = 3) -> float:
    found = []
    for _ in range(times):
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return min(found)


class Requests:
    """A store's backend that counts the requests it gets."""

    def __init__(self, objects: Objects) -> None:
        self._behind, self.count = objects._backend, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._behind, name)

        def counted(*arguments: Any, **settings: Any) -> Any:
            self.count[name] += 1
            return call(*arguments, **settings)

        return counted


def version_of(number: int, count: int, base: Manifest | None) -> tuple[Manifest, dict[str, bytes]]:
    """A version of `count` tensors of one chunk, each in a pack of its own, and the packs by their digest."""
    layout = tuple((f"t{place:07d}", "bf16", (8,)) for place in range(count))
    data = [np.array([number, place & 0xFFFF, place >> 16, 0] * 2, np.uint16).view(np.uint8) for place in range(count)]
    entries = entries_of(layout, [chunk_digest(each.data) for each in data])
    coded = [encode_full(each, 2) for each in data]
    encoding = Encoding(
        base=Base(number=base.number, digest=base.digest) if base else None,
        packs=tuple(Pack(digest=digest_bytes(each), bytes=len(each)) for each in coded),
        payloads=tuple(
            Payload(first=place, chunks=1, pack=place, offset=0, bytes=len(each), coding="raw")
            for place, each in enumerate(coded)
        ),
        changed_elements=8 * count,
    )
    kind: Any = {"delta" if base else "snapshot": encoding}
    manifest = Manifest(
        line="rl",
        number=number,
        form="bf16",
        first=0,
        writer="w",
        created_at=0.0,
        digest=root_digest(entries),
        tensors=entries,
        **kind,
    )
    return manifest, {digest_bytes(each): each for each in coded}


def shards_of(rows: int, ranks: int) -> list[Rows]:
    share = -(-rows // ranks)
    return [Rows((rows, 1 << 20), min(r * share, rows), min((r + 1) * share, rows)) for r in range(ranks)]


def split_batch(ranks: int) -> float:
    """A micro-batch of 256 tokens per rank."""
    lengths, rows_M = [64] * (4 * ranks), np.arange(0, 256 * ranks, 4)
    return seconds(lambda: split(lengths, rows_M, ranks, 1))


def plan(ranks: int) -> float:
    """Of 64 chunks per rank."""
    layout, rows = (("a.weight", "bf16", (64 * ranks, 1 << 20)),), {"a.weight": shards_of(64 * ranks, ranks)}
    return seconds(lambda: plan_parcels(layout, rows), 1)


def name_engines(count: int) -> float:
    share = {"kind": "embedded", "count": count // 4}
    tables = [EnginesSection.model_validate({**share, "region": region}) for region in ("a", "b", "c", "d")]
    return seconds(lambda: engine_specs(tables))


def take_packs(count: int) -> float:
    """A delta of `count` packs and chunks, pack by pack, as a region gets it."""
    base, packs = version_of(0, count, None)
    after, more = version_of(1, count, base)
    read, manifests = {**packs, **more}, {base.version: base, after.version: after}
    source = Source(manifests.__getitem__, lambda _: None, lambda _, pack: read[pack.digest], lambda *_: b"")
    image, leg, patches = Image(base.tensors), Leg(after, "delta"), Patches()
    image.take(Leg(base, "snapshot"), source)

    def begin() -> None:
        for pack in leg.encoding.packs:
            image.begin(leg, pack, memoryview(read[pack.digest]), source, patches)

    return seconds(begin, 1)


def read_manifest(count: int) -> float:
    manifest, _ = version_of(0, count, None)
    data = manifest.to_bytes()
    return seconds(lambda: parse_manifest(data, manifest.version, "bf16"), 1)


def collect_requests(count: int) -> float:
    """Requests of a collection when there are `count` packs that a dead attempt left."""
    requests = Requests(Objects.open("memory://"))
    objects = Objects(requests, "memory://")
    publisher = Publisher(WeightStore(objects), "rl")
    tensors = {"w": HostTensor("bf16", (64,), np.zeros(128, np.uint8))}
    for number in range(3):
        tensors["w"].data[number] ^= 1
        publisher.publish(number, tensors)
    for number in range(count):
        objects.put(f"weights/rl/bf16/packs/{number % 3:010d}-{number:064x}", b"x")
    requests.count.clear()
    collect(WeightStore(objects), "rl", keep=1, dry_run=True)
    return float(sum(requests.count.values()))


# name, what is counted, unit, sizes, cost, the largest slope: linear laws may have a logarithm, and caches fill
LAWS = [
    ("split", "ranks", "s", (100, 1_000, 10_000), split_batch, 1.3),
    ("plan_parcels", "ranks", "s", (10, 100, 1_000), plan, 1.3),
    ("engine_specs", "engines", "s", (1_000, 10_000, 100_000, 1_000_000), name_engines, 1.3),
    ("take_packs", "packs", "s", (100, 1_000, 10_000), take_packs, 1.3),
    ("read_manifest", "chunks", "s", (1_000, 10_000, 100_000), read_manifest, 1.3),
    ("collect", "objects", "requests", (1_000, 10_000, 100_000), collect_requests, 0.05),
]
