import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmill.errors import StorageError, WeightsError
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import HostTensor, Manifest, OwnChunks, Publisher, Tensors, WeightStore
from rollmill.weights.format import tensors as tensors_module
from rollmill.weights.format.manifest import describe, root_digest
from rollmill.weights.writing.publisher import Peers
from tests.weights.build import history, make_tensors, publish_line, same, train_step
from tests.weights.ranks import own_chunks, together
from tests.weights.worker import run_ranks


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


class Line:
    """One rank's publisher of a line that its run has taken over."""

    def __init__(self, path: Path, ranks: Peers, tensors: Tensors, **settings: Any) -> None:
        self.ranks = ranks
        self.publisher = Publisher(WeightStore(Objects.open(path)), "rl", ranks=ranks, **settings)
        self.publisher.resume(self.own(tensors).chunks.keys())

    def own(self, tensors: Tensors) -> OwnChunks:
        return own_chunks(tensors, self.ranks.rank, self.ranks.size)

    def publish(self, number: int, tensors: Tensors) -> Manifest:
        return self.publisher.publish(number, self.own(tensors), metadata={"step": number})


def on_ranks(path: Path, size: int, tensors: Tensors, work: Callable[[Line], Any], **settings: Any) -> list[Any]:
    return together(size, lambda ranks: work(Line(path, ranks, tensors, **settings)))


def test_ranks_publish_what_a_single_publisher_would(tmp_path: Path) -> None:
    versions = history(5)

    def publish(line: Line) -> list[Manifest]:
        found = [line.publish(number, tensors) for number, tensors in enumerate(versions)]
        # each rank holds only its own chunks
        base, last = line.publisher._base, line.publisher.last
        assert base is not None and last is not None
        assert sum(chunk.nbytes for chunk in base.values()) < last.full_bytes / 2
        return found

    ours = on_ranks(tmp_path / "ranks", 3, versions[0], publish, snapshot_every=3)
    assert ours[0] == ours[1] == ours[2]
    single = Publisher(WeightStore(Objects.open(tmp_path / "single")), "rl", snapshot_every=3)
    names = ("number", "digest", "tensors", "parent", "first", "origin", "metadata", "epoch", "kind", "density")
    for number, tensors in enumerate(versions):
        theirs = single.publish(number, tensors, metadata={"step": number})
        assert all(getattr(ours[0][number], name) == getattr(theirs, name) for name in names)
    store = WeightStore(Objects.open(tmp_path / "ranks"))
    assert list(store.verify("rl")) == [(Version("rl", number), True, "") for number in range(5)]
    assert same(store.load(Version("rl", 4)), versions[4])

    def go_on(line: Line) -> Manifest:
        """After a single publisher."""
        assert line.publisher.problem is None
        return line.publish(5, train_step(versions[4], 5))

    assert all(manifest.delta is not None for manifest in on_ranks(tmp_path / "single", 2, versions[4], go_on))
    assert all(ok for _, ok, _ in WeightStore(Objects.open(tmp_path / "single")).verify("rl"))


def test_only_what_a_rank_owns_is_read_back(tmp_path: Path) -> None:
    """A restarted rank reads only its own chunks, verified, by any path."""
    versions = publish_line(tmp_path, 6, snapshot_every=4)

    def check(line: Line) -> None:
        base, owned = line.publisher._base, line.own(versions[5]).chunks
        assert base is not None and len(base) == len(owned)
        assert all(np.array_equal(data, own) for data, own in zip(base.values(), owned.values(), strict=True))

    on_ranks(tmp_path, 2, versions[5], check)


def test_a_rank_whose_base_is_lost_sends_its_chunks_whole(tmp_path: Path) -> None:
    versions = publish_line(tmp_path, 2)
    kept = WeightStore(Objects.open(tmp_path)).load(Version("rl", 1))
    for pack in (tmp_path / "weights/rl/bf16/packs").iterdir():
        pack.write_bytes(b"gone")

    def publish(line: Line) -> Manifest:
        assert line.publisher.problem and "unusable" in line.publisher.problem
        if line.ranks.rank == 1:
            places = range(1, sum(len(each.chunks()) for each in kept.values()), 2)
            chunks = line.own(kept).chunks.values()
            line.publisher._base = {place: chunk.copy() for place, chunk in zip(places, chunks, strict=True)}
        return line.publish(2, train_step(versions[1], 2))

    manifest = on_ranks(tmp_path, 2, versions[1], publish)[0]
    assert {payload.coding for payload in manifest.delta.payloads} == {"raw", "sparse"}


def test_a_changed_layout_is_published_whole(tmp_path: Path) -> None:
    versions = publish_line(tmp_path, 1)
    wider = {**versions[0], "new": HostTensor("fp32", (3,), np.arange(12, dtype=np.uint8))}
    later = {name: HostTensor(t.dtype, t.shape, np.roll(t.data, t.width)) for name, t in wider.items()}

    def publish(line: Line) -> list[bool]:
        return [line.publish(number, tensors).delta is None for number, tensors in ((1, wider), (2, later))]

    assert on_ranks(tmp_path, 2, wider, publish) == [[True, False]] * 2
    assert all(ok for _, ok, _ in WeightStore(Objects.open(tmp_path)).verify("rl"))


def test_if_a_rank_fails_nothing_is_published(tmp_path: Path) -> None:
    versions = history(2)

    def publish(line: Line) -> None:
        if line.ranks.rank == 2:
            raise StorageError("the network is down")
        line.publish(0, versions[0])

    with pytest.raises(StorageError):
        on_ranks(tmp_path, 4, versions[0], publish)
    assert WeightStore(Objects.open(tmp_path)).head("rl") is None
    manifests = on_ranks(tmp_path, 4, versions[0], lambda line: line.publish(0, versions[0]))
    assert [manifest.digest for manifest in manifests] == [root_digest(describe(versions[0]))] * 4


@pytest.mark.parametrize("fault", ["twice", "not at all", "no such chunk", "size"])
def test_each_chunk_exactly_once(tmp_path: Path, fault: str) -> None:
    tensors = make_tensors()

    def publish(line: Line) -> None:
        layout, chunks = line.own(tensors)
        if line.ranks.rank == 1:
            other = own_chunks(tensors, 0, 2).chunks
            chunks = {
                "twice": {**chunks, **other},
                "not at all": dict(list(chunks.items())[:-1]),
                "no such chunk": {**chunks, ("embed.weight", 99): np.empty(0, np.uint8)},
                "size": {**chunks, next(iter(chunks)): np.empty(3, np.uint8)},
            }[fault]
        line.publisher.publish(0, OwnChunks(layout, chunks))

    said = {
        "twice": "was published by rank 0 and rank 1",
        "not at all": "was published by no rank",
        "no such chunk": r"there is no chunk 99 of 'embed\.weight'",
        "size": "bytes, not 3",
    }
    with pytest.raises(WeightsError, match=said[fault]):
        on_ranks(tmp_path, 2, tensors, publish)
    assert WeightStore(Objects.open(tmp_path)).head("rl") is None


def test_a_run_that_was_taken_over_is_fenced(tmp_path: Path) -> None:
    versions = history(2)

    def publish(line: Line) -> None:
        line.publish(0, versions[0])
        if line.ranks.first:
            Publisher(WeightStore(Objects.open(tmp_path)), "rl").publish(1, versions[1])
        line.ranks.gather(None)
        line.publish(1, versions[1])

    with pytest.raises(WeightsError, match="fenced"):
        on_ranks(tmp_path, 2, versions[0], publish)


def test_a_version_that_exists_is_compared(tmp_path: Path) -> None:
    versions = publish_line(tmp_path, 3)

    def publish(line: Line) -> list[int]:
        found = [line.publish(number, versions[number]).number for number in (1, 2)]
        assert line.publisher.last is not None and line.publisher.matches(line.publisher.last, line.own(versions[2]))
        assert not line.publisher.matches(line.publisher.last, line.own(versions[1]))
        return [*found, line.publish(3, train_step(versions[2], 3)).number]

    assert on_ranks(tmp_path, 2, versions[2], publish) == [[1, 2, 3]] * 2

    def diverge(line: Line) -> None:
        line.publish(2, versions[1] if line.ranks.rank == 1 else versions[2])

    with pytest.raises(WeightsError, match=r"diverged.*other chunks on rank 1"):
        on_ranks(tmp_path, 2, versions[2], diverge)


@pytest.mark.slow
def test_four_processes_with_kills_and_a_restart(tmp_path: Path) -> None:
    versions = history(4)
    store = WeightStore(Objects.open(tmp_path))
    for killed, kill_at in ((2, 5), (0, 31), (3, 7)):
        codes = run_ranks(tmp_path, 4, 3, killed, kill_at)
        assert codes[killed] == -signal.SIGKILL
        assert all(ok for _, ok, _ in store.verify("rl"))
        assert all(same(store.load(Version("rl", number)), versions[number]) for number in store.numbers("rl"))
    assert run_ranks(tmp_path, 4, 3) == [0, 0, 0, 0]
    assert store.numbers("rl") == [0, 1, 2, 3]
    assert all(same(WeightStore(store.objects).load(Version("rl", n)), versions[n]) for n in range(4))
