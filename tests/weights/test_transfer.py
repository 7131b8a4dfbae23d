import time
from pathlib import Path

import pytest

from rollmill.errors import WeightsError
from rollmill.storage.http import object_app
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import Channels, Follower, Mirror, Publisher, WeightStore
from rollmill.weights import follower as follower_module
from tests.storage.serving import served
from tests.weights.build import delta_pack, history, make_tensors, publish_line, same


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "_FIRST_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(follower_module, "_LAST_RETRY_SECONDS", 0.001)


def away_follower(url: str, path: Path) -> Follower:
    own = Objects.open(path)
    return Follower(WeightStore(own), "rl", mirror=Mirror(Objects.open(url), own))


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

        restarted = away_follower(url, tmp_path / "away").poll()  # wants that snapshot: it is fetched now
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


def test_a_region_that_cannot_be_reached_only_delays(tmp_path: Path) -> None:
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
