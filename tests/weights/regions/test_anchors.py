import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from rollmill.errors import StorageError, WeightsError
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import Mirror, Publisher, WeightStore
from rollmill.weights.format.object_keys import anchor_key
from rollmill.weights.regions.anchors import AnchorBuilder
from tests.weights.build import delta_pack, history, publish_line, same
from tests.weights.worker import killed_at


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(Objects.open(tmp_path))


def anchor_packs(path: Path, store: WeightStore, number: int) -> list[Path]:
    anchor = store.anchor(Version("rl", number))
    assert anchor is not None
    return [path / f"weights/rl/bf16/packs/{number:010d}-{pack.digest}" for pack in anchor.snapshot.packs]


def test_an_anchor_every_n_versions(tmp_path: Path, store: WeightStore) -> None:
    versions = history(12)
    publisher = Publisher(WeightStore(store.objects), "rl", snapshot_every=8)
    builder = AnchorBuilder(store, "rl", every=4)
    made = []
    for number, tensors in enumerate(versions):
        publisher.publish(number, tensors)
        made.append(builder.poll())
        assert builder.poll() is None
    assert made == [None] * 4 + [4] + [None] * 7  # 0 and 8 have snapshots
    assert (store.anchors("rl"), store.anchor(Version("rl", 8))) == ([4], None)
    anchor = store.anchor(Version("rl", 4))
    assert anchor is not None and anchor.digest == store.manifest(Version("rl", 4)).digest
    assert [note for _, ok, note in store.verify("rl") if not ok or note] == []


def test_a_version_is_restored_from_its_anchor(tmp_path: Path, store: WeightStore) -> None:
    """A region that has deltas and its own anchors needs nothing before them."""
    versions = publish_line(tmp_path, 7)
    assert AnchorBuilder(store, "rl", every=5).poll() == 5
    for number in range(5):
        store.objects.delete(f"weights/rl/bf16/manifests/{number:010d}.manifest")
    fresh = WeightStore(store.objects)
    assert same(fresh.load(Version("rl", 6)), versions[6]) and same(fresh.load(Version("rl", 5)), versions[5])
    checked = list(fresh.verify("rl"))
    assert [ok for _, ok, _ in checked] == [True, True]
    assert "delta not checked" in checked[0][2]
    (pack,) = anchor_packs(tmp_path, fresh, 5)
    pack.write_bytes(pack.read_bytes()[:-1])
    assert [ok for _, ok, _ in WeightStore(store.objects).verify("rl")] == [False, False]


def test_verify_covers_anchors(tmp_path: Path, store: WeightStore) -> None:
    publish_line(tmp_path, 5)
    AnchorBuilder(store, "rl", every=4).poll()
    (pack,) = anchor_packs(tmp_path, store, 4)
    good = pack.read_bytes()
    pack.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    wrong = {version.number: why for version, ok, why in store.verify("rl") if not ok}
    assert wrong.keys() == {4} and "anchor" in wrong[4]
    pack.write_bytes(good)
    store.objects.put(anchor_key(Version("rl", 4), "bf16"), b"nonsense")
    wrong = {version.number: why for version, ok, why in store.verify("rl") if not ok}
    assert wrong.keys() == {4} and "anchor" in wrong[4]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("digest", "0" * 64),
        ("number", 3),
        ("line", "sft"),
        ("form", "fp8"),
        ("format", 1),
        ("snapshot", None),
        ("x", 1),
    ],
)
def test_anchors_are_not_trusted_even_when_sealed(
    tmp_path: Path, store: WeightStore, field: str, value: object
) -> None:
    versions = publish_line(tmp_path, 5)
    AnchorBuilder(store, "rl", every=4).poll()
    key = anchor_key(Version("rl", 4), "bf16")
    fields = json.loads(store.objects.get(key).partition(b"\n")[0])
    fields[field] = value
    body = json.dumps(fields).encode()
    store.objects.put(key, body + b"\n" + blake3(body).hexdigest().encode() + b"\n")
    with pytest.raises(WeightsError, match="the anchor of rl@4") as caught:
        store.anchor(Version("rl", 4))
    assert caught.value.hint and "delete it" in caught.value.hint
    assert same(store.load(Version("rl", 4)), versions[4])


def test_an_anchor_with_holes_is_refused(tmp_path: Path, store: WeightStore) -> None:
    publish_line(tmp_path, 5)
    AnchorBuilder(store, "rl", every=4).poll()
    key = anchor_key(Version("rl", 4), "bf16")
    fields = json.loads(store.objects.get(key).partition(b"\n")[0])
    del fields["snapshot"]["payloads"][-1]
    body = json.dumps(fields).encode()
    store.objects.put(key, body + b"\n" + blake3(body).hexdigest().encode() + b"\n")
    with pytest.raises(WeightsError, match="payloads for all chunks"):
        store.anchor(Version("rl", 4))


def test_a_region_makes_the_snapshot_it_did_not_copy(tmp_path: Path) -> None:
    """The home store has a snapshot at 4. The region has only the delta, and makes an anchor of its own."""
    home = tmp_path / "home"
    versions = history(6)
    publisher = Publisher(WeightStore(Objects.open(home)), "rl", snapshot_every=4)
    mirror = Mirror(Objects.open(home), Objects.open(tmp_path / "away"))
    for number in range(6):
        publisher.publish(number, versions[number])
        mirror.copy("rl")
    away = WeightStore(Objects.open(tmp_path / "away"))
    assert not away.has_snapshot(away.manifest(Version("rl", 4)))
    assert AnchorBuilder(away, "rl", every=4).poll() == 4
    assert all(ok for _, ok, _ in away.verify("rl"))


def test_damage_and_bad_memory_never_become_an_anchor(tmp_path: Path, store: WeightStore) -> None:
    versions = publish_line(tmp_path, 5)
    pack = delta_pack(tmp_path, 3)
    good = pack.read_bytes()
    pack.write_bytes(b"damaged")
    builder = AnchorBuilder(store, "rl", every=4)
    for _ in range(2):
        with pytest.raises((WeightsError, StorageError)):
            builder.poll()
    pack.write_bytes(good)
    builder._host = store.hold(Version("rl", 4))
    memory = builder._host._memory["embed.weight"]
    memory[7] ^= 1
    with pytest.raises(WeightsError, match="changed in memory"):
        builder.poll()
    assert store.anchors("rl") == []
    assert builder.poll() == 4
    assert all(ok for _, ok, _ in store.verify("rl"))
    assert np.array_equal(store.load(Version("rl", 4))["embed.weight"].data, versions[4]["embed.weight"].data)


@pytest.mark.slow
def test_a_builder_killed_at_every_call(tmp_path: Path) -> None:
    versions = publish_line(tmp_path / "line", 5)
    for step in range(200):
        path = tmp_path / str(step)
        shutil.copytree(tmp_path / "line", path)
        killed = killed_at(path, step, lambda objects: AnchorBuilder(WeightStore(objects), "rl", every=4).poll())
        store = WeightStore(Objects.open(path))
        assert [why for _, ok, why in store.verify("rl") if not ok] == []
        made = store.anchors("rl")
        assert AnchorBuilder(store, "rl", every=4).poll() == (None if made else 4)
        assert store.anchors("rl") == [4]
        assert [why for _, ok, why in store.verify("rl") if not ok] == []
        assert same(WeightStore(store.objects).load(Version("rl", 4)), versions[4])
        if not killed:
            break
    assert 10 < step < 199


def test_two_builders_at_once(tmp_path: Path, store: WeightStore) -> None:
    publish_line(tmp_path, 5)
    first, second = AnchorBuilder(store, "rl", every=4), AnchorBuilder(WeightStore(store.objects), "rl", every=4)
    manifest = store.manifest(Version("rl", 4))
    assert first._make(manifest) is True
    assert second._make(manifest) is False
    assert all(ok for _, ok, _ in store.verify("rl"))
