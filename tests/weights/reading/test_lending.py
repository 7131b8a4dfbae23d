"""Engines that are lent to another line and come back, and the leases of followers."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from rollmill.errors import StorageError, WeightsError
from rollmill.storage.object_server import object_app
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import LineFollower, Publisher, Update, WeightStore
from rollmill.weights.reading.leases import Leases
from tests.storage.serving import served
from tests.weights.build import history, make_tensors, same, train_step
from tests.weights.reading.test_line_follower import apply_patches, copy_of, poll


def lines(path: Path, number: int = 3) -> tuple[list, list, Publisher]:
    """Production, and a training line that started from its second version."""
    store = WeightStore(Objects.open(path))
    versions = history(number + 3)
    production = Publisher(store, "prod")
    for n in range(number):
        production.publish(n, versions[n])
    trained = [versions[1], train_step(versions[1], 100)]
    training = Publisher(store, "rl")
    for n, tensors in enumerate(trained):
        training.publish(n, tensors, Version("prod", 1))
    return versions, trained, production


def test_a_lent_engine_returns_without_a_store(tmp_path: Path) -> None:
    versions, trained, production = lines(tmp_path / "store")
    follower = LineFollower(WeightStore(Objects.open(tmp_path / "store")), "prod")
    first = poll(follower)
    engine = copy_of(first.tensors)
    follower.lend("rl")
    assert follower.lent == "rl"
    update = poll(follower)
    assert (update.policy.line, update.policy.number, update.base) == ("rl", 1, first.policy)
    apply_patches(engine, update)
    assert same(engine, trained[1])
    with pytest.raises(WeightsError, match="already lent to rl"):
        follower.lend("other")

    (tmp_path / "store").rename(tmp_path / "away")  # nothing can be downloaded
    back = follower.recall()
    assert back is not None and (back.policy, back.base, back.bytes) == (first.policy, update.policy, 0)
    apply_patches(engine, back)
    assert same(engine, versions[2])
    shutil.rmtree(tmp_path / "store", ignore_errors=True)
    (tmp_path / "away").rename(tmp_path / "store")

    assert follower.lent is None and follower.recall() is None
    production.publish(3, versions[3])
    update = poll(follower)
    assert update.base == first.policy and update.bytes == production.last.delta.bytes  # type: ignore[union-attr]
    apply_patches(engine, update)
    assert same(engine, versions[3])


def test_lending_to_a_line_of_another_shape_or_to_none(tmp_path: Path) -> None:
    versions, _, _ = lines(tmp_path)
    store = WeightStore(Objects.open(tmp_path))
    wide = make_tensors(3, {"embed.weight": (300, 128)})
    Publisher(store, "wide").publish(0, wide)
    follower = LineFollower(store, "prod")
    first = poll(follower)
    follower.lend("wide")
    update = poll(follower)
    assert update.patches is None and same(update.tensors, wide)
    back = follower.recall()
    assert back is not None and back.patches is None and same(back.tensors, versions[2])
    follower.lend("nowhere")
    assert follower.poll() is None and follower.current == first.policy
    back = follower.recall()
    assert back is not None and back.patches == {} and back.policy == first.policy  # it never left


def test_a_recall_in_the_middle_of_a_broken_lending(tmp_path: Path) -> None:
    versions, _, _ = lines(tmp_path)
    for pack in (tmp_path / "weights/rl/bf16/packs").iterdir():
        pack.write_bytes(b"")
    follower = LineFollower(WeightStore(Objects.open(tmp_path)), "prod")
    first = poll(follower)
    follower.lend("rl")
    assert follower.poll() is None and follower.current == first.policy
    assert follower.problem and "rl@1 cannot be restored, serving prod@2" in follower.problem
    back = follower.recall()
    assert back is not None and same(back.tensors, versions[2]) and follower.problem is None


def held(path: Path, line: str) -> dict[str, int]:
    return {lease.holder: lease.number for lease in Leases(Objects.open(path), line).held()}


def test_leases_hold_the_served_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions, _, production = lines(tmp_path)
    store = WeightStore(Objects.open(tmp_path))
    follower = LineFollower(store, "prod", holder="engine-1", about={"region": "eu"})
    poll(follower)
    (lease,) = Leases(store.objects, "prod").held()
    assert (lease.holder, lease.number, lease.about["region"]) == ("engine-1", 2, "eu")
    production.publish(3, versions[3])
    poll(follower)
    assert held(tmp_path, "prod") == {"engine-1": 3}
    follower.lend("rl")
    poll(follower)
    assert held(tmp_path, "prod") == {"engine-1": 3} and held(tmp_path, "rl") == {"engine-1": 1}
    follower.recall()
    assert held(tmp_path, "rl") == {}
    # renewed well before it ends
    before = store.objects.modified("weights/prod/bf16/leases/engine-1.json")
    monkeypatch.setattr(follower._leases, "_seconds", 0.01)
    time.sleep(0.02)
    assert follower.poll() is None
    assert store.objects.modified("weights/prod/bf16/leases/engine-1.json") != before
    follower.close()
    assert held(tmp_path, "prod") == {}
    follower.poll()
    assert held(tmp_path, "prod") == {}


def test_a_lease_that_cannot_be_written_is_reported_and_does_not_stop_it(tmp_path: Path) -> None:
    versions, _, _ = lines(tmp_path)
    follower = LineFollower(WeightStore(Objects.open(tmp_path)), "prod", holder="engine-1")
    (tmp_path / "weights/prod/bf16/leases").write_text("in the way of a folder")
    update = poll(follower)
    assert same(update.tensors, versions[2])
    assert follower.problem and "the lease on prod@2 cannot be written" in follower.problem
    (tmp_path / "weights/prod/bf16/leases").unlink()
    assert follower.poll() is None and follower.problem is None
    assert held(tmp_path, "prod") == {"engine-1": 2}


def test_no_lease_is_written_over_http(tmp_path: Path) -> None:
    versions, _, _ = lines(tmp_path)
    with served(object_app(Objects.open(tmp_path))) as url:
        objects = Objects.open(url)
        with pytest.raises(StorageError):
            Leases(objects, "prod").hold("engine-1", 2, 10)
        follower = LineFollower(WeightStore(objects), "prod", holder="engine-1")
        update: Update = poll(follower)
        assert same(update.tensors, versions[2]) and follower.problem is None
        follower.close()


def test_waiting_ends_when_the_next_version_exists(tmp_path: Path) -> None:
    versions, _, production = lines(tmp_path)
    follower = LineFollower(WeightStore(Objects.open(tmp_path)), "prod")
    poll(follower)
    production.publish(3, versions[3])
    began = time.monotonic()
    follower.wait(60)
    assert time.monotonic() - began < 30
    assert poll(follower).policy.number == 3
