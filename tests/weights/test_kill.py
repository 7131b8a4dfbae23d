"""kill -9 at every step of a publish and of a copy: half a version does not exist, and doing it again is safe."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollmill.storage.http import object_app
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import Follower, Mirror, Publisher, WeightStore
from tests.storage.serving import served
from tests.weights.build import history, publish_line, same


def run_worker(*arguments: object) -> int:
    return subprocess.run([sys.executable, "-m", "tests.weights.worker", *map(str, arguments)]).returncode


def check_line(path: Path, versions: list) -> int:
    """Everything that exists is whole. Returns how many versions exist."""
    store = WeightStore(Objects.open(path))
    numbers = store.numbers("rl")
    assert all(ok for _, ok, _ in store.verify("rl"))
    assert all(same(store.load(Version("rl", number)), versions[number]) for number in numbers)
    return len(numbers)


# Version 1 is a delta (one pack), version 2 a delta and a snapshot (two packs). Each pack and each manifest takes four
# steps: fsync of the file, link, fsync of the folder, unlink of the staged name.
@pytest.mark.parametrize(("step", "alive"), [(1, 1), (3, 1), (5, 1), (6, 2), (13, 2), (17, 2), (18, 3)])
def test_a_publisher_killed_at_any_step(tmp_path: Path, step: int, alive: int) -> None:
    versions = history(4)
    store = WeightStore(Objects.open(tmp_path))
    Publisher(store, "rl", snapshot_every=2).publish(0, versions[0])
    follower = Follower(WeightStore(Objects.open(tmp_path)), "rl")
    follower.poll()
    assert run_worker("publish", tmp_path, 1, 2, step) == -signal.SIGKILL
    assert check_line(tmp_path, versions) == alive
    follower.poll()
    assert follower.problem is None and follower.current and follower.current.number == alive - 1

    again = Publisher(WeightStore(Objects.open(tmp_path)), "rl", snapshot_every=2)
    for number in range(4):
        again.publish(number, versions[number])
    assert check_line(tmp_path, versions) == 4
    update = follower.poll()
    assert update is not None and same(update.tensors, versions[3])


@pytest.mark.parametrize("step", [1, 6, 13, 20])
def test_a_copy_killed_at_any_step(tmp_path: Path, step: int) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    versions = publish_line(home, 4)
    Objects.open(away)
    with served(object_app(Objects.open(home))) as url:
        assert run_worker("copy", url, away, step) == -signal.SIGKILL
        alive = check_line(away, versions)
        assert alive < 4
        copied = Mirror(Objects.open(url), Objects.open(away)).copy("rl")
        assert [version.number for version in copied.versions] == list(range(alive, 4))
        assert check_line(away, versions) == 4
