"""From objects to verified weights in memory: choose the cheapest legs, decode them, check every digest.

A leg is one version's snapshot, or its delta on top of its base. What is held in memory is only ever replaced by
something whose chunks all have the digests of the manifest: a failure at any point leaves it as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rollmill.errors import StorageError, WeightsError
from rollmill.types import Version
from rollmill.weights.delta import decode_chunk
from rollmill.weights.manifest import Chunk, Kind, Manifest, Pack, Payload, TensorEntry, digest_bytes, layout_of
from rollmill.weights.tensors import HostTensor

ReadManifest = Callable[[Version], Manifest]
Have = Callable[[Version, str], bool]  # whether that version, with that root digest, is already at hand
ReadPack = Callable[[Manifest, Pack], bytes]  # the pack's bytes, digest checked


@dataclass(frozen=True)
class Held:
    """Weights in memory, all of them verified against this manifest's table."""

    manifest: Manifest
    tensors: dict[str, HostTensor]


class Leg(NamedTuple):
    manifest: Manifest
    kind: Kind

    @property
    def id(self) -> tuple[int, Kind]:
        return self.manifest.number, self.kind

    @property
    def bytes(self) -> int:
        return self.manifest.encoding(self.kind).bytes


class LegFailed(WeightsError):
    """This leg does not lead to the version it names. `base_suspect`: the fault may lie in what it started from."""

    def __init__(self, leg: Leg, why: str, *, base_suspect: bool = False) -> None:
        super().__init__(f"the {leg.kind} of {leg.manifest.version} ({leg.manifest.form}) is unusable: {why}")
        self.leg = leg
        self.base_suspect = base_suspect


def plan_legs(
    read_manifest: ReadManifest, target: Version, have: Have, avoid: frozenset[tuple[int, Kind]] = frozenset()
) -> list[Leg]:
    """The legs with the fewest bytes that lead to `target` from a version that `have` recognises, or from nothing.

    Walks back from the target along its deltas; every snapshot on the way is a place to start from.
    """
    manifest = read_manifest(target)
    best: list[Leg] | None = [] if have(manifest.version, manifest.digest) else None
    chain: list[Leg] = []
    while best is None or _bytes(chain) < _bytes(best):
        snapshot, delta = Leg(manifest, "snapshot"), Leg(manifest, "delta")
        if (
            manifest.snapshot
            and snapshot.id not in avoid
            and (best is None or _bytes([snapshot, *chain]) < _bytes(best))
        ):
            best = [snapshot, *chain]
        if manifest.delta is None or delta.id in avoid:
            break
        chain = [delta, *chain]
        base = manifest.delta.base
        assert base is not None
        if have(Version(target.line, base.number), base.digest):
            best = chain if best is None or _bytes(chain) <= _bytes(best) else best
            break
        try:
            manifest = read_manifest(Version(target.line, base.number))
        except (StorageError, WeightsError):
            break  # nothing before this version can be read; what was found so far is all there is
        if manifest.digest != base.digest:
            break
    if best is None:
        raise WeightsError(
            f"no readable chain of snapshots and deltas leads to {target}",
            hint="`rollmill weights verify` names the damaged objects; the next snapshot of the line heals it",
        )
    return best


def _bytes(legs: list[Leg]) -> int:
    return sum(leg.bytes for leg in legs)


def restore(read_manifest: ReadManifest, read_pack: ReadPack, target: Version, held: Held | None = None) -> Held:
    """Weights of `target`, verified. The cheapest legs first; then around each one that turns out to be damaged."""
    avoid: frozenset[tuple[int, Kind]] = frozenset()
    failure: LegFailed | None = None
    while True:
        try:
            legs = plan_legs(read_manifest, target, _recognise(held), avoid)
        except WeightsError as error:
            raise failure or error from None
        reached = held
        try:
            for leg in legs:
                reached = take_leg(leg, read_pack, reached)
            assert reached is not None, "a plan from nothing starts with a snapshot"
            # no leg at all: the same bytes under another name
            return reached if legs else Held(read_manifest(target), reached.tensors)
        except LegFailed as error:
            failure = error
            if error.base_suspect and held is not None:
                held = None  # perhaps our memory is wrong and not the object: begin again from a snapshot
            else:
                avoid |= {error.leg.id}


def _recognise(held: Held | None) -> Have:
    """By the root digest alone: the same bytes may have another version's name."""
    return lambda _, digest: held is not None and held.manifest.digest == digest


def take_leg(leg: Leg, read_pack: ReadPack, held: Held | None) -> Held:
    """Decode one leg next to what is held, which stays untouched."""
    base = leg.manifest.encoding(leg.kind).base
    if base is None:
        held = None
    elif held is None or held.manifest.digest != base.digest:
        raise LegFailed(leg, f"its base, version {base.number}, is not what is held")
    elif layout_of(held.manifest.tensors) != layout_of(leg.manifest.tensors):
        raise LegFailed(leg, "its base has other tensors")
    fresh = _decode_runs(leg, read_pack, held)
    tensors: dict[str, HostTensor] = {}
    first = 0
    for entry in leg.manifest.tensors:
        tensors[entry.name] = _assemble(entry, fresh, first, held.tensors[entry.name] if held else None)
        first += len(entry.chunks)
    return Held(leg.manifest, tensors)


def _decode_runs(leg: Leg, read_pack: ReadPack, held: Held | None) -> dict[int, np.ndarray]:
    """The verified bytes of each chunk that has a payload, by its place in the chunk table."""
    chunks = leg.manifest.chunks
    fresh: dict[int, np.ndarray] = {}
    for payload, data in _payloads(leg, read_pack):
        run = chunks[payload.first : payload.first + payload.chunks]
        base = _join([held.tensors[c.tensor.name].data[c.start : c.stop] for c in run]) if held else None
        try:
            decoded = decode_chunk(payload.coding, data, base, sum(map(Chunk.size, run)), run[0].tensor.width)
        except WeightsError as error:
            raise LegFailed(leg, f"{run[0].tensor.name}: {error.message}") from None
        decoded.flags.writeable = False  # engines share these arrays with the follower that verified them
        offset = 0
        for index, chunk in enumerate(run, payload.first):
            fresh[index] = decoded[offset : offset + chunk.size()]
            offset += chunk.size()
            if digest_bytes(fresh[index].data) != chunk.digest:
                raise LegFailed(leg, f"{chunk.tensor.name} has another digest", base_suspect=held is not None)
    for index, (chunk, old) in enumerate(zip(chunks, held.manifest.chunks if held else chunks, strict=True)):
        if index not in fresh and chunk.digest != old.digest:
            raise LegFailed(leg, f"{chunk.tensor.name} is said to be unchanged and has another digest")
    return fresh


def _assemble(entry: TensorEntry, fresh: dict[int, np.ndarray], first: int, base: HostTensor | None) -> HostTensor:
    indices = range(first, first + len(entry.chunks))
    if base is not None and fresh.keys().isdisjoint(indices):
        return base
    before = base.chunks() if base else []
    data = _join([fresh[index] if index in fresh else before[index - first] for index in indices])
    data.flags.writeable = False
    return HostTensor(entry.dtype, entry.shape, data)


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])


def _payloads(leg: Leg, read_pack: ReadPack) -> Iterator[tuple[Payload, memoryview]]:
    """The payloads in the order of the chunk table, one pack in memory at a time."""
    encoding = leg.manifest.encoding(leg.kind)
    loaded, data = -1, memoryview(b"")
    for payload in encoding.payloads:
        if payload.pack != loaded:
            try:
                loaded, data = payload.pack, memoryview(read_pack(leg.manifest, encoding.packs[payload.pack]))
            except (StorageError, WeightsError) as error:
                raise LegFailed(leg, error.message) from None
        yield payload, data[payload.offset : payload.offset + payload.bytes]
