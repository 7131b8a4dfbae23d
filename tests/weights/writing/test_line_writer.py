import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollmill.errors import WeightsError
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import Publisher, Tensors, WeightStore
from rollmill.weights.format.object_keys import epoch_key
from rollmill.weights.writing.line_writer import Writer
from tests.weights.build import history, make_tensors, publish_line, same, train_step
from tests.weights.worker import FENCED, stopped_at


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(Objects.open(tmp_path))


def worker(*arguments: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.weights.worker", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def check_consistent(store: WeightStore) -> list[int]:
    """Every version verifies, numbers have no gaps, and each writer has one epoch. Returns the epochs."""
    manifests = WeightStore(store.objects).versions("rl")
    assert [manifest.number for manifest in manifests] == list(range(len(manifests)))
    assert [why for _, ok, why in store.verify("rl") if not ok] == []
    epochs = [manifest.epoch for manifest in manifests]
    assert epochs == sorted(epochs)
    writers = [manifest.writer for manifest in manifests]
    assert len({*zip(epochs, writers, strict=True)}) == len({*epochs}) == len({*writers})
    return epochs


def test_a_fenced_writer_says_who_took_over_and_refuses_everything(store: WeightStore) -> None:
    versions = history(4)
    first, second = Publisher(store, "rl"), Publisher(WeightStore(store.objects), "rl")
    first.publish(0, versions[0])
    assert (store.epoch("rl"), second.resume(), store.epoch("rl")) == (1, first.last, 2)
    with pytest.raises(
        WeightsError, match=rf"epoch 1.*fenced: \S+:{os.getpid()}:\w+ took over rl .* UTC \(epoch 2\)"
    ) as caught:
        first.publish(1, versions[1])
    assert caught.value.hint and "one trainer per line" in caught.value.hint
    second.publish(1, versions[1])
    for _ in range(2):
        for refused in (lambda: first.publish(1, versions[1]), lambda: first.publish(0, versions[0]), first.resume):
            with pytest.raises(WeightsError, match="fenced"):
                refused()
    assert store.epoch("rl") == 2
    assert second.publish(2, versions[2]).epoch == 2
    assert check_consistent(store) == [1, 2, 2]


def test_a_damaged_epoch_still_fences(store: WeightStore) -> None:
    versions = history(2)
    publisher = Publisher(store, "rl")
    publisher.publish(0, versions[0])
    for data in (b"", b"[]", b'{"at": 1e300, "writer": 3}', b'{"at": "x"}'):
        store.objects.put(epoch_key("rl", "bf16", 2), data)
        other = Publisher(store, "rl")
        other._writer.epoch, other._resumed, other.last = 1, True, publisher.last
        with pytest.raises(WeightsError, match="fenced"):
            other.publish(1, versions[1])


def test_a_lost_answer_does_not_count_as_a_second_writer(store: WeightStore) -> None:
    """The request to create the epoch is sent again, and finds the object it created itself."""
    writer = Writer(store, "rl", "bf16")
    assert writer.take_epoch(None) == 1
    real = store.objects.create

    def twice(key: str, data: bytes) -> None:
        real(key, data)
        real(key, data)

    store.objects.create = twice  # type: ignore[method-assign]
    assert writer.take_epoch(0) == 2
    assert store.epoch("rl") == 2


TAKE = """
import sys
from rollmill.storage.objects import Objects
from rollmill.weights import Publisher, Tensors, WeightStore
publisher = Publisher(WeightStore(Objects.open(sys.argv[1])), "rl")
sys.stdin.readline()
for _ in range(10):
    publisher = Publisher(publisher.store, "rl")
    publisher.resume()
    print(publisher.epoch)
"""


def test_concurrent_take_overs_get_different_epochs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TAKE, str(tmp_path)]
    takers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    epochs = [[int(line) for line in taker.communicate("\n")[0].split()] for taker in takers]
    assert sorted(epoch for mine in epochs for epoch in mine) == list(range(1, 31))
    assert all(mine == sorted(mine) for mine in epochs)


@pytest.mark.slow
def test_two_trainers_at_full_speed(tmp_path: Path, store: WeightStore) -> None:
    """One publishes, a second takes over in the middle, then a third: never two at the same time."""
    writers = [worker(tmp_path, 0, 10_000)]
    for seed in (1, 2):
        assert writers[-1].stdout is not None
        begun = [writers[-1].stdout.readline() for _ in range(6)]
        writers.append(worker(tmp_path, seed, 10_000))
        said = writers[-2].communicate()[0].splitlines()
        assert writers[-2].returncode == FENCED, (begun, said)
        assert "fenced" in said[-1] and f":{writers[-1].pid}:" in said[-1]
    writers[-1].send_signal(signal.SIGKILL)
    writers[-1].wait()
    assert len({*check_consistent(store)}) <= 3


def publish_two(objects: Objects) -> None:
    """A trainer that continues from the head of the line."""
    publisher = Publisher(WeightStore(objects), "rl", snapshot_every=2)
    publisher.resume()
    for _ in range(2):
        assert publisher.last is not None
        publisher.publish(publisher.last.number + 1, train_step(make_tensors(), 50 + publisher.last.number))


@pytest.mark.slow
@pytest.mark.parametrize("owner_is_first", [True, False])
def test_a_writer_stopped_at_every_call_and_woken_after_it_was_fenced(tmp_path: Path, owner_is_first: bool) -> None:
    """Stopped at any call; another writer takes over, and it wakes up before or after the new owner publishes."""
    versions = history(4)
    publish_line(tmp_path / "line", 2)
    late = 0
    for step in range(200):
        path = tmp_path / str(step)
        shutil.copytree(tmp_path / "line", path)
        child = stopped_at(path, step, publish_two)
        if child is None:
            break
        store = WeightStore(Objects.open(path))
        owner = Publisher(store, "rl", snapshot_every=2)
        owner.resume()
        if owner_is_first:
            publish_next(owner, versions[2])
        os.kill(child, signal.SIGCONT)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        # the child was stopped before it took over the line, so it is the later writer
        if store.epoch("rl") > owner.epoch:
            assert ended == 0
            with pytest.raises(WeightsError, match="fenced"):
                publish_next(owner, versions[3])
        else:
            assert ended == FENCED or step > 25, "it finished only if it was stopped at its last calls"
            assert owner.last is not None
            if (head := store.head("rl")) != owner.last.number:
                late += 1
                assert head == owner.last.number + 1 and store.manifest(Version("rl", head)).epoch < owner.epoch
                with pytest.raises(WeightsError, match="diverged"):
                    publish_next(owner, versions[3])
                owner.resume()
            publish_next(owner, versions[3])
            assert same(store.load(owner.last.version), versions[3])
        check_consistent(store)
    assert 25 < step < 199
    assert late == 0 if owner_is_first else late > 0


def publish_next(publisher: Publisher, tensors: Tensors) -> None:
    assert publisher.last is not None
    publisher.publish(publisher.last.number + 1, tensors)
