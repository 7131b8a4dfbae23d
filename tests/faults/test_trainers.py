"""Two independent trainers on one line: the later one owns it, and every version belongs to one of them."""

from __future__ import annotations

import random
import time

import pytest

from tests.faults.roles import LINE, digest_of
from tests.faults.world import Process, World, broken, open_weights


def agree(world: World, followers: list[Process]) -> None:
    """For every number, all served the bytes that its manifest names, and these come from one of the trainers."""
    world.check(0, 1)
    digests = {manifest.number: manifest.digest for manifest in open_weights(world.home).versions(LINE)}
    for follower in followers:
        served = [report for report in follower.reports if report.get("number") is not None]
        assert served and all(report["digest"] == digests[report["number"]] for report in served)
    epochs = [manifest.epoch for manifest in open_weights(world.home).versions(LINE)]
    assert epochs == sorted(epochs) and broken(world.home) == []


def test_the_second_takes_over_and_the_first_is_fenced(world: World) -> None:
    first = world.trainer("first", seed=0)
    followers = [world.follower("engine-home", world.home), world.follower("engine-away", world.folder / "away")]
    world.keeper(world.home)
    world.publish_to(3)
    world.converge(3)
    second = world.trainer("second", seed=1)
    world.until(lambda: second.last)
    world.publish_to(6)
    world.converge(6, seed=1)
    world.until(lambda: first.ended() == 0)
    assert first.problem and "is fenced" in first.problem and "(epoch 2)" in first.problem and "hint:" in first.problem
    agree(world, followers)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_trainer_stopped_at_random_moments_and_continued_after_the_take_over(world: World, seed: int) -> None:
    dice = random.Random(seed)
    followers = [world.follower("engine-home", world.home), world.follower("engine-away", world.folder / "away")]
    world.keeper(world.home)
    owner = world.trainer("trainer-0", seed=0)
    for turn in range(1, 9):
        world.until(lambda: owner.last)  # noqa: B023
        head = open_weights(world.home).head(LINE) or 0
        world.publish_to(head + 3)
        time.sleep(dice.uniform(0.0, 0.06))
        owner.freeze()
        sleeper, owner = owner, world.trainer(f"trainer-{turn}", seed=turn % 2)
        world.until(lambda: owner.last)  # noqa: B023
        sleeper.thaw()
        if dice.random() < 0.5:
            world.publish_to(head + 5)
        world.publish_to((open_weights(world.home).head(LINE) or 0) + 2)
        world.until(lambda: sleeper.ended() is not None)  # noqa: B023
        assert sleeper.problem and "is fenced" in sleeper.problem, sleeper.last
    last = (open_weights(world.home).head(LINE) or 0) + 2
    world.publish_to(last)
    world.until(lambda: owner.number == last)
    world.converge(last, seed=0)
    assert digest_of(last, 0) == open_weights(world.home).versions(LINE)[-1].digest
    agree(world, followers)
