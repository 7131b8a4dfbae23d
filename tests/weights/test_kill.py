"""kill -9 at every step of a publish and of a copy: no half version exists, and repeating is safe."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from rollmill.storage.object_server import object_app
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import LineFollower, Mirror, Publisher, WeightStore
from rollmill.weights.writing.publisher import Peers
from tests.processes import SERVER
from tests.storage.serving import served
from tests.weights.build import history, publish_line, same
from tests.weights.ranks import own_chunks, together
from tests.weights.worker import copy, in_child, killed_at, publish


def check_line(path: Path, versions: list) -> int:
    """Checks that every version is complete. Returns their number."""
    store = WeightStore(Objects.open(path))
    numbers = store.numbers("rl")
    assert all(ok for _, ok, _ in store.verify("rl"))
    assert all(same(store.load(Version("rl", number)), versions[number]) for number in numbers)
    return len(numbers)


# Version 1 is a delta (one pack), version 2 a delta and a snapshot (two packs). Each pack and each manifest takes four
# steps: fsync of the file, link, fsync of the folder, unlink of the staged name.
@pytest.mark.parametrize(("step", "alive"), [(1, 1), (3, 1), (5, 1), (6, 2), (13, 2), (17, 2), (18, 3)])
def test_a_publisher_killed_at_every_step_of_a_disk_write(tmp_path: Path, step: int, alive: int) -> None:
    versions = history(4)
    store = WeightStore(Objects.open(tmp_path))
    Publisher(store, "rl", snapshot_every=2).publish(0, versions[0])
    follower = LineFollower(WeightStore(Objects.open(tmp_path)), "rl")
    follower.poll()
    killed = in_child(lambda: publish(tmp_path, 1, 2, step))
    assert os.waitstatus_to_exitcode(os.waitpid(killed, 0)[1]) == -signal.SIGKILL
    assert check_line(tmp_path, versions) == alive
    follower.poll()
    assert follower.problem is None and follower.current and follower.current.number == alive - 1
    go_on(tmp_path, versions, follower)


def go_on(path: Path, versions: list, follower: LineFollower) -> None:
    """The trainer starts again and publishes everything again, as after its newest checkpoint."""
    again = Publisher(WeightStore(Objects.open(path)), "rl", snapshot_every=2)
    for number, tensors in enumerate(versions):
        again.publish(number, tensors)
    assert check_line(path, versions) == len(versions)
    update = follower.poll()
    assert update is not None and same(update.tensors, versions[-1])


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1, 2], ids=["snapshot", "delta", "both"])
def test_a_publisher_killed_at_every_call_of_the_store(tmp_path: Path, first: int) -> None:
    """Before and after each call, from taking over the line to the last one."""
    versions = history(first + 2)
    line = tmp_path / "line"
    Objects.open(line)
    if first:
        publish_line(line, first, snapshot_every=2)

    def publish(objects: Objects) -> None:
        Publisher(WeightStore(objects), "rl", snapshot_every=2).publish(first, versions[first])

    for step in range(200):
        path = tmp_path / str(step)
        shutil.copytree(line, path)
        follower = LineFollower(WeightStore(Objects.open(path)), "rl")
        follower.poll()
        killed = killed_at(path, step, publish)
        alive = check_line(path, versions)
        assert alive in (first, first + 1)
        follower.poll()
        assert follower.problem is None and (follower.current.number if follower.current else -1) == alive - 1
        go_on(path, versions, follower)
        shutil.rmtree(path)
        if not killed:
            break
    assert alive == first + 1 and 15 < step < 199


@pytest.mark.slow
def test_ranks_killed_at_every_call_of_the_store(tmp_path: Path) -> None:
    """All ranks of a sharded trainer run in one process, killed at each call of any rank."""
    versions = history(2)
    publish_line(tmp_path / "line", 1)

    def publish(objects: Objects) -> None:
        def on_rank(ranks: Peers) -> None:
            publisher = Publisher(WeightStore(objects), "rl", ranks=ranks)
            publisher.publish(1, own_chunks(versions[1], ranks.rank, ranks.size))

        together(2, on_rank)

    for step in range(300):
        path = tmp_path / str(step)
        shutil.copytree(tmp_path / "line", path)
        killed = killed_at(path, step, publish)
        alive = check_line(path, versions)
        publish(Objects.open(path))
        assert check_line(path, versions) == 2
        shutil.rmtree(path)
        if not killed:
            break
    assert alive == 2 and 20 < step < 299


@pytest.mark.parametrize("step", [1, 6, 13, 20])
def test_a_copy_killed_at_any_step(tmp_path: Path, step: int) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    versions = publish_line(home, 4)
    Objects.open(away)
    with served(object_app(Objects.open(home))) as url:
        copying = SERVER.Process(target=copy, args=(url, away, step))  # a fork of this process would have its server
        copying.start()
        copying.join()
        assert copying.exitcode == -signal.SIGKILL
        alive = check_line(away, versions)
        assert alive < 4
        copied = Mirror(Objects.open(url), Objects.open(away)).copy("rl")
        assert [version.number for version in copied.versions] == list(range(alive, 4))
        assert check_line(away, versions) == 4
