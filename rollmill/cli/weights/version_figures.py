"""Figures of versions in words, and how far the reading of one is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from rich.progress import Progress

from rollmill.cli.display import seconds
from rollmill.storage.objects import Objects
from rollmill.weights.format.manifest import Anchor, Encoding, Manifest, Pack
from rollmill.weights.format.tensors import HostTensor
from rollmill.weights.reading.weight_store import WeightStore


def ratio(times: float | None) -> str:
    """How many times less was sent than all of it. None: nothing was sent."""
    if times is None:
        return "unchanged"
    return f"{times:.1f}×" if times < 100 else f"{times:.0f}×"


def region(row: Mapping[str, Any]) -> str:
    """The time until a region served a version; in brackets if it is only stored there; with ~ if clocks disagree."""
    mark = "~" if row["skewed"] else ""
    if row["serving_seconds"] is not None:
        return mark + seconds(row["serving_seconds"])
    return f"({mark}{seconds(row['arrived_seconds'])})" if row["arrived_seconds"] is not None else ""


def coding_bytes(encoding: Encoding) -> dict[str, int]:
    """Bytes by coding, largest first."""
    sizes: Counter[str] = Counter()
    for payload in encoding.payloads:
        sizes[payload.coding] += payload.bytes
    return dict(sizes.most_common())


def coding_mix(encoding: Encoding) -> str:
    """The codings by share of bytes: `sparse`, or `sparse 91% dense 9%`."""
    sizes = coding_bytes(encoding)
    total = max(sum(sizes.values()), 1)
    if len(sizes) < 2:
        return next(iter(sizes), "")
    return " ".join(f"{coding} {count / total:.0%}" for coding, count in sizes.items())


def load(bars: Progress, store: WeightStore, manifest: Manifest) -> dict[str, HostTensor]:
    """The verified weights of a version, with a bar for the bytes read."""
    total = sum(leg.bytes for leg in store.route(manifest.version, manifest.form))
    task = bars.add_task(f"reading {manifest.version}", total=total)
    counted = _CountedStore(store.objects, lambda count: bars.advance(task, count))
    tensors = counted.load(manifest.version, manifest.form)
    bars.update(task, completed=total)
    return tensors


class _CountedStore(WeightStore):
    """Reports every pack it has read."""

    def __init__(self, objects: Objects, advance: Callable[[int], object]) -> None:
        super().__init__(objects)
        self._advance = advance

    def read_pack(self, manifest: Manifest | Anchor, pack: Pack) -> bytes:
        data = super().read_pack(manifest, pack)
        self._advance(len(data))
        return data
