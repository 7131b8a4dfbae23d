"""kill -9 of every process, many times, at random moments: nothing half-published is ever served."""

from __future__ import annotations

import random
import time

import pytest

from rollmill.storage.objects import Objects
from rollmill.weights.reading.leases import Leases
from tests.faults.roles import LINE
from tests.faults.world import World, broken, open_weights

KILLS = 40


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_everybody_dies_at_random_moments(world: World, seed: int) -> None:
    dice = random.Random(seed)
    trainer = world.trainer(snapshot_every=7)
    server, port = world.server()
    away = world.folder / "away"
    keeper = world.keeper(f"http://127.0.0.1:{port}", anchor_every=3, keep=4)
    followers = [world.follower(f"engine-{n}", away) for n in range(2)]
    followers.append(world.follower("engine-home", world.home, region="home"))
    mortals = [trainer, keeper, *followers, trainer, keeper, server]
    lives = 0
    for _ in range(KILLS):
        world.publish_to((open_weights(world.home).head(LINE) or 0) + 2)  # so that there is something to interrupt
        time.sleep(dice.uniform(0.0, 0.15))
        victim = dice.choice(mortals)
        lives += victim.last != {}
        victim.restart()
    assert lives > KILLS // 2, "most of them had started when they were killed"
    last = (open_weights(world.home).head(LINE) or 0) + 3
    world.publish_to(last)
    world.converge(last)
    world.check()
    for follower in followers:  # every existing version is complete, at every moment
        assert [report for report in follower.reports if report["problem"] is not None] == []
    keeper.freeze()  # maybe in the middle of a collection: every version that is left is still complete
    assert broken(world.home) == broken(away) == []
    assert open_weights(world.home).numbers(LINE) == list(range(last + 1))
    assert open_weights(away).anchors(LINE), "the keeper made some, although it was killed"
    assert {lease.holder for lease in Leases(Objects.open(away), LINE).held()} == {"engine-0", "engine-1"}
