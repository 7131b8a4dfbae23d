import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rollmill.errors import StorageError, WeightsError
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import HostTensor, LineFollower, Publisher, WeightStore
from rollmill.weights.format.codings import Goal
from rollmill.weights.format.manifest import describe, root_digest
from rollmill.weights.reading.weight_store import newest_line
from tests.weights.build import delta_pack, history, make_tensors, publish_line, same, train_step


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(Objects.open(tmp_path))


def test_a_line_of_snapshots_and_deltas_comes_back_bit_for_bit(store: WeightStore) -> None:
    versions = history(8)
    publisher = Publisher(store, "rl", snapshot_every=3)
    manifests = [publisher.publish(number, tensors) for number, tensors in enumerate(versions)]
    assert [manifest.kind for manifest in manifests] == ["snapshot", "delta", "delta"] * 2 + ["snapshot", "delta"]
    assert [manifest.delta is not None for manifest in manifests] == [False] + [True] * 7
    for number, tensors in enumerate(versions):
        assert same(store.load(Version("rl", number)), tensors)
        assert manifests[number].digest == root_digest(describe(tensors))
    assert store.versions("rl") == manifests
    assert (store.lines(), store.forms("rl"), store.head("rl"), store.head("rl", after=3)) == (["rl"], ["bf16"], 7, 7)
    assert manifests[1].bytes < manifests[1].full_bytes / 8
    assert all(0.01 < manifest.density < 0.03 for manifest in manifests[1:] if manifest.density is not None)
    assert list(store.verify("rl")) == [(Version("rl", number), True, "") for number in range(8)]


def test_special_tensors(store: WeightStore) -> None:
    """Different widths, an empty tensor, a scalar, NaN bits, an unchanged tensor."""
    random = np.random.default_rng(0)
    shapes = {
        "fp8_e4m3": (257, 33),
        "fp32": (19,),
        "bf16": (100, 100),
        "int8": (0, 4),
        "fp16": (),
        "fp8_e5m2": (5, 0, 2),
    }

    def tensors() -> dict[str, HostTensor]:
        widths = {"fp8_e4m3": 1, "fp32": 4, "bf16": 2, "int8": 1, "fp16": 2, "fp8_e5m2": 1}
        return {
            name: HostTensor(name, shape, random.integers(0, 256, int(np.prod(shape)) * widths[name], dtype=np.uint8))
            for name, shape in shapes.items()
        }

    versions = [tensors(), tensors()]
    versions.append({**tensors(), "bf16": versions[1]["bf16"]})
    publisher = Publisher(store, "odd")
    for number, one in enumerate(versions):
        publisher.publish(number, one)
        assert same(store.load(Version("odd", number)), one)
    publisher.publish(3, versions[2])
    assert publisher.last and publisher.last.bytes == 0 and publisher.last.density == 0.0
    assert same(store.load(Version("odd", 3)), versions[2])


def test_large_tensors_are_cut_into_chunks(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollmill.weights.format import tensors as tensors_module
    from rollmill.weights.writing import encoder as packs_module

    monkeypatch.setattr(tensors_module, "CHUNK_ELEMENTS", 4096)
    monkeypatch.setattr(packs_module, "PACK_BYTES", 10_000)
    monkeypatch.setattr(packs_module, "RUN_BYTES", 16_384)
    tensors_module.chunk_ranges.cache_clear()
    try:
        versions = history(3)
        publisher = Publisher(store, "rl")
        for number, tensors in enumerate(versions):
            manifest = publisher.publish(number, tensors)
        assert manifest.chunks[0].size() < versions[0]["embed.weight"].data.size
        assert len(store.manifest(Version("rl", 0)).encoding("snapshot").packs) > 3
        assert same(store.load(Version("rl", 2)), versions[2])
    finally:
        tensors_module.chunk_ranges.cache_clear()


def test_the_caller_may_reuse_its_buffers(store: WeightStore) -> None:
    versions = history(3)
    publisher = Publisher(store, "rl")
    buffers = {name: HostTensor(t.dtype, t.shape, t.data.copy()) for name, t in versions[0].items()}
    for number, tensors in enumerate(versions):
        for name, tensor in tensors.items():
            np.copyto(buffers[name].data, tensor.data)
        publisher.publish(number, buffers)
    assert all(ok for _, ok, _ in store.verify("rl"))
    assert same(store.load(Version("rl", 2)), versions[2])


def test_publishing_again_confirms_or_refuses(store: WeightStore) -> None:
    versions = history(4)
    publisher = Publisher(store, "rl")
    first = [publisher.publish(number, tensors, metadata={"step": number}) for number, tensors in enumerate(versions)]
    restarted = Publisher(store, "rl")
    assert [restarted.publish(number, tensors) for number, tensors in enumerate(versions)] == first
    with pytest.raises(WeightsError, match="diverged") as caught:
        restarted.publish(2, versions[3])
    assert caught.value.hint and "new line" in caught.value.hint
    assert restarted.publish(4, train_step(versions[3], 9)).delta is not None
    assert store.versions("rl")[:4] == first


def test_numbers_are_consecutive(store: WeightStore) -> None:
    publisher = Publisher(store, "rl")
    publisher.publish(10, make_tensors())  # a line may start anywhere
    with pytest.raises(WeightsError, match="is at 10"):
        publisher.publish(12, make_tensors())
    with pytest.raises(WeightsError, match="does not exist"):
        publisher.publish(9, make_tensors())
    assert publisher.publish(11, make_tensors()).parent == Version("rl", 10)


def test_parents_may_be_in_another_line(store: WeightStore) -> None:
    versions = publish_line(Path(store.objects.url), 3, line="midtrain")
    reinforced = Publisher(store, "rl")
    first = reinforced.publish(0, versions[2], parent=Version("midtrain", 2))
    assert (first.parent, first.kind) == (Version("midtrain", 2), "snapshot")
    assert first.digest == store.manifest(Version("midtrain", 2)).digest
    assert reinforced.publish(1, versions[2]).parent == Version("rl", 0)


def test_a_late_version_of_a_fenced_writer_is_confirmed_or_refused(store: WeightStore) -> None:
    """A writer that was fenced after its check commits late: the new owner finds the number taken."""
    versions = history(4)
    first, second = Publisher(store, "rl"), Publisher(WeightStore(store.objects), "rl")
    first.publish(0, versions[0])
    second.resume()
    first._writer.check = lambda: None  # type: ignore[method-assign]
    late = first.publish(1, versions[1])
    with pytest.raises(WeightsError, match=f"diverged.*{os.getpid()}.*epoch 1.*epoch 2"):
        second.publish(1, versions[2])
    with pytest.raises(WeightsError, match="two writers on one line"):
        second.publish(2, versions[2])
    assert second.publish(1, versions[1]) == late  # both ran the same recorded step
    assert second.publish(2, versions[2]).delta is not None
    assert [ok for _, ok, _ in store.verify("rl")] == [True] * 3


SHAPES = {f"layer.{i:02d}": (600, 700) for i in range(12)} | {"norm": (700,)}


def published_keys(path: Path, threads: int) -> tuple[list[str], list[dict]]:
    store = WeightStore(Objects.open(path))
    publisher = Publisher(store, "rl", snapshot_every=2, threads=threads)
    tensors = make_tensors(3, SHAPES)
    for number in range(3):
        publisher.publish(number, tensors)
        tensors = train_step(tensors, number, share=0.01)
    assert [why for _, ok, why in store.verify("rl") if not ok] == []
    manifests = [m.model_dump(exclude={"writer", "created_at"}) for m in store.versions("rl")]
    return [key for key in store.objects.list() if "/packs/" in key], manifests


def test_packs_do_not_depend_on_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollmill.weights.writing import encoder as packs_module

    monkeypatch.setattr(packs_module, "PACK_BYTES", 300_000)
    alone = published_keys(tmp_path / "1", 1)
    assert len(alone[0]) > 10
    assert published_keys(tmp_path / "5", 5) == alone


@pytest.mark.parametrize("goal", ["fast", "small", "overwrite"])
def test_goals(store: WeightStore, goal: Goal) -> None:
    versions = history(3)
    publisher = Publisher(store, "rl", goal=goal)
    for number, tensors in enumerate(versions):
        manifest = publisher.publish(number, tensors)
    assert manifest.delta is not None
    codings = {payload.coding for payload in manifest.delta.payloads}
    assert codings <= {"overwrite"} if goal == "overwrite" else "overwrite" not in codings
    assert same(store.load(Version("rl", 2)), versions[2])


MEMORY = """
import sys, threading, time
import numpy as np
from rollmill.storage.objects import Objects
from rollmill.weights import HostTensor, Publisher, WeightStore

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

peak = 0
def watch():
    global peak
    while True:
        peak = max(peak, resident())
        time.sleep(0.001)

threading.Thread(target=watch, daemon=True).start()
random = np.random.default_rng(0)
bits = random.integers(15000, 15800, 1 << 24, dtype=np.uint16)
tensors = {str(i): HostTensor("bf16", (4096, 4096), (bits + i).view(np.uint8)) for i in range(6)}
store = WeightStore(Objects.open(sys.argv[1]))
def publish(publisher, number):
    global peak
    for tensor in tensors.values():
        tensor.data.view(np.uint16)[:: 97 + number] += 1
    peak, before = 0, resident()
    publisher.publish(number, tensors)
    return (peak - before) / 2**20

publisher = Publisher(store, "rl", snapshot_every=2, threads=4)
publish(publisher, 0)
print(publish(publisher, 1), publish(publisher, 2))
del publisher
print(publish(Publisher(store, "rl", threads=4), 3))  # resuming makes the base, and no second copy of it
"""


@pytest.mark.slow
def test_memory_is_the_base_and_a_bounded_rest(tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], check=True, capture_output=True, text=True)
    delta, both, resumed = map(float, process.stdout.split())
    assert delta < 256 and both < 256
    assert resumed < 192 + 512  # the base, and the memory for restoring it


def test_a_line_begins_with_its_first_version(store: WeightStore) -> None:
    """A writer that took over a new line and died before its first version leaves no line."""
    versions = publish_line(Path(store.objects.url), 2)
    publisher = Publisher(store, "rl.2")
    publisher.resume()
    assert "rl.2" in store.lines() and newest_line(store, "rl") == newest_line(WeightStore(store.objects), "rl") == "rl"
    first = publisher.publish(5, versions[1], parent=Version("rl", 1))
    assert (first.first, first.origin) == (5, Version("rl", 1))
    assert newest_line(store, "rl") == "rl.2"
    later = publisher.publish(6, versions[0], parent=Version("rl", 0))
    assert (later.parent, later.first, later.origin) == (Version("rl", 0), 5, Version("rl", 1))


def test_a_changed_layout_is_published_whole(store: WeightStore) -> None:
    publisher = Publisher(store, "rl")
    publisher.publish(0, make_tensors())
    wider = make_tensors(1, {"embed.weight": (400, 64), "new": (3,)})
    manifest = publisher.publish(1, wider)
    assert (manifest.kind, manifest.delta) == ("snapshot", None)
    assert same(store.load(Version("rl", 1)), wider)
    publisher.publish(2, train_step(wider, 2))
    assert all(ok for _, ok, _ in store.verify("rl"))


def test_a_line_whose_head_is_damaged_goes_on_with_a_snapshot(tmp_path: Path, store: WeightStore) -> None:
    versions = publish_line(tmp_path, 3)
    delta_pack(tmp_path, 2).write_bytes(b"short")
    publisher = Publisher(store, "rl")
    publisher.resume()
    assert publisher.problem and "rl@2" in publisher.problem
    manifest = publisher.publish(3, train_step(versions[2], 3))
    assert (manifest.kind, manifest.delta, publisher.problem) == ("snapshot", None, None)
    assert [ok for _, ok, _ in store.verify("rl")] == [True, True, False, True]


def test_a_pack_left_half_written_by_other_means_is_replaced(tmp_path: Path, store: WeightStore) -> None:
    versions = publish_line(tmp_path, 2)
    pack = delta_pack(tmp_path, 1)
    (tmp_path / "weights/rl/bf16/manifests/0000000001.manifest").unlink()
    pack.write_bytes(pack.read_bytes()[:-1])
    Publisher(store, "rl").publish(1, versions[1])
    assert same(WeightStore(store.objects).load(Version("rl", 1)), versions[1])


@pytest.mark.parametrize(
    ("number", "parent", "metadata"),
    [(-1, None, {}), (0, Version("../up", 1), {}), (0, None, {"when": object()}), (0, Version("rl", -1), {})],
)
def test_metadata_that_is_not_json_is_refused(
    store: WeightStore, number: int, parent: Version | None, metadata: dict
) -> None:
    with pytest.raises(WeightsError, match="cannot be published") as caught:
        Publisher(store, "rl").publish(number, make_tensors(), parent, metadata)
    assert caught.value.hint
    assert store.head("rl") is None


@pytest.mark.parametrize("name", ["", "a/b", "..", ".x", "a b", "x" * 101])
def test_names_that_cannot_be_folders_are_refused(store: WeightStore, name: str) -> None:
    with pytest.raises(WeightsError, match="cannot name"):
        Publisher(store, name)
    with pytest.raises(WeightsError, match="cannot name"):
        store.head(name)


def test_loading_a_missing_version(store: WeightStore) -> None:
    assert (store.head("rl"), store.versions("rl"), store.lines()) == (None, [], [])
    with pytest.raises(WeightsError, match=r"rl@3.*does not exist") as caught:
        store.load(Version("rl", 3))
    assert caught.value.hint


FULL_DISK = """
import resource, sys
from pathlib import Path
from rollmill.errors import StorageError
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import Publisher, WeightStore
from tests.weights.build import history, same
versions = history(4)
store = WeightStore(Objects.open(sys.argv[1]))
publisher = Publisher(store, "rl", snapshot_every=2)
publisher.publish(0, versions[0]); publisher.publish(1, versions[1])
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
for _ in range(2):
    try:
        publisher.publish(2, versions[2])
        sys.exit("published on a full disk")
    except StorageError as error:
        assert "free some space" in error.hint, error
assert store.head("rl") == 1
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
publisher.publish(2, versions[2]); publisher.publish(3, versions[3])
assert [ok for _, ok, _ in store.verify("rl")] == [True] * 4
assert same(store.load(Version("rl", 3)), versions[3])
"""


def test_a_full_disk_while_publishing_loses_nothing(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_file_system_that_is_really_full(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this kernel does not let us mount a tmpfs")
    try:
        versions = history(30)
        store = WeightStore(Objects.open(small))
        publisher = Publisher(store, "rl")
        follower = LineFollower(WeightStore(Objects.open(small)), "rl")
        with pytest.raises(StorageError) as caught:
            for number, tensors in enumerate(versions):
                publisher.publish(number, tensors)
                follower.poll()
        assert caught.value.hint and "free some space" in caught.value.hint
        head = store.head("rl")
        assert head is not None and follower.current and follower.current.number == head
        assert all(ok for _, ok, _ in store.verify("rl"))
        subprocess.run(["mount", "-o", "remount,size=2m", str(small)], check=True)
        publisher.publish(head + 1, versions[head + 1])
        update = follower.poll()
        assert update is not None and same(update.tensors, versions[head + 1])
    finally:
        subprocess.run(["umount", str(small)], check=True)
