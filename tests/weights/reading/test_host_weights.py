"""Images in memory: moved from version to version in place, interrupted anywhere, repaired chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import HostTensor, Publisher, Tensors, WeightStore
from rollmill.weights.format import tensors as tensors_module
from rollmill.weights.format.manifest import Manifest, Pack
from rollmill.weights.reading import chunks as fetch_module
from rollmill.weights.reading import host_weights as image_module
from rollmill.weights.reading.host_weights import HostWeights, restore
from rollmill.weights.reading.patches import Patches
from rollmill.weights.reading.read_plan import Leg, LegFailed, Source
from rollmill.weights.regions.anchors import AnchorBuilder
from rollmill.weights.writing import encoder as packs_module
from tests.weights.build import history, make_tensors, same, train_step


@pytest.fixture(params=["alone", "together"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Chunks of 4096 elements, one or two per payload, in packs of a few payloads."""
    monkeypatch.setattr(tensors_module, "CHUNK_ELEMENTS", 4096)
    monkeypatch.setattr(packs_module, "PACK_BYTES", 10_000)
    monkeypatch.setattr(packs_module, "RUN_BYTES", 1 if request.param == "alone" else 16_384)
    tensors_module.chunk_ranges.cache_clear()
    yield request.param
    tensors_module.chunk_ranges.cache_clear()


@dataclass
class Counting:
    """A store that counts what is read."""

    store: WeightStore
    packs: list[Pack] = field(default_factory=list)
    parts: list[tuple[int, int]] = field(default_factory=list)  # number of the version, bytes

    @property
    def source(self) -> Source:
        own = self.store.source()

        def pack(manifest: Manifest, pack: Pack) -> bytes:
            self.packs.append(pack)
            return own.pack(manifest, pack)

        def part(manifest: Manifest, pack: Pack, offset: int, length: int) -> bytes:
            self.parts.append((manifest.number, length))
            return own.part(manifest, pack, offset, length)

        return Source(own.manifest, own.anchor, pack, part)


def publish(path: Path, versions: list[dict[str, HostTensor]], **options: Any) -> Counting:
    store = WeightStore(Objects.open(path))
    publisher = Publisher(store, "rl", **options)
    for number, tensors in enumerate(versions):
        publisher.publish(number, tensors)
    return Counting(store)


def delta(counting: Counting, number: int) -> Leg:
    return Leg(counting.store.manifest(Version("rl", number)), "delta")


def copy_of(tensors: Tensors) -> dict[str, HostTensor]:
    return {name: HostTensor(t.dtype, t.shape, t.data.copy()) for name, t in tensors.items()}


def patch(engine: dict[str, HostTensor], patches: Patches, host: HostWeights) -> None:
    for name, listed in patches.take().items():
        if listed is None:
            np.copyto(engine[name].data, host.tensors[name].data)
        for start, indices, values in listed or ():
            engine[name].data.view(values.dtype)[start + indices.astype(np.int64)] = values


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("goal", ["fast", "small", "overwrite"])
def test_versions_one_after_the_other(
    tmp_path: Path, pieces: str, goal: str, threaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_module, "THREADED_BYTES", 0 if threaded else 1 << 40)
    versions = history(4)
    versions.append(train_step(versions[-1], 9, share=0.3))  # dense
    versions.append({**versions[-1], "embed.weight": make_tensors(5)["embed.weight"]})  # raw
    counting = publish(tmp_path, versions, goal=goal)
    host = restore(counting.source, Version("rl", 0))
    engine, patches = copy_of(host.tensors), Patches()
    for number in range(1, len(versions)):
        host.take(delta(counting, number), counting.source, patches)
        assert host.manifest == counting.store.manifest(Version("rl", number))
        assert same(host.tensors, versions[number])
        patch(engine, patches, host)
        assert same(engine, versions[number])
    assert not counting.parts, "nothing was repaired"


def chunk_of(host: HostWeights, name: str, place: int) -> int:
    assert host.manifest is not None
    return [i for i, chunk in enumerate(host.manifest.chunks) if chunk.tensor.name == name][place]


def covering(leg: Leg, index: int) -> int:
    return sum(p.bytes for p in leg.encoding.payloads if p.first <= index < p.first + p.chunks)


def flip(host: HostWeights, name: str, place: int) -> int:
    index = chunk_of(host, name, place)
    assert host.manifest is not None
    chunk = host.manifest.chunks[index]
    host._memory[name][(chunk.start + chunk.stop) // 2] ^= 16
    return index


@pytest.mark.parametrize("anchored", [False, True])
def test_a_flipped_bit_is_repaired_with_only_that_chunks_payloads(tmp_path: Path, pieces: str, anchored: bool) -> None:
    versions = history(6)
    counting = publish(tmp_path, versions)
    if anchored:
        assert AnchorBuilder(counting.store, "rl", every=3).poll() == 3
        for number in (0, 1, 2):  # collected: only the anchor is left
            (tmp_path / f"weights/rl/bf16/manifests/{number:010d}.manifest").unlink()
            counting.store.forget(Version("rl", number))
    host = restore(counting.source, Version("rl", 4))
    index = flip(host, "embed.weight", 3)
    counting.packs.clear()
    host.take(delta(counting, 5), counting.source)
    assert same(host.tensors, versions[5])
    assert counting.packs == list(delta(counting, 5).encoding.packs)
    first = counting.store.manifest(Version("rl", 3 if anchored else 0))
    start = Leg(first, "anchor", counting.store.anchor(first.version)) if anchored else Leg(first, "snapshot")
    legs = [start, *(delta(counting, number) for number in range(first.number + 1, 5))]
    assert counting.parts == [(leg.manifest.number, covering(leg, index)) for leg in legs]
    assert sum(size for _, size in counting.parts) < host.bytes / 8


def test_a_flipped_bit_that_cannot_be_repaired_waits_for_a_snapshot(tmp_path: Path, pieces: str) -> None:
    versions = history(7)
    counting = publish(tmp_path, versions[:5])
    host = restore(counting.source, Version("rl", 3))
    flip(host, "embed.weight", 3)
    for pack in (tmp_path / "weights/rl/bf16/packs").glob("0000000000-*"):
        pack.unlink()
    with pytest.raises(LegFailed, match=r"embed.weight went bad in memory and cannot be read again"):
        restore(counting.source, Version("rl", 4), host)
    assert host.manifest is None and not host.holds(counting.store.manifest(Version("rl", 3)).digest)
    publisher = Publisher(counting.store, "rl")
    publisher.resume()
    assert publisher.problem  # the trainer cannot read it back either, so the next version is a snapshot
    publisher.publish(5, versions[5])
    publisher.publish(6, versions[6])
    assert same(restore(counting.source, Version("rl", 6), host).tensors, versions[6])


def swapped(leg: Leg) -> Leg:
    """The same packs, but each payload points at the next one's bytes."""
    payloads = leg.encoding.payloads
    places = [p.model_dump(include={"pack", "offset", "bytes"}) for p in (*payloads[1:], payloads[0])]
    moved = tuple(p.model_copy(update=place) for p, place in zip(payloads, places, strict=True))
    encoding = leg.encoding.model_copy(update={"payloads": moved})
    return Leg(leg.manifest.model_copy(update={"delta": encoding}), "delta")


@pytest.mark.parametrize("goal", ["fast", "small", "overwrite"])
def test_payloads_that_are_swapped_change_nothing(tmp_path: Path, pieces: str, goal: str) -> None:
    versions = history(3)
    counting = publish(tmp_path, versions, goal=goal)
    host = restore(counting.source, Version("rl", 1))
    with pytest.raises(LegFailed, match="the delta of rl@2"):
        host.take(swapped(delta(counting, 2)), counting.source)
    assert same(host.tensors, versions[1]), "the first payload was wrong, and its changes were undone"
    assert host.manifest is not None and host.manifest.number == 1
    assert not counting.parts, "the leg is at fault, so memory is not checked"
    host.take(delta(counting, 2), counting.source)
    assert same(host.tensors, versions[2])


class Cut(BaseException):
    """Like a KeyboardInterrupt: no handler of ordinary errors catches it."""


def cut_at(call: Callable[..., Any], place: int) -> Callable[..., Any]:
    left = [place]

    def cutting(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise Cut
        return call(*args, **kwargs)

    return cutting


@pytest.mark.parametrize("where", ["_take_payload", "decode_changes", "scatter", "chunk_digest", "copyto"])
def test_a_leg_interrupted_anywhere_can_be_continued(
    tmp_path: Path, pieces: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = history(3)
    counting = publish(tmp_path, versions)
    owner: Any = {"_take_payload": HostWeights, "copyto": np}.get(where, image_module)
    place, cuts = 0, 0
    while True:
        host = restore(counting.source, Version("rl", 0))
        engine, patches = copy_of(host.tensors), Patches()
        with monkeypatch.context() as context:
            context.setattr(owner, where, cut_at(getattr(owner, where), place))
            try:
                for number in (1, 2):
                    host.take(delta(counting, number), counting.source, patches)
                break
            except Cut:
                cuts += 1
        restore(counting.source, Version("rl", 2), host, patches)
        assert same(host.tensors, versions[2])
        patch(engine, patches, host)
        assert same(engine, versions[2])
        place += 1
    assert cuts >= 2 or (where == "copyto" and pieces == "alone")


def test_damage_is_found_before_anything_changes_when_a_leg_fits_into_memory(tmp_path: Path, pieces: str) -> None:
    versions = history(2)
    counting = publish(tmp_path, versions)
    host = restore(counting.source, Version("rl", 0))
    packs = delta(counting, 1).encoding.packs
    last = tmp_path / f"weights/rl/bf16/packs/0000000001-{packs[-1].digest}"
    whole = last.read_bytes()
    last.write_bytes(whole[:-1])
    with pytest.raises(LegFailed, match="is truncated"):
        host.take(delta(counting, 1), counting.source)
    assert host.manifest is not None and host.manifest.number == 0 and same(host.tensors, versions[0])
    last.write_bytes(whole)
    host.take(delta(counting, 1), counting.source)
    assert same(host.tensors, versions[1])


def test_a_large_leg_is_read_in_groups_and_can_be_continued(
    tmp_path: Path, pieces: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "IN_FLIGHT_BYTES", 16_000)
    versions = [make_tensors(0), make_tensors(1)]
    counting = publish(tmp_path, versions, snapshot_every=1)
    manifest = counting.store.manifest(Version("rl", 1))
    packs = Leg(manifest, "snapshot").encoding.packs
    assert sum(pack.bytes for pack in packs) > 3 * 16_000
    host = restore(counting.source, Version("rl", 0))
    last = tmp_path / f"weights/rl/bf16/packs/0000000001-{packs[-1].digest}"
    whole = last.read_bytes()
    last.unlink()
    with pytest.raises(LegFailed, match="no object"):
        host.take(Leg(manifest, "snapshot"), counting.source)
    assert host.manifest is None, "part of it is already new"
    last.write_bytes(whole)
    counting.packs.clear()
    host.take(Leg(manifest, "snapshot"), counting.source)
    assert same(host.tensors, versions[1])
    assert 0 < len(counting.packs) < len(packs), "packs that were applied are not read again"


def test_going_back_from_the_middle_of_a_leg(tmp_path: Path, pieces: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = history(2)
    counting = publish(tmp_path, versions)
    host = restore(counting.source, Version("rl", 0))
    with monkeypatch.context() as context:
        context.setattr(HostWeights, "_take_payload", cut_at(HostWeights._take_payload, 2))
        with pytest.raises(Cut):
            host.take(delta(counting, 1), counting.source)
    assert host.manifest is None and not same(host.tensors, versions[0])
    assert same(restore(counting.source, Version("rl", 0), host).tensors, versions[0])


def test_healing_and_copies(tmp_path: Path, pieces: str) -> None:
    versions = history(3)
    counting = publish(tmp_path, versions)
    host = restore(counting.source, Version("rl", 1))
    twin = host.copy()
    twin.take(delta(counting, 2), counting.source)
    assert same(twin.tensors, versions[2]) and same(host.tensors, versions[1])
    assert host.manifest is not None and host.heal(host.manifest, counting.source) == 0
    flip(host, "layers.1.experts", 0)
    flip(host, "embed.weight", 1)
    assert host.heal(host.manifest, counting.source) == 2
    assert same(host.tensors, versions[1])
    with pytest.raises(ValueError, match="read-only"):
        host.tensors["scale"].data[0] = 1
