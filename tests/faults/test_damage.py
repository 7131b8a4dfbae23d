"""Objects that are corrupted, truncated, missing, duplicated, or appear in the wrong order, at home and in a region.

All readers are stopped while an object is changed, so that all of them meet it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.roles import LINE
from tests.faults.world import Process, World, delta_path, manifest_path

BAD = 3  # the version that is damaged; a snapshot follows at 6
Damage = Callable[[Path], object]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 8
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def the_one_before(path: Path) -> None:
    """Writes the same kind of object of the version before under this one's name."""
    (other,) = path.parent.glob(f"{BAD - 1:010d}*")
    path.write_bytes(other.read_bytes())


DAMAGES = {"flipped": flip, "truncated": truncate, "empty": empty, "missing": Path.unlink, "duplicated": the_one_before}
SAID = {  # by damage: the message for a pack, and for a manifest
    "flipped": ("do not have the digest in its name", "truncated or damaged"),
    "truncated": ("is truncated", "truncated or damaged"),
    "empty": ("is truncated", "truncated or damaged"),
    "missing": ("no object", "does not exist"),
    "duplicated": ("is truncated|digest in its name", "belongs to rl@2"),
}


@contextmanager
def stopped(*processes: Process) -> Iterator[None]:
    for process in processes:
        process.freeze()
    yield
    for process in processes:
        process.thaw()


@pytest.fixture
def home_and_away(world: World) -> tuple[Process, list[Process]]:
    """The keeper and the engines of a world at the version before the bad one."""
    world.trainer(snapshot_every=6)
    keeper = world.keeper(world.home, anchor_every=5)
    engines = [
        world.follower("engine-home", world.home, region="home"),
        world.follower("engine-away", world.folder / "away"),
    ]
    world.publish_to(BAD - 1)
    world.converge(BAD - 1)
    return keeper, engines


def tampered(world: World, what: str, store: Path, damage: Damage) -> None:
    path = delta_path(store, BAD) if what == "pack" else manifest_path(store, BAD)
    damage(path)


@pytest.mark.parametrize("what", ["pack", "manifest"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_home_is_damaged_until_the_next_snapshot(
    world: World, home_and_away: tuple[Process, list[Process]], what: str, kind: str
) -> None:
    keeper, (home, away) = home_and_away
    trainer = world.named("trainer")
    with stopped(keeper, home, away):
        world.publish_to(BAD + 1)
        world.until(lambda: trainer.number == BAD + 1)
        tampered(world, what, world.home, DAMAGES[kind])
    problem = world.until_problem(
        home, f"{LINE}@{BAD + 1} cannot be restored, serving {LINE}@{BAD - 1}", f"{LINE}@{BAD}"
    )
    assert re.search(SAID[kind][what == "manifest"], problem), problem
    world.until_problem(keeper, "the other region cannot be copied from", f"{LINE}@{BAD}")
    assert (home.number, away.number, away.problem) == (BAD - 1, BAD - 1, None)  # the region got nothing bad
    world.publish_to(8)
    world.converge(8)
    world.until(lambda: keeper.problem is None)
    world.check()


@pytest.mark.parametrize("what", ["pack", "manifest"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_region_is_damaged_and_heals_itself_from_home(
    world: World, home_and_away: tuple[Process, list[Process]], what: str, kind: str
) -> None:
    keeper, (_, away) = home_and_away
    with stopped(away):
        world.publish_to(BAD)
        world.until(lambda: keeper.last.get("copied") == [] and manifest_path(world.folder / "away", BAD).exists())
        with stopped(keeper):
            tampered(world, what, world.folder / "away", DAMAGES[kind])
    if (what, kind) != ("manifest", "missing"):
        problem = world.until_problem(away, f"{LINE}@{BAD} cannot be restored, serving {LINE}@{BAD - 1}")
        assert re.search(SAID[kind][what == "manifest"], problem), problem
    assert away.number == BAD - 1
    world.publish_to(7)
    world.converge(7)
    world.until(lambda: keeper.problem is None)
    world.check()


@pytest.mark.parametrize("place", ["home", "away"])
@pytest.mark.parametrize(
    "hidden", [delta_path, manifest_path], ids=["packs after their manifest", "a version after the next"]
)
def test_objects_that_appear_in_the_wrong_order(
    world: World, home_and_away: tuple[Process, list[Process]], place: str, hidden: Callable[[Path, int], Path]
) -> None:
    keeper, (home, away) = home_and_away
    readers = [keeper, home, away] if place == "home" else [away]
    store = world.folder / place
    with stopped(*readers):
        world.publish_to(BAD + 1)
        world.until(manifest_path(store, BAD + 1).exists)
        if place == "away":
            world.until(lambda: keeper.last["copied"] == [])
            keeper.freeze()
        path, aside = hidden(store, BAD), world.folder / "aside"
        path.rename(aside)
    reader = home if place == "home" else away
    world.until_problem(
        reader,
        f"{LINE}@{BAD + 1} cannot be restored, serving {LINE}@{BAD - 1}",
        f"{BAD:010d}" if hidden is delta_path else f"{LINE}@{BAD} (bf16) does not exist",
    )
    if place == "home":
        world.until_problem(keeper, f"{LINE}@{BAD}")
    assert away.number == BAD - 1
    aside.rename(path)
    keeper.thaw()
    world.converge(BAD + 1)
    world.check()


def test_an_old_manifest_under_the_next_number(world: World, home_and_away: tuple[Process, list[Process]]) -> None:
    """Nobody takes it for the next version, and nobody overwrites it, not even the trainer."""
    keeper, (home, away) = home_and_away
    trainer = world.named("trainer")
    bogus = manifest_path(world.home, BAD)
    bogus.write_bytes(manifest_path(world.home, BAD - 1).read_bytes())
    said = f"the manifest of {LINE}@{BAD} (bf16) belongs to {LINE}@{BAD - 1}"
    world.publish_to(BAD)
    for process in (home, keeper, trainer):
        world.until_problem(process, said)
    trainer.restart()
    world.until_problem(trainer, said)
    assert (home.number, away.number) == (BAD - 1, BAD - 1) and away.problem is None
    bogus.unlink()
    world.converge(BAD)
    world.until(lambda: trainer.problem is None and keeper.problem is None)
    world.check()


@pytest.mark.parametrize("kind", ["flipped", "truncated", "missing"])
@pytest.mark.parametrize("what", ["anchors", "packs"])
def test_a_damaged_anchor_is_avoided(world: World, kind: str, what: str) -> None:
    """An engine that starts from nothing takes the longer path."""
    world.trainer()
    world.keeper(world.home, anchor_every=4)
    world.publish_to(9)
    away = world.folder / "away" / f"weights/{LINE}/bf16"
    world.until((away / "anchors/0000000008.anchor").exists)
    if what == "anchors":
        DAMAGES[kind](away / "anchors/0000000008.anchor")
    else:
        DAMAGES[kind](max(away.glob("packs/0000000008-*"), key=lambda path: path.stat().st_size))
    engine = world.follower("engine", world.folder / "away")
    world.converge(9, [engine])
    world.publish_to(13)  # the next anchor is good
    world.until((away / "anchors/0000000012.anchor").exists)
    world.converge(13)
    world.check()
