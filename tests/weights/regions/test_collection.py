import os
import shutil
from pathlib import Path

import pytest

from rollmill.errors import StorageError, WeightsError
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import Channels, LineFollower, Publisher, WeightStore
from rollmill.weights.format.object_keys import manifest_key, pack_prefix
from rollmill.weights.reading.leases import Leases
from rollmill.weights.regions.anchors import AnchorBuilder
from rollmill.weights.regions.collection import ABANDONED_SECONDS, collect
from tests.storage.serving import new_bucket, s3_options, s3_server
from tests.weights.build import history, publish_line, same, train_step
from tests.weights.worker import killed_at, mortal


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(Objects.open(tmp_path))


def make_old(path: Path) -> None:
    """Makes everything two hours old, by the store's clock."""
    for file in (path / "weights").rglob("*"):
        then = file.stat().st_mtime - 2 * ABANDONED_SECONDS
        os.utime(file, (then, then))


def pack_numbers(store: WeightStore) -> set[int]:
    return {int(key.rpartition("/")[2][:10]) for key in store.objects.list("weights/rl/bf16/packs")}


def check(store: WeightStore, versions: list, numbers: list[int]) -> None:
    fresh = WeightStore(store.objects)
    assert fresh.numbers("rl") == numbers
    assert [why for _, ok, why in fresh.verify("rl") if not ok] == []
    assert all(same(fresh.load(Version("rl", number)), versions[number]) for number in numbers)


def test_the_last_versions_and_their_chains_stay(tmp_path: Path, store: WeightStore) -> None:
    versions = publish_line(tmp_path, 12, snapshot_every=4)
    before = sum(store.objects.head(key) or 0 for key in store.objects.list("weights"))
    dry = collect(store, "rl", keep=2, dry_run=True)
    check(store, versions, list(range(12)))
    done = collect(store, "rl", keep=2)
    assert done == dry
    assert (done.kept, done.removed, done.abandoned, done.problem) == ((8, 9, 10, 11), tuple(range(8)), 0, None)
    check(store, versions, [8, 9, 10, 11])
    assert pack_numbers(store) == {8, 9, 10, 11}
    after = sum(store.objects.head(key) or 0 for key in store.objects.list("weights"))
    assert (before - done.freed, after) == (after - len(b"now"), done.bytes)
    assert collect(store, "rl", keep=2).removed == ()
    # publishing and following continue
    publisher, follower = Publisher(WeightStore(store.objects), "rl", snapshot_every=4), LineFollower(store, "rl")
    publisher.publish(12, train_step(versions[11], 12))
    follower.poll()
    assert follower.current is not None and follower.current.number == 12
    assert publisher.last and publisher.last.first == 0


def test_in_an_object_store() -> None:
    """S3 over HTTP: other ways to create, list, delete, and tell the time."""
    store = WeightStore(Objects.open(new_bucket(), options=s3_options(s3_server())))
    publisher, versions = Publisher(store, "rl", snapshot_every=2), history(6)
    for number, tensors in enumerate(versions):
        publisher.publish(number, tensors)
    Leases(store.objects, "rl").hold("engine", 3, 60)
    Leases(store.objects, "rl").hold("other", 0, 60)
    Leases(store.objects, "rl").release("other")
    assert collect(store, "rl", keep=1).kept == (2, 3, 4, 5)
    check(store, versions, [2, 3, 4, 5])
    assert AnchorBuilder(store, "rl", every=5).poll() == 5
    assert collect(store, "rl", keep=1).abandoned == 0
    check(store, versions, [2, 3, 4, 5])


def test_anchors_are_places_to_start_from(tmp_path: Path, store: WeightStore) -> None:
    versions = publish_line(tmp_path, 11)
    builder = AnchorBuilder(store, "rl", every=5)
    assert builder.poll() == 10
    assert collect(store, "rl", keep=1).kept == (10,)
    check(store, versions, [10])
    assert store.anchors("rl") == [10]


def test_an_anchor_without_its_packs_is_not_a_start(tmp_path: Path, store: WeightStore) -> None:
    versions = publish_line(tmp_path, 4)
    AnchorBuilder(store, "rl", every=3).poll()
    anchor = store.anchor(Version("rl", 3))
    assert anchor is not None
    store.objects.delete(pack_prefix("rl", "bf16", 3) + anchor.snapshot.packs[0].digest)
    assert collect(store, "rl", keep=1).kept == (0, 1, 2, 3)
    assert same(WeightStore(store.objects).load(Version("rl", 3)), versions[3])


def test_channels_hold_their_versions(tmp_path: Path, store: WeightStore) -> None:
    versions = publish_line(tmp_path, 12, snapshot_every=3)
    channels = Channels(store.objects)
    for number in (1, 1, 10, 4, 4):
        channels.move("live", Version("rl", number))
    channels.move("old", Version("rl", 7))
    publish_line(tmp_path, 2, line="sft")
    channels.move("other", Version("sft", 0))
    assert collect(store, "rl", keep=1).kept == (3, 4, 6, 7, 9, 10, 11)
    check(store, versions, [3, 4, 6, 7, 9, 10, 11])
    assert channels.rollback("live").version == Version("rl", 10)
    assert collect(store, "sft", keep=1).kept == (0, 1)


def test_leases_hold_their_version_and_all_after_it(tmp_path: Path, store: WeightStore) -> None:
    versions = publish_line(tmp_path, 12, snapshot_every=4)
    leases = Leases(store.objects, "rl")
    leases.hold("engine", 5, 60)
    leases.hold("gone", 1, 60)
    os.utime(tmp_path / "weights/rl/bf16/leases/gone.json", (1e9, 1e9))
    follower = LineFollower(WeightStore(store.objects), "rl")
    assert collect(store, "rl", keep=1).kept == tuple(range(4, 12))
    check(store, versions, list(range(4, 12)))
    leases.hold("engine", 40, 60)  # ahead of the head in this store
    assert collect(store, "rl", keep=1).kept == (8, 9, 10, 11)
    follower.poll()
    assert follower.current and follower.current.number == 11


def test_a_budget_keeps_fewer_and_says_when_it_cannot_be_met(tmp_path: Path, store: WeightStore) -> None:
    versions = publish_line(tmp_path, 16, snapshot_every=4)
    everything = collect(store, "rl", keep=16, dry_run=True).bytes
    half = collect(store, "rl", keep=16, budget=everything // 2, dry_run=True)
    assert half.bytes <= everything // 2 and half.problem is None and half.kept[0] in (4, 8, 12)
    assert collect(store, "rl", keep=16, budget=everything).removed == ()
    Channels(store.objects).move("live", Version("rl", 5))
    Leases(store.objects, "rl").hold("engine-7", 10, 60)
    tight = collect(store, "rl", keep=16, budget=1000)
    assert tight.kept == (4, 5, *range(8, 16))
    assert tight.problem and "budget of 1000" in tight.problem
    for holder in ("the head at rl@15", "channel live at rl@5", "the lease of engine-7 at rl@10"):
        assert holder in tight.problem
    check(store, versions, list(tight.kept))


def test_abandoned_objects_are_removed_after_an_hour_and_new_ones_stay(tmp_path: Path, store: WeightStore) -> None:
    versions = publish_line(tmp_path, 4)
    ours = "weights/rl/bf16/packs/"
    digest = "ab" * 32
    stray, above = f"{ours}{2:010d}-{digest}", f"{ours}{4:010d}-{digest}"
    store.objects.put(stray, b"left behind")
    store.objects.put(above, b"about to be published")
    assert collect(store, "rl", keep=4).abandoned == 0  # all of it is younger than an hour
    make_old(tmp_path)
    assert collect(store, "rl", keep=4, dry_run=True).abandoned == 1
    assert collect(store, "rl", keep=4).abandoned == 1
    assert store.objects.head(above) and not store.objects.head(stray)
    check(store, versions, [0, 1, 2, 3])


def test_leftovers_are_judged_by_the_clock_of_the_store(
    tmp_path: Path, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    publish_line(tmp_path, 2)
    store.objects.put(f"weights/rl/bf16/packs/{1:010d}-{'ab' * 32}", b"in the making")
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 1e6)
    assert collect(store, "rl", keep=2).abandoned == 0


def test_damage_never_makes_it_remove_more(tmp_path: Path, store: WeightStore) -> None:
    versions = publish_line(tmp_path, 10, snapshot_every=4)
    key = manifest_key(Version("rl", 8), "bf16")
    good = store.objects.get(key)
    store.objects.put(key, b"damaged")
    fresh = WeightStore(store.objects)
    assert collect(fresh, "rl", keep=1).kept == (4, 5, 6, 7, 8, 9)  # as if 8 were a delta
    store.objects.put(key, good)
    check(store, versions, [4, 5, 6, 7, 8, 9])
    store.objects.put("channels/live/0000000001.json", b"damaged")
    with pytest.raises(WeightsError, match="channel 'live' is damaged"):
        collect(store, "rl", keep=1)
    check(store, versions, [4, 5, 6, 7, 8, 9])


def test_a_store_that_fails_while_it_is_listed_loses_nothing(tmp_path: Path, store: WeightStore) -> None:
    versions = publish_line(tmp_path, 6, snapshot_every=2)

    def fail(key: str) -> bytes:
        raise StorageError(f"{key!r}: 503")

    store.objects.get = fail  # type: ignore[method-assign]
    with pytest.raises(StorageError):
        collect(store, "rl", keep=1)
    check(WeightStore(Objects.open(tmp_path)), versions, list(range(6)))


def test_an_empty_line_and_an_invalid_keep(store: WeightStore) -> None:
    assert collect(store, "rl", keep=1).kept == ()
    with pytest.raises(WeightsError, match="0 versions cannot be kept"):
        collect(store, "rl", keep=0)


def test_an_anchor_made_from_abandoned_packs_meanwhile_is_kept(tmp_path: Path, store: WeightStore) -> None:
    """The builder reuses packs of a dead attempt. We listed them as abandoned, before the anchor existed."""
    versions = publish_line(tmp_path, 5)
    builder = AnchorBuilder(WeightStore(store.objects), "rl", every=4)
    assert builder.poll() == 4
    store.objects.delete("weights/rl/bf16/anchors/0000000004.anchor")
    make_old(tmp_path)
    real = store.objects.folders

    def build_meanwhile(prefix: str) -> list[str]:
        """Called for the channels, after the anchors were listed."""
        assert AnchorBuilder(WeightStore(store.objects), "rl", every=4).poll() == 4
        return real(prefix)

    store.objects.folders = build_meanwhile  # type: ignore[method-assign]
    collect(store, "rl", keep=5)
    assert store.anchors("rl") == [4]
    check(store, versions, [0, 1, 2, 3, 4])


def test_a_builder_notices_that_its_packs_were_collected(tmp_path: Path, store: WeightStore) -> None:
    publish_line(tmp_path, 5)
    real = store.objects.create

    def collected_before(key: str, data: bytes) -> None:
        if "/anchors/" in key:
            delta = delta_pack_of(store)
            for pack in store.objects.list("weights/rl/bf16/packs"):
                if f"{4:010d}-" in pack and pack != delta:
                    store.objects.delete(pack)
        real(key, data)

    store.objects.create = collected_before  # type: ignore[method-assign]
    builder = AnchorBuilder(store, "rl", every=4)
    with pytest.raises(WeightsError, match="collected while it was made"):
        builder.poll()
    store.objects.create = real  # type: ignore[method-assign]
    assert store.anchors("rl") == [] and builder.poll() == 4
    assert all(ok for _, ok, _ in store.verify("rl"))


def delta_pack_of(store: WeightStore) -> str:
    delta = store.manifest(Version("rl", 4)).delta
    assert delta is not None
    return pack_prefix("rl", "bf16", 4) + delta.packs[0].digest


@pytest.mark.slow
def test_killed_at_every_call_and_collected_again(tmp_path: Path) -> None:
    line = tmp_path / "line"
    versions = publish_line(line, 9, snapshot_every=3)
    AnchorBuilder(WeightStore(Objects.open(line)), "rl", every=4).poll()
    store = WeightStore(Objects.open(line))
    Channels(store.objects).move("live", Version("rl", 4))
    store.objects.put(f"weights/rl/bf16/packs/{1:010d}-{'ab' * 32}", b"left behind")
    counting = tmp_path / "counting"
    shutil.copytree(line, counting)
    make_old(counting)
    done = collect(WeightStore(objects := mortal(counting, -1)), "rl", keep=2)
    calls = -1 - objects._backend._left  # type: ignore[attr-defined]
    removals = 2 * len(done.removed) + done.abandoned + 1  # a manifest and a pack each; 0 and 3 also have a snapshot
    seen = set()
    for step in [*range(0, calls, 40), *range(calls - 2 * removals, calls + 1)]:
        path = tmp_path / str(step)
        shutil.copytree(line, path)
        make_old(path)
        assert killed_at(path, step, lambda o: collect(WeightStore(o), "rl", keep=2)) == (step < calls)
        found = WeightStore(Objects.open(path))
        numbers = found.numbers("rl")
        seen.add(tuple(numbers))
        check(found, versions, numbers)  # every version that exists can be restored
        assert {3, 4, 6, 7, 8} <= set(numbers)
        collect(found, "rl", keep=2)
        check(found, versions, [3, 4, 6, 7, 8])
        assert pack_numbers(found) == {3, 4, 6, 7, 8}
        shutil.rmtree(path)
    assert len(seen) == 5  # 5, 2, 1 and 0 are removed, in this order
