import signal
from pathlib import Path

import numpy as np
import pytest

from rollmill.errors import WeightsError
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import HostTensor, Publisher, Tensors, WeightStore
from rollmill.weights.format import tensors as tensors_module
from rollmill.weights.format.manifest import describe, layout_of, root_digest
from rollmill.weights.writing.sharded import PartPublisher, part_key
from tests.weights.build import history, make_tensors, publish_line, same, train_step
from tests.weights.worker import owned_by, run_ranks


@pytest.fixture(autouse=True)
def small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Tensors of several chunks, so that ranks share them. Other processes have chunks of the usual size."""
    if "processes" in request.node.name:
        yield
        return
    monkeypatch.setattr(tensors_module, "CHUNK_ELEMENTS", 4096)
    tensors_module.chunk_ranges.cache_clear()
    yield
    tensors_module.chunk_ranges.cache_clear()


def start(path: Path, world: int, tensors: Tensors, **settings) -> list[PartPublisher]:
    """The ranks of a run that has taken over the line."""
    layout = layout_of(tensors)
    ranks = [
        PartPublisher(WeightStore(Objects.open(path)), "rl", layout, rank, world, **settings) for rank in range(world)
    ]
    standing = ranks[0].resume(owned_by(tensors, 0, world))
    for rank in ranks[1:]:
        rank.resume(owned_by(tensors, rank.rank, world), standing)
    return ranks


def publish(ranks: list[PartPublisher], number: int, tensors: Tensors):
    for rank in ranks:
        rank.publish_part(number, owned_by(tensors, rank.rank, len(ranks)))
    manifest = ranks[0].commit_parts(number, metadata={"step": number}, wait=0)
    assert [rank.settle(number, wait=0) for rank in ranks] == [manifest] * len(ranks)
    return manifest


def test_ranks_publish_what_a_single_publisher_would(tmp_path: Path) -> None:
    versions = history(5)
    ranks = start(tmp_path / "parts", 3, versions[0], snapshot_every=3)
    single = Publisher(WeightStore(Objects.open(tmp_path / "single")), "rl", snapshot_every=3)
    for number, tensors in enumerate(versions):
        ours, theirs = publish(ranks, number, tensors), single.publish(number, tensors, metadata={"step": number})
        for name in (
            "number",
            "digest",
            "tensors",
            "parent",
            "first",
            "origin",
            "metadata",
            "epoch",
            "kind",
            "density",
        ):
            assert getattr(ours, name) == getattr(theirs, name)
    store = WeightStore(Objects.open(tmp_path / "parts"))
    assert list(store.verify("rl")) == [(Version("rl", number), True, "") for number in range(5)]
    assert same(store.load(Version("rl", 4)), versions[4])
    # each rank holds only its own chunks, and continues after a single publisher
    assert sum(chunk.nbytes for chunk in ranks[1]._base.values()) < ranks[1].last.full_bytes / 2
    other = start(tmp_path / "single", 2, versions[4])
    assert publish(other, 5, train_step(versions[4], 5)).delta is not None
    assert other[0].problem is other[1].problem is None
    assert all(ok for _, ok, _ in WeightStore(Objects.open(tmp_path / "single")).verify("rl"))


def test_only_what_a_rank_owns_is_read_back(tmp_path: Path) -> None:
    """A restarted rank reads only its own chunks, verified, by any path."""
    versions = publish_line(tmp_path, 6, snapshot_every=4)
    ranks = start(tmp_path, 2, versions[5])
    for rank in ranks:
        owned = owned_by(versions[5], rank.rank, 2)
        rows = {row.place: (row.tensor, row.chunk) for row in rank._rows}
        assert {rows[place] for place in rank._base} == owned.keys()
        assert all(np.array_equal(data, owned[rows[place]]) for place, data in rank._base.items())


def test_a_rank_whose_base_is_lost_sends_its_chunks_whole(tmp_path: Path) -> None:
    versions = publish_line(tmp_path, 2)
    for pack in (tmp_path / "weights/rl/bf16/packs").iterdir():
        pack.write_bytes(b"gone")
    ranks = start(tmp_path, 2, versions[1])
    assert all(rank.problem and "unusable" in rank.problem for rank in ranks)
    ranks[1]._base = {row.place: owned_by(versions[1], 1, 2)[row.tensor, row.chunk].copy()
                      for row in ranks[1]._owned_rows(owned_by(versions[1], 1, 2))}  # fmt: skip
    manifest = publish(ranks, 2, train_step(versions[1], 2))
    assert manifest.delta is not None
    assert {payload.coding for payload in manifest.delta.payloads} == {"raw", "sparse"}


def test_a_changed_layout_is_published_whole(tmp_path: Path) -> None:
    versions = publish_line(tmp_path, 1)
    wider = {**versions[0], "new": HostTensor("fp32", (3,), np.arange(12, dtype=np.uint8))}
    ranks = start(tmp_path, 2, wider)
    assert publish(ranks, 1, wider).delta is None
    assert publish(ranks, 2, train_step_of(wider)).delta is not None
    assert all(ok for _, ok, _ in WeightStore(Objects.open(tmp_path)).verify("rl"))


def train_step_of(tensors: Tensors) -> dict[str, HostTensor]:
    return {name: HostTensor(t.dtype, t.shape, np.roll(t.data, t.width)) for name, t in tensors.items()}


def test_the_missing_rank_is_named_and_nothing_is_published(tmp_path: Path) -> None:
    versions = history(2)
    ranks = start(tmp_path, 4, versions[0])
    for rank in (0, 1, 3):
        ranks[rank].publish_part(0, owned_by(versions[0], rank, 4))
    with pytest.raises(WeightsError, match="no part of rank 2 within") as caught:
        ranks[0].commit_parts(0, wait=0.05)
    assert caught.value.hint
    with pytest.raises(WeightsError, match="was not committed within"):
        ranks[3].settle(0, wait=0.05)
    store = WeightStore(Objects.open(tmp_path))
    assert store.head("rl") is None and ranks[3]._base is None
    ranks[2].publish_part(0, owned_by(versions[0], 2, 4))
    assert ranks[0].commit_parts(0, wait=0).digest == root_digest(describe(versions[0]))


def test_each_chunk_exactly_once(tmp_path: Path) -> None:
    tensors = make_tensors()
    for name, chunks in {
        "twice": owned_by(tensors, 0, 2) | owned_by(tensors, 1, 2),
        "not at all": dict(list(owned_by(tensors, 1, 2).items())[:-1]),
    }.items():
        ranks = start(tmp_path / name, 2, tensors)
        ranks[0].publish_part(0, owned_by(tensors, 0, 2))
        ranks[1].publish_part(0, chunks)
        expected = "was published by rank 0 and rank 1" if name == "twice" else "no rank published chunk"
        with pytest.raises(WeightsError, match=expected):
            ranks[0].commit_parts(0, wait=0)
    with pytest.raises(WeightsError, match=r"there is no chunk 99 of 'embed\.weight'"):
        ranks[0].publish_part(0, {("embed.weight", 99): b""})
    with pytest.raises(WeightsError, match="bytes, not 3"):
        ranks[0].publish_part(0, {("scale", 0): b"abc"})


def test_parts_are_not_trusted(tmp_path: Path) -> None:
    tensors = make_tensors()
    ranks = start(tmp_path, 2, tensors)
    for rank in ranks:
        rank.publish_part(0, owned_by(tensors, rank.rank, 2))
    objects = Objects.open(tmp_path)
    key, other = (part_key("rl", "bf16", 0, 1, rank) for rank in (1, 0))
    good = objects.get(key)
    for data in (b"", good[:-5], good.replace(b'"rank":1', b'"rank":0'), objects.get(other)):
        objects.put(key, data)
        with pytest.raises(WeightsError, match="part of rank 1"):
            ranks[0].commit_parts(0, wait=0)
    objects.put(key, good)
    ranks[0].commit_parts(0, wait=0)
    with pytest.raises(WeightsError, match="is at 0"):
        ranks[0].settle(0)
        ranks[0].publish_part(2, owned_by(tensors, 0, 2))


def test_a_restarted_rank_must_produce_the_same_chunks(tmp_path: Path) -> None:
    versions = history(2)
    ranks = start(tmp_path, 2, versions[0])
    ranks[1].publish_part(0, owned_by(versions[0], 1, 2))
    again = start(tmp_path, 2, versions[0])  # another run has another epoch, and nothing of the first is in its way
    publish(again, 0, versions[0])
    for rank in again:
        rank.publish_part(1, owned_by(versions[1], rank.rank, 2))
        rank.publish_part(1, owned_by(versions[1], rank.rank, 2))
    with pytest.raises(WeightsError, match="rank 1 wrote other chunks of rl@1 before"):
        again[1].publish_part(1, owned_by(train_step(versions[0], 9), 1, 2))
    with pytest.raises(WeightsError, match="fenced"):
        ranks[0].publish_part(0, owned_by(versions[0], 0, 2))


def test_a_version_that_exists_is_compared(tmp_path: Path) -> None:
    versions = publish_line(tmp_path, 3)
    ranks = start(tmp_path, 2, versions[2])
    for number in (1, 2):
        assert [r.publish_part(number, owned_by(versions[number], r.rank, 2)) for r in ranks] == [None, None]
        assert ranks[0].commit_parts(number).number == ranks[1].settle(number, wait=0).number == number
    with pytest.raises(WeightsError, match=r"diverged.*other chunks on rank 1"):
        ranks[1].publish_part(2, owned_by(versions[1], 1, 2))
    assert publish(ranks, 3, train_step(versions[2], 3)).delta is not None


@pytest.mark.slow
def test_four_processes_with_kills_and_a_restart(tmp_path: Path) -> None:
    versions = history(4)
    store = WeightStore(Objects.open(tmp_path))
    for killed, kill_at in ((2, 21), (0, 31), (3, 27)):
        codes = run_ranks(tmp_path, 4, 3, killed, kill_at)
        assert codes[killed] == -signal.SIGKILL
        assert all(ok for _, ok, _ in store.verify("rl"))
        assert all(same(store.load(Version("rl", number)), versions[number]) for number in store.numbers("rl"))
    assert run_ranks(tmp_path, 4, 3) == [0, 0, 0, 0]
    assert store.numbers("rl") == [0, 1, 2, 3]
    assert all(same(WeightStore(store.objects).load(Version("rl", n)), versions[n]) for n in range(4))
