"""A full disk, in a region and at home. A small file system is filled and emptied again."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.roles import LINE
from tests.faults.world import World, broken, open_weights

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")


class Disk:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self) -> None:
        with self._ballast.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))

    def empty(self) -> None:
        self._ballast.unlink()


@pytest.fixture(params=["home", "away"])
def disk(request: pytest.FixtureRequest, world: World) -> Iterator[Disk]:
    path = world.folder / request.param
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)], capture_output=True).returncode:
        pytest.skip("this kernel does not let us mount a tmpfs")
    try:
        yield Disk(path)
    finally:
        world.close()
        subprocess.run(["umount", str(path)], check=True)


def test_a_disk_is_full_for_a_while(world: World, disk: Disk) -> None:
    trainer = world.trainer()
    keeper = world.keeper(world.home)
    home, away = (
        world.follower("engine-home", world.home, region="home"),
        world.follower("engine-away", world.folder / "away"),
    )
    world.publish_to(2)
    world.converge(2)
    disk.fill()
    world.publish_to(5)
    writer = trainer if disk.path == world.home else keeper
    world.until_problem(writer, "No space left on device", f"free some space on the disk that holds {disk.path}")
    if writer is keeper:  # processes that do not need that disk continue
        world.converge(5, [home])
    else:
        assert home.number == 2
    assert away.number == 2
    failures = len(writer.reports)
    writer.restart()  # a restart does not help either
    world.until(lambda: len(writer.reports) > failures and writer.problem)
    assert broken(disk.path) == [] and open_weights(disk.path).numbers(LINE) == [0, 1, 2]
    disk.empty()
    world.converge(5)
    world.until(lambda: writer.problem is None)
    world.check()
    assert broken(world.home) == broken(world.folder / "away") == []
