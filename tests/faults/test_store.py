"""An object store that answers 503, or not at all, or stops in the middle; and one that is far away and slow.

A minute of faults means many failed attempts with pauses. Here the attempts are counted, and the pauses are shorter.
"""

from __future__ import annotations

import pytest

from benchmarks.relay import Relay
from tests.faults.world import World
from tests.storage.serving import Forgetful, Front, new_bucket, port_of, s3_options, s3_server

PATIENCE = 1.5  # of a client, in seconds
ATTEMPTS = 15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "said"), [("busy", "503"), ("stall", "timeout|timed out|error sending request"), ("half", "error")]
)
def test_a_store_that_fails_for_a_while(world: World, mode: str, said: str) -> None:
    url = new_bucket()
    with Front(s3_server()) as front:
        access = {"options": s3_options(front.url), "patience": PATIENCE}
        trainer = world.trainer(store=url, **access)
        engine = world.follower("engine-home", url, region="home", **access)
        keeper = world.keeper(url, **access)
        away = world.follower("engine-away", world.folder / "away")
        world.publish_to(2)
        world.converge(2)
        world.until(lambda: trainer.number == 2)

        front.mode = mode
        attempts = len(front.requests)
        world.publish_to(4)
        for process in (trainer, engine, keeper) if mode != "half" else (engine, keeper):
            problem = world.until_problem(process, url.removeprefix("s3://"))
            assert any(word in problem.lower() for word in said.split("|")), problem
        world.until(lambda: len(front.requests) >= attempts + ATTEMPTS)
        assert (engine.number, away.number, away.problem) == (2, 2, None)

        front.mode = "pass"
        world.converge(4)
        world.until(lambda: keeper.problem is None and trainer.problem is None)
        world.check()


@pytest.mark.slow
def test_answers_that_are_lost(world: World) -> None:
    """A `create` that succeeded is sent again and refused. The trainer finds that the object is its own."""
    url = new_bucket()
    with Forgetful(s3_server(), share=0.15) as front:
        access = {"options": s3_options(front.url), "patience": 6.0}
        trainer = world.trainer(store=url, snapshot_every=4, **access)
        world.follower("engine-home", url, region="home", **access)
        world.keeper(url, **access)
        world.follower("engine-away", world.folder / "away")
        for last in (2, 5, 8):
            world.publish_to(last)
            world.converge(last)
        world.until(lambda: trainer.number == 8 and trainer.problem is None)
        assert front.lost > 10
        world.check()
        assert not any("fenced" in (report["problem"] or "") for report in trainer.reports)


def test_a_store_that_is_far_away_and_slow(world: World) -> None:
    """4 Mbit/s and 80 ms cause no problem."""
    url = new_bucket()
    near = {"options": s3_options(s3_server()), "patience": 15.0}
    with Relay(("127.0.0.1", port_of(s3_server())), mbit=4, rtt_ms=80) as relay:
        far = {"options": s3_options(f"http://127.0.0.1:{relay.port}"), "patience": 15.0}
        world.trainer(store=url, **near)
        engine = world.follower("engine-far", url, **far)
        for last in (1, 4):
            world.publish_to(last)
            world.converge(last)
        assert all(report["problem"] is None for report in engine.reports)
        world.check()
        world.close()
