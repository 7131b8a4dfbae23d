import time
from pathlib import Path

import pytest

from rollmill.errors import StorageError, WeightsError
from rollmill.storage.object_server import object_app
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import Channels, LineFollower, Mirror, Publisher, WeightStore
from rollmill.weights.format.object_keys import pack_key
from rollmill.weights.reading import line_follower as follower_module
from rollmill.weights.regions import mirror as transfer_module
from rollmill.weights.regions.anchors import AnchorBuilder
from rollmill.weights.writing import encoder as packs_module
from tests.storage.serving import Front, new_bucket, s3_options, s3_server, served
from tests.weights.build import delta_pack, history, make_tensors, publish_line, same, train_step


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "_RETRY_SECONDS", (0.001, 0.001))


def away_follower(url: str, path: Path) -> LineFollower:
    own = Objects.open(path)
    return LineFollower(WeightStore(own), "rl", mirror=Mirror(Objects.open(url), own))


def test_an_engine_in_another_region_follows_over_http(tmp_path: Path) -> None:
    versions = history(8)
    home = Objects.open(tmp_path / "home")
    publisher = Publisher(WeightStore(home), "rl", snapshot_every=4)
    with served(object_app(home)) as url:
        follower = away_follower(url, tmp_path / "away")
        assert follower.poll() is None and follower.problem is None
        for number, tensors in enumerate(versions):
            manifest = publisher.publish(number, tensors)
            update = follower.poll()
            assert update is not None and update.policy == manifest.policy
            assert same(update.tensors, tensors)
        away = WeightStore(Objects.open(tmp_path / "away"))
        assert away.versions("rl") == WeightStore(home).versions("rl")
        verdicts = list(away.verify("rl"))
        assert [ok for _, ok, _ in verdicts] == [True] * 8
        assert "snapshot is not kept" in verdicts[4][2]  # its delta was enough

        restarted = away_follower(url, tmp_path / "away").poll()  # needs that snapshot: it is fetched now
        assert restarted is not None and same(restarted.tensors, versions[7])
        assert [why for _, _, why in WeightStore(Objects.open(tmp_path / "away")).verify("rl")] == [""] * 8


def test_a_new_region_copies_only_what_it_needs(tmp_path: Path) -> None:
    versions = publish_line(tmp_path / "home", 11, snapshot_every=5)
    away = Objects.open(tmp_path / "away")
    copied = Mirror(Objects.open(tmp_path / "home"), away).copy("rl")
    assert [version.number for version in copied.versions] == [10]
    assert same(WeightStore(away).load(Version("rl", 10)), versions[10])
    assert Mirror(Objects.open(tmp_path / "home"), away).copy("rl").versions == ()
    older = Mirror(Objects.open(tmp_path / "home"), away).copy("rl", number=7)
    assert [version.number for version in older.versions] == [5, 6, 7]
    assert same(WeightStore(away).load(Version("rl", 7)), versions[7])
    assert WeightStore(away).head("rl") == 10


def test_a_region_far_behind_starts_from_a_newer_snapshot(tmp_path: Path) -> None:
    home = tmp_path / "home"
    versions = [make_tensors(seed) for seed in range(10)]  # nothing in common: deltas are as large as snapshots
    publisher = Publisher(WeightStore(Objects.open(home)), "rl", snapshot_every=8)
    publisher.publish(0, versions[0])
    follower = away_follower(str(home), tmp_path / "away")
    assert follower.poll()
    for number in range(1, 10):
        publisher.publish(number, versions[number])
    update = follower.poll()
    assert update is not None and update.policy.number == 9 and same(update.tensors, versions[9])
    assert WeightStore(Objects.open(tmp_path / "away")).numbers("rl") == [0, 8, 9]


def test_versions_with_equal_weights_are_copied_like_others(tmp_path: Path) -> None:
    """A step that changed nothing is still a version, and the base of the next one."""
    home, (first, second) = tmp_path / "home", history(2)
    publisher = Publisher(WeightStore(Objects.open(home)), "rl")
    publisher.publish(0, first)
    follower = away_follower(str(home), tmp_path / "away")
    assert follower.poll()
    for number, tensors in ((1, first), (2, first), (3, second)):
        publisher.publish(number, tensors)
        update = follower.poll() if number != 2 else None
        assert number == 2 or (update is not None and update.policy.number == number and same(update.tensors, tensors))
    away = WeightStore(Objects.open(tmp_path / "away"))
    assert away.numbers("rl") == [0, 1, 2, 3]
    assert same(away.load(Version("rl", 3)), second)


def test_an_unreachable_region_only_causes_delay(tmp_path: Path) -> None:
    versions = history(3)
    home = Objects.open(tmp_path / "home")
    publisher = Publisher(WeightStore(home), "rl")
    publisher.publish(0, versions[0])
    with served(object_app(home)) as url:
        follower = away_follower(url, tmp_path / "away")
        assert follower.poll()
    publisher.publish(1, versions[1])
    for _ in range(2):
        time.sleep(0.002)
        assert follower.poll() is None
        assert follower.current and follower.current.number == 0
        assert follower.problem and "other region" in follower.problem
    with served(object_app(home), port=int(url.rpartition(":")[2])):
        time.sleep(0.002)
        update = follower.poll()
        assert update is not None and same(update.tensors, versions[1])
        assert follower.problem is None


def test_damage_on_the_way_is_never_written(tmp_path: Path) -> None:
    publish_line(tmp_path / "home", 2)
    pack = delta_pack(tmp_path / "home", 1)
    data = bytearray(pack.read_bytes())
    data[5] ^= 1
    pack.write_bytes(data)
    away = Objects.open(tmp_path / "away")
    with pytest.raises(WeightsError, match="damaged"):
        Mirror(Objects.open(tmp_path / "home"), away).copy("rl")
    assert WeightStore(away).numbers("rl") == [0]
    assert len(away.list("weights/rl/bf16/packs")) == 1


def test_damage_in_the_own_store_is_repaired_from_the_other_region(tmp_path: Path) -> None:
    versions = publish_line(tmp_path / "home", 3)
    away = Objects.open(tmp_path / "away")
    Mirror(Objects.open(tmp_path / "home"), away).copy("rl")
    for number, damage in ((1, b"short"), (2, None)):
        pack = delta_pack(tmp_path / "away", number)
        pack.write_bytes(damage) if damage else pack.unlink()
    update = away_follower(str(tmp_path / "home"), tmp_path / "away").poll()
    assert update is not None and same(update.tensors, versions[2])
    assert all(ok for _, ok, _ in WeightStore(away).verify("rl"))


def test_regions_that_diverged_are_not_mixed(tmp_path: Path) -> None:
    versions = history(4)
    for name, last in (("home", versions[3]), ("away", versions[2])):
        publisher = Publisher(WeightStore(Objects.open(tmp_path / name)), "rl")
        publisher.publish(0, versions[0])
        publisher.publish(1, last)
    home = Publisher(WeightStore(Objects.open(tmp_path / "home")), "rl")
    home.publish(2, versions[1])
    away = Objects.open(tmp_path / "away")
    with pytest.raises(WeightsError, match="diverged"):
        Mirror(Objects.open(tmp_path / "home"), away).copy("rl")
    assert WeightStore(away).numbers("rl") == [0, 1]


def test_channels_reach_other_regions_after_their_versions(tmp_path: Path) -> None:
    versions = publish_line(tmp_path / "home", 4)
    home = Objects.open(tmp_path / "home")
    with served(object_app(home)) as url:
        follower = away_follower(url, tmp_path / "away")
        follower.follow_channel("live")
        assert follower.poll() is None and follower.problem is None
        for number in (1, 3, 0):
            Channels(home).move("live", Version("rl", number))
            update = follower.poll()
            assert update is not None and same(update.tensors, versions[number])
        assert Channels(Objects.open(tmp_path / "away")).history("live") == Channels(home).history("live")


def names_of(front: Front) -> list[str]:
    """The requests since the last call, sorted: manifests by number, and packs."""
    paths = sorted(request.removeprefix("GET /objects/weights/rl/bf16/") for request in front.requests)
    front.requests.clear()
    return [path.partition("-")[0] for path in paths]


def test_one_version_behind_needs_two_manifests_and_its_packs(tmp_path: Path) -> None:
    """Two round trips. A look that finds nothing takes one."""
    versions = history(3)
    home = Objects.open(tmp_path / "home")
    publisher = Publisher(WeightStore(home), "rl")
    publisher.publish(0, versions[0])
    with served(object_app(home)) as url, Front(url) as front:
        mirror = Mirror(Objects.open(front.url), Objects.open(tmp_path / "away"))
        assert mirror.copy("rl").versions == (Version("rl", 0),)
        mirror.copy("rl")  # this one also lists the source, which it will not do again soon
        for number in (1, 2):
            front.requests.clear()
            assert mirror.copy("rl").versions == ()
            assert names_of(front) == [f"manifests/000000000{number + ahead}.manifest" for ahead in (0, 1)]
            publisher.publish(number, versions[number])
            assert mirror.copy("rl").versions == (Version("rl", number),)
            manifests = [f"manifests/000000000{number + ahead}.manifest" for ahead in (0, 1)]
            assert names_of(front) == [*manifests, f"packs/000000000{number}"]


def test_a_region_far_behind_reads_manifests_many_at_a_time(tmp_path: Path) -> None:
    versions = publish_line(tmp_path / "home", 30, snapshot_every=100)
    home, away = Objects.open(tmp_path / "home"), Objects.open(tmp_path / "away")
    assert len(Mirror(home, away).copy("rl", number=0).versions) == 1
    with served(object_app(home)) as url, Front(url) as front:
        copied = Mirror(Objects.open(front.url), away).copy("rl")
        asked = names_of(front)
    assert [version.number for version in copied.versions] == list(range(1, 30))
    assert len([name for name in asked if name.startswith("packs")]) == 29
    assert len(asked) < 29 + 29 + 40 and len(set(asked)) == len(asked)  # none of them twice
    assert same(WeightStore(away).load(Version("rl", 29)), versions[29])


def test_an_interrupted_copy_continues(tmp_path: Path) -> None:
    versions = publish_line(tmp_path / "home", 4)
    home, away = Objects.open(tmp_path / "home"), Objects.open(tmp_path / "away")
    pack = delta_pack(tmp_path / "home", 2)
    whole = pack.read_bytes()
    pack.unlink()
    with pytest.raises(WeightsError, match="no object"):
        Mirror(home, away).copy("rl")
    assert WeightStore(away).numbers("rl") == [0, 1]
    pack.write_bytes(whole)
    away.put(f"weights/rl/bf16/packs/{pack.name}", whole)  # it was copied just before a power failure
    with served(object_app(home)) as url, Front(url) as front:
        copied = Mirror(Objects.open(front.url), away).copy("rl")
        assert [name for name in names_of(front) if name.startswith("packs")] == ["packs/0000000003"]
    assert copied.bytes == delta_pack(tmp_path / "home", 3).stat().st_size
    assert same(WeightStore(away).load(Version("rl", 3)), versions[3])


def test_damage_in_the_source_is_avoided(tmp_path: Path) -> None:
    """The delta of 2 is damaged; 3 has a snapshot. If no path leads further, everything before the damage is copied."""
    versions = publish_line(tmp_path / "home", 6, snapshot_every=3)
    home, away = Objects.open(tmp_path / "home"), Objects.open(tmp_path / "away")
    mirror = Mirror(home, away)
    mirror.copy("rl", number=1)
    delta_pack(tmp_path / "home", 2).write_bytes(b"damaged")
    broken = tmp_path / "home" / "weights" / "rl" / "bf16" / "manifests" / "0000000005.manifest"
    broken.write_bytes(b"half a mani")
    with pytest.raises(WeightsError, match=r"rl@5.*damaged"):
        mirror.copy("rl")
    assert WeightStore(away).numbers("rl") == [0, 1, 3, 4]
    assert same(WeightStore(away).load(Version("rl", 4)), versions[4])
    assert all(ok for _, ok, _ in WeightStore(away).verify("rl"))


def test_versions_after_a_gap_in_the_source_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_module, "_LISTING_SECONDS", 0.0)
    versions = publish_line(tmp_path / "home", 7, snapshot_every=3)
    home, away = Objects.open(tmp_path / "home"), Objects.open(tmp_path / "away")
    mirror = Mirror(home, away)
    mirror.copy("rl", number=1)
    for number in (2, 3, 4):
        home.delete(f"weights/rl/bf16/manifests/{number:010d}.manifest")
    assert mirror.copy("rl").versions == (Version("rl", 6),)
    assert same(WeightStore(away).load(Version("rl", 6)), versions[6])


def test_an_anchor_of_the_source_is_where_a_new_region_begins(tmp_path: Path) -> None:
    versions = publish_line(tmp_path / "home", 40, snapshot_every=100)
    home, away = Objects.open(tmp_path / "home"), Objects.open(tmp_path / "away")
    assert AnchorBuilder(WeightStore(home), "rl", every=19).poll() == 38
    copied = Mirror(home, away).copy("rl")
    assert [version.number for version in copied.versions] == [38, 39]
    assert WeightStore(away).anchors("rl") == [38]
    assert same(WeightStore(away).load(Version("rl", 39)), versions[39])


def test_a_source_that_cannot_be_reached_is_not_taken_for_damage(tmp_path: Path) -> None:
    """The link is lost in the middle of a plan: the snapshot is not fetched instead of the unseen deltas."""
    publish_line(tmp_path / "home", 20, snapshot_every=100)
    home, away = Objects.open(tmp_path / "home"), Objects.open(tmp_path / "away")
    with served(object_app(home)) as url, Front(url) as front:
        mirror = Mirror(Objects.open(front.url, patience=0.3), away)

        def lose_the_link(key: str) -> bytes:
            data = get(key)
            front.mode = "busy"  # from the second manifest on
            return data

        get, mirror.source.objects.get = mirror.source.objects.get, lose_the_link  # type: ignore[method-assign]
        with pytest.raises(StorageError, match="503"):
            mirror.copy("rl", number=19)
    assert away.list("weights") == []


def test_between_buckets(tmp_path: Path) -> None:
    home = Objects.open(new_bucket(), options=s3_options(s3_server()))
    away = Objects.open(new_bucket(), options=s3_options(s3_server()))
    versions = history(3)
    publisher = Publisher(WeightStore(home), "rl", snapshot_every=100)
    for number, tensors in enumerate(versions):
        publisher.publish(number, tensors)
    Channels(home).move("live", Version("rl", 1))
    mirror = Mirror(home, away)
    assert mirror.copy_channel("live") == Version("rl", 1)
    assert [version.number for version in mirror.copy("rl").versions] == [2]
    assert Channels(away).get("live") == Version("rl", 1)
    assert same(WeightStore(away).load(Version("rl", 2)), versions[2])


def test_a_delta_is_decoded_while_the_rest_is_being_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last pack is missing at first. Until it arrives the version before is served, also when asked again."""
    monkeypatch.setattr(packs_module, "SMALLEST_PACK_BYTES", 1)
    monkeypatch.setattr(packs_module, "RUN_BYTES", 1)
    versions = publish_line(tmp_path / "home", 2)
    follower = away_follower(str(tmp_path / "home"), tmp_path / "away")
    versions.append(train_step(versions[1], 2))
    assert (update := follower.poll()) is not None and update.policy.number == 1
    manifest = Publisher(WeightStore(Objects.open(tmp_path / "home")), "rl").publish(2, versions[2])
    assert manifest.delta is not None and len(manifest.delta.packs) > 2
    last = tmp_path / "home" / pack_key(manifest, manifest.delta.packs[-1])
    whole = last.read_bytes()
    last.unlink()

    assert follower.poll() is None
    assert follower.problem is not None and "no object" in follower.problem
    image = follower._course.host
    assert image is not None and image.manifest is None  # half of it is the new version
    served = follower.again()
    assert served is not None and served.policy.number == 1 and same(served.tensors, versions[1])

    last.write_bytes(whole)
    follower.hint()
    arrived = follower.poll()
    assert arrived is not None and arrived.policy == manifest.policy and same(arrived.tensors, versions[2])
    assert arrived.bytes <= manifest.delta.bytes
