import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import Channels, HostTensor, LineFollower, Publisher, Tensors, Update, WeightStore
from rollmill.weights.reading import line_follower as follower_module
from rollmill.weights.reading.patches import Patches
from tests.weights.build import delta_pack, history, make_tensors, publish_line, same


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "_RETRY_SECONDS", (0.001, 0.001))


def follow(path: Path, line: str = "rl") -> LineFollower:
    return LineFollower(WeightStore(Objects.open(path)), line)


def poll(follower: LineFollower) -> Update:
    time.sleep(0.002)  # longer than the back-off
    update = follower.poll()
    assert update is not None, follower.problem
    return update


def copy_of(tensors: Tensors) -> dict[str, HostTensor]:
    return {name: HostTensor(t.dtype, t.shape, t.data.copy()) for name, t in tensors.items()}


def apply_patches(engine: dict[str, HostTensor], update: Update) -> None:
    """Applies patches like an engine."""
    assert update.patches is not None
    for name, patches in update.patches.items():
        if patches is None:
            np.copyto(engine[name].data, update.tensors[name].data)
        for start, indices, values in patches or ():
            engine[name].data.view(values.dtype)[start + indices.astype(np.int64)] = values


def test_it_follows_by_deltas_and_reads_little(tmp_path: Path) -> None:
    versions = history(6)
    store = WeightStore(Objects.open(tmp_path))
    publisher, follower = Publisher(store, "rl", snapshot_every=3), follow(tmp_path)
    assert follower.poll() is None and follower.problem is None and follower.current is None
    for number, tensors in enumerate(versions):
        manifest = publisher.publish(number, tensors)
        update = poll(follower)
        assert update.policy == follower.current == manifest.policy
        assert same(update.tensors, tensors)
        assert update.created_at == manifest.created_at
        if manifest.delta:  # version 3 also has a snapshot, which is not downloaded
            assert update.bytes == manifest.delta.bytes < manifest.full_bytes / 8
        assert follower.poll() is None


def test_patches_say_exactly_what_changed(tmp_path: Path) -> None:
    versions = history(3)
    versions.append({**versions[2], "embed.weight": make_tensors(5)["embed.weight"]})
    publisher, follower = Publisher(WeightStore(Objects.open(tmp_path)), "rl"), follow(tmp_path)
    publisher.publish(0, versions[0])
    update = poll(follower)
    assert update.patches is None and update.base is None
    engine = copy_of(update.tensors)
    for number in (1, 2, 3):
        publisher.publish(number, versions[number])
        before, update = update, poll(follower)
        assert update.base == before.policy
        apply_patches(engine, update)
        assert same(engine, versions[number])
    assert update.patches == {"embed.weight": None}  # every element changed: copied whole
    with pytest.raises(ValueError, match="read-only"):
        update.tensors["embed.weight"].data[0] = 1


def test_catching_up_takes_the_cheapest_path(tmp_path: Path) -> None:
    versions = publish_line(tmp_path, 10, snapshot_every=5)
    store = WeightStore(Objects.open(tmp_path))
    new = follow(tmp_path)
    update = poll(new)
    deltas = [store.manifest(Version("rl", number)).encoding("delta").bytes for number in range(1, 10)]
    assert same(update.tensors, versions[9])
    assert update.bytes == store.manifest(Version("rl", 5)).encoding("snapshot").bytes + sum(deltas[5:])

    behind = follow(tmp_path)
    behind._course.host = WeightStore(Objects.open(tmp_path)).hold(Version("rl", 3))
    update = poll(behind)
    assert same(update.tensors, versions[9])
    assert update.bytes == sum(deltas[3:])


def truncate(pack: Path) -> None:
    pack.write_bytes(pack.read_bytes()[:-3])


def flip(pack: Path) -> None:
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 4
    pack.write_bytes(data)


def exchange(pack: Path) -> None:
    """Writes the bytes of another pack under this pack's name."""
    pack.write_bytes(next(other for other in sorted(pack.parent.iterdir()) if other != pack).read_bytes())


@pytest.mark.parametrize("damage", [truncate, flip, exchange, Path.unlink])
def test_a_damaged_delta_keeps_the_last_good_version_until_it_is_repaired(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    versions = history(3)
    publisher, follower = Publisher(WeightStore(Objects.open(tmp_path)), "rl"), follow(tmp_path)
    publisher.publish(0, versions[0])
    good = poll(follower)
    publisher.publish(1, versions[1])
    pack = delta_pack(tmp_path, 1)
    whole = pack.read_bytes()
    damage(pack)
    for _ in range(3):
        time.sleep(0.002)
        assert follower.poll() is None
        assert follower.current == good.policy
        assert follower.problem and "rl@1" in follower.problem and "serving rl@0" in follower.problem
    pack.write_bytes(whole)
    assert same(poll(follower).tensors, versions[1])
    assert follower.problem is None


@pytest.mark.parametrize("damage", [truncate, flip, exchange, Path.unlink])
def test_a_damaged_delta_is_healed_by_the_next_snapshot(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    versions = history(6)
    publisher, follower = Publisher(WeightStore(Objects.open(tmp_path)), "rl", snapshot_every=4), follow(tmp_path)
    for number in range(2):
        publisher.publish(number, versions[number])
    assert same(poll(follower).tensors, versions[1])
    publisher.publish(2, versions[2])
    publisher.publish(3, versions[3])
    damage(delta_pack(tmp_path, 2))
    time.sleep(0.002)
    assert follower.poll() is None and follower.problem
    publisher.publish(4, versions[4])
    publisher.publish(5, versions[5])
    assert same(poll(follower).tensors, versions[5])
    assert follower.problem is None


@given(bit=st.integers(0, 10**9))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_wrong_payloads_are_refused_even_when_names_and_seals_fit(tmp_path: Path, bit: int) -> None:
    """Another region may send a pack with the digest it claims and a sealed manifest: still no wrong weights."""
    path = Path(tempfile.mkdtemp(dir=tmp_path))
    versions = publish_line(path, 2)
    pack, key = delta_pack(path, 1), path / "weights/rl/bf16/manifests/0000000001.manifest"
    data = bytearray(pack.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    digest = blake3(data).hexdigest()
    body = key.read_bytes().partition(b"\n")[0].replace(pack.name.partition("-")[2].encode(), digest.encode())
    key.write_bytes(body + b"\n" + blake3(body).hexdigest().encode() + b"\n")
    pack.with_name(f"0000000001-{digest}").write_bytes(data)
    follower = follow(path)
    update = poll(follower)
    assert same(update.tensors, versions[update.policy.number])  # a padding bit may be flipped without harm
    if update.policy.number == 0:
        assert follower.problem and "the delta of rl@1 (bf16) is unusable" in follower.problem


def test_the_newest_version_before_the_damage_is_served(tmp_path: Path) -> None:
    versions = publish_line(tmp_path, 6)
    flip(delta_pack(tmp_path, 4))
    follower = follow(tmp_path)
    update = poll(follower)
    assert update.policy.number == 3 and same(update.tensors, versions[3])
    assert follower.problem and "rl@5 cannot be restored, serving rl@3" in follower.problem


def test_a_damaged_manifest_is_a_damaged_version(tmp_path: Path) -> None:
    versions = publish_line(tmp_path, 3)
    flip(tmp_path / "weights/rl/bf16/manifests/0000000002.manifest")
    follower = follow(tmp_path)
    assert same(poll(follower).tensors, versions[1])
    assert follower.problem and "manifest of rl@2" in follower.problem


def test_a_damaged_snapshot_is_avoided(tmp_path: Path) -> None:
    versions = publish_line(tmp_path, 6, snapshot_every=4)
    manifest = WeightStore(Objects.open(tmp_path)).manifest(Version("rl", 4))
    flip(tmp_path / f"weights/rl/bf16/packs/0000000004-{manifest.encoding('snapshot').packs[0].digest}")
    update = poll(follow(tmp_path))
    assert update.policy.number == 5 and same(update.tensors, versions[5])
    assert same(WeightStore(Objects.open(tmp_path)).load(Version("rl", 5)), versions[5])


def test_fifty_versions_in_one_update(tmp_path: Path) -> None:
    """After a link was down for a while: one update, and one pause, for all versions in between."""
    versions = history(52)
    publisher, follower = Publisher(WeightStore(Objects.open(tmp_path)), "rl", snapshot_every=100), follow(tmp_path)
    publisher.publish(0, versions[0])
    publisher.publish(1, versions[1])
    first = poll(follower)
    engine = copy_of(first.tensors)
    for number in range(2, 52):
        publisher.publish(number, versions[number])
    update = poll(follower)
    assert (update.policy.number, update.base) == (51, first.policy)
    apply_patches(engine, update)
    assert same(engine, versions[51])
    assert follower.poll() is None


def test_patches_are_bounded(tmp_path: Path) -> None:
    versions = history(4)
    publisher, follower = Publisher(WeightStore(Objects.open(tmp_path)), "rl"), follow(tmp_path)
    publisher.publish(0, versions[0])
    engine = copy_of(poll(follower).tensors)
    follower._course.patches = Patches(budget=3000)
    for number in (1, 2, 3):
        publisher.publish(number, versions[number])
    update = poll(follower)
    assert update.patches is not None
    kept = [patch for patches in update.patches.values() for patch in patches or ()]
    assert kept and sum(patch.bytes for patch in kept) <= 3000
    assert None in update.patches.values()
    apply_patches(engine, update)
    assert same(engine, versions[3])


def bad_memory(follower: LineFollower, name: str) -> None:
    assert follower._course.host is not None
    follower._course.host._memory[name][7] ^= 16


def test_memory_that_went_bad_is_repaired(tmp_path: Path) -> None:
    versions = history(3)
    publisher, follower = Publisher(WeightStore(Objects.open(tmp_path)), "rl"), follow(tmp_path)
    publisher.publish(0, versions[0])
    engine = copy_of(poll(follower).tensors)
    bad_memory(follower, "embed.weight")
    publisher.publish(1, versions[1])
    update = poll(follower)
    assert same(update.tensors, versions[1]) and follower.problem is None
    apply_patches(engine, update)
    assert same(engine, versions[1])


def test_an_engine_that_could_not_use_an_update_gets_everything_again(tmp_path: Path) -> None:
    versions = history(2)
    publisher, follower = Publisher(WeightStore(Objects.open(tmp_path)), "rl"), follow(tmp_path)
    assert follower.again() is None
    for number in range(2):
        publisher.publish(number, versions[number])
    first = poll(follower)
    bad_memory(follower, "layers.0.norm")  # no delta touches it, so only hashing finds it
    update = follower.again()
    assert update is not None and (update.policy, update.patches, update.base) == (first.policy, None, None)
    assert same(update.tensors, versions[1])


def test_a_failed_catch_up_serves_nothing_on_the_way_to_a_channels_version(tmp_path: Path) -> None:
    versions = publish_line(tmp_path, 5)
    channels, follower = Channels(Objects.open(tmp_path)), follow(tmp_path)
    follower.follow_channel("live")
    channels.move("live", Version("rl", 1))
    first = poll(follower)
    engine = copy_of(first.tensors)
    pack = delta_pack(tmp_path, 3)
    whole = pack.read_bytes()
    flip(pack)
    channels.move("live", Version("rl", 4))
    time.sleep(0.002)
    assert follower.poll() is None and follower.current == first.policy  # its image is at 2, which nobody requested
    assert follower.problem and "rl@4 cannot be restored, serving rl@1" in follower.problem
    pack.write_bytes(whole)
    update = poll(follower)
    assert update.policy.number == 4 and update.base == first.policy
    apply_patches(engine, update)
    assert same(engine, versions[4])


def test_a_number_missing_from_a_line_does_not_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = history(5)
    publisher, follower = Publisher(WeightStore(Objects.open(tmp_path)), "rl", snapshot_every=3), follow(tmp_path)
    publisher.publish(0, versions[0])
    poll(follower)
    for number in (1, 2, 3, 4):
        publisher.publish(number, versions[number])
    (tmp_path / "weights/rl/bf16/manifests/0000000001.manifest").unlink()
    assert follower.poll() is None
    monkeypatch.setattr("rollmill.weights.reading.weight_store._LISTING_SECONDS", 0.0)
    assert same(poll(follower).tensors, versions[4])


def test_following_a_channel_back_and_forth_and_across_lines(tmp_path: Path) -> None:
    versions = publish_line(tmp_path, 4, line="midtrain")
    objects = Objects.open(tmp_path)
    reinforced = Publisher(WeightStore(objects), "rl")
    reinforced.publish(0, versions[3], parent=Version("midtrain", 3))
    channels, follower = Channels(objects), follow(tmp_path)
    follower.follow_channel("live")
    assert follower.poll() is None
    for line, number in (("midtrain", 3), ("midtrain", 1), ("midtrain", 2)):
        channels.move("live", Version(line, number))
        update = poll(follower)
        assert (update.policy.line, update.policy.number) == (line, number)
        assert same(update.tensors, versions[number])
    channels.move("live", Version("midtrain", 3))
    poll(follower)
    channels.move("live", Version("rl", 0))
    update = poll(follower)
    assert (update.policy.line, update.bytes, update.patches) == ("rl", 0, {})  # the same bytes under another name
    assert follower.poll() is None


def test_a_bad_channel_target_keeps_what_is_served(tmp_path: Path) -> None:
    versions = publish_line(tmp_path, 3)
    channels, follower = Channels(Objects.open(tmp_path)), follow(tmp_path)
    follower.follow_channel("live")
    channels.move("live", Version("rl", 1))
    poll(follower)
    flip(delta_pack(tmp_path, 2))
    channels.move("live", Version("rl", 2))
    time.sleep(0.002)
    assert follower.poll() is None
    assert follower.problem and follower.current and follower.current.number == 1
    channels.move("live", Version("rl", 0))
    assert same(poll(follower).tensors, versions[0])
