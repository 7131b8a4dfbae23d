"""The cheapest path to a version, by bytes, over deltas, snapshots and anchors, avoiding damaged or missing ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.errors import WeightsError
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import Publisher, WeightStore
from rollmill.weights.reading.host_weights import restore
from rollmill.weights.reading.read_plan import Leg, plan_legs
from rollmill.weights.regions.anchors import AnchorBuilder
from tests.weights.build import history, make_tensors, publish_line, same, train_step


def plan(store: WeightStore, target: int, held: int | None = None) -> list[tuple[int, str]]:
    source = store.source()
    digest = None if held is None else store.manifest(Version("rl", held)).digest
    legs = plan_legs(source.manifest, source.anchor, Version("rl", target), lambda _, other: other == digest)
    return [(leg.manifest.number, leg.kind) for leg in legs]


def chain(first: int, last: int) -> list[tuple[int, str]]:
    return [(number, "delta") for number in range(first, last + 1)]


def test_the_cheapest_path_by_bytes(tmp_path: Path) -> None:
    publish_line(tmp_path, 12, snapshot_every=6)
    store = WeightStore(Objects.open(tmp_path))
    assert plan(store, 11) == [(6, "snapshot"), *chain(7, 11)]
    assert plan(store, 6) == [(6, "snapshot")]
    assert plan(store, 11, held=9) == chain(10, 11)
    assert plan(store, 11, held=3) == chain(4, 11), "eight small deltas are fewer bytes than a snapshot"
    assert plan(store, 11, held=11) == []
    assert plan(store, 3, held=9) == [(0, "snapshot"), *chain(1, 3)], "deltas do not lead backwards"


def test_a_snapshot_is_cheaper_than_a_chain_of_large_deltas(tmp_path: Path) -> None:
    store = WeightStore(Objects.open(tmp_path))
    publisher, tensors = Publisher(store, "rl", snapshot_every=4), make_tensors()
    for number in range(9):
        publisher.publish(number, tensors)
        tensors = train_step(tensors, number, share=0.5)
    assert plan(store, 8, held=1) == [(8, "snapshot")]
    assert plan(store, 8, held=7) == chain(8, 8)


def test_anchors_are_places_to_start_from(tmp_path: Path) -> None:
    versions = publish_line(tmp_path, 12, snapshot_every=100)
    store = WeightStore(Objects.open(tmp_path))
    assert plan(store, 11) == [(0, "snapshot"), *chain(1, 11)]
    assert AnchorBuilder(store, "rl", every=5).poll() == 10
    assert plan(store, 11) == [(10, "anchor"), (11, "delta")]
    assert plan(store, 10, held=11) == [(10, "anchor")], "a channel that was moved back"
    assert plan(store, 11, held=8) == chain(9, 11), "the chain is still cheaper"
    assert same(store.load(Version("rl", 11)), versions[11])


def test_a_wrong_or_damaged_anchor_is_avoided(tmp_path: Path) -> None:
    versions = publish_line(tmp_path, 12, snapshot_every=100)
    store = WeightStore(Objects.open(tmp_path))
    AnchorBuilder(store, "rl", every=5).poll()
    anchor = store.anchor(Version("rl", 10))
    assert anchor is not None
    pack = tmp_path / f"weights/rl/bf16/packs/0000000010-{anchor.snapshot.packs[0].digest}"
    data = bytearray(pack.read_bytes())
    data[50] ^= 1
    pack.write_bytes(data)
    assert plan(store, 11)[0] == (10, "anchor")
    assert same(store.load(Version("rl", 11)), versions[11])
    key = tmp_path / "weights/rl/bf16/anchors/0000000010.anchor"
    key.write_bytes(key.read_bytes()[:-5])
    assert plan(store, 11)[0] == (0, "snapshot")


def test_old_versions_may_be_missing(tmp_path: Path) -> None:
    versions = publish_line(tmp_path, 12, snapshot_every=100)
    store = WeightStore(Objects.open(tmp_path))
    AnchorBuilder(store, "rl", every=5).poll()
    for number in range(10):
        (tmp_path / f"weights/rl/bf16/manifests/{number:010d}.manifest").unlink()
    fresh = WeightStore(Objects.open(tmp_path))
    assert plan(fresh, 11) == [(10, "anchor"), (11, "delta")]
    # an engine restored from an old image: no delta starts from what it has
    old = WeightStore(Objects.open(tmp_path)).hold(Version("rl", 10))
    for name, tensor in versions[2].items():
        old._memory[name][:] = tensor.data
    digest = old.manifest and old.manifest.digest
    old.manifest, old._digests = None, [None] * len(old._digests)
    assert digest and not old.holds(digest)
    assert same(restore(fresh.source(), Version("rl", 11), old).tensors, versions[11])


def test_no_path(tmp_path: Path) -> None:
    publish_line(tmp_path, 4, snapshot_every=100)
    (tmp_path / "weights/rl/bf16/manifests/0000000000.manifest").unlink()
    with pytest.raises(WeightsError, match="no readable chain of snapshots and deltas leads to rl@3"):
        plan(WeightStore(Objects.open(tmp_path)), 3)


def test_other_tensors_take_other_memory(tmp_path: Path) -> None:
    store = WeightStore(Objects.open(tmp_path))
    wide = make_tensors(3, {"embed.weight": (300, 128), "scale": ()})
    for line, tensors in (("rl", history(1)[0]), ("wide", wide)):
        Publisher(store, line).publish(0, tensors)
    image = store.hold(Version("rl", 0))
    assert restore(store.source(), Version("wide", 0), image) is image
    assert same(image.tensors, wide) and image.bytes == 300 * 128 * 2 + 2


def test_looking_for_anchors_costs_nothing_on_the_way_to_the_next_version(tmp_path: Path) -> None:
    publish_line(tmp_path, 4)
    store = WeightStore(Objects.open(tmp_path))
    source, digest = store.source(), store.manifest(Version("rl", 2)).digest

    def refuse(version: Version) -> None:
        raise AssertionError(f"asked for an anchor of {version}")

    legs = plan_legs(source.manifest, refuse, Version("rl", 3), lambda _, other: other == digest)
    assert legs == [Leg(store.manifest(Version("rl", 3)), "delta")]
