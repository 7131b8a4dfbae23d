"""Engines that return late: after their deltas were collected, with damaged memory, or with no weights at all."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from benchmarks.relay import Relay
from tests.faults.roles import FULL_BYTES, LINE
from tests.faults.world import World, open_weights


def anchored(store: Path, number: int) -> bool:
    return open_weights(store).anchors(LINE)[-1:] == [number]


def test_an_engine_whose_deltas_were_collected(world: World) -> None:
    """A machine that was suspended and wakes up, beside one that was not."""
    world.trainer()
    world.keeper(world.home, anchor_every=4, keep=2)
    away = world.folder / "away"
    engine, old = world.follower("engine", away), world.follower("engine-old", away)
    world.publish_to(2)
    world.converge(2)
    old.freeze()
    lease = away / f"weights/{LINE}/bf16/leases/engine-old.json"
    past = lease.stat().st_mtime - 3600
    os.utime(lease, (past, past))  # it slept for an hour
    for number in (8, 12):
        world.publish_to(number)
        world.until(lambda number=number: anchored(away, number))
    world.until(lambda: open_weights(away).numbers(LINE)[0] > 3)
    old.thaw()
    world.converge(12)
    assert old.last["bytes"] > FULL_BYTES / 2 > engine.last["bytes"], "it started from the anchor"
    assert all(report["problem"] is None for report in old.reports)
    world.check()


def test_damaged_memory_is_found_and_repaired(world: World) -> None:
    """The image on the host, and the parameters that requests are served from."""
    world.trainer()
    engine = world.follower("engine", world.home, region="home")
    world.publish_to(3)
    world.converge(3)
    engine.signal(signal.SIGUSR1)
    world.publish_to(4)
    world.converge(4)
    assert engine.last["bytes"] > FULL_BYTES / 4, "the damaged chunks were read again"
    world.check()  # before it was used
    engine.signal(signal.SIGUSR2)
    world.publish_to(6)
    world.until(lambda: any(report.get("healed") for report in engine.reports))
    world.converge(6)


def test_an_engine_without_weights_while_home_is_unreachable(world: World) -> None:
    """The region's own anchor is enough. The trainer's snapshots are named in the region but were never copied."""
    _, port = world.server()
    world.trainer(snapshot_every=3)
    away = world.folder / "away"
    with Relay(("127.0.0.1", port), mbit=1000, rtt_ms=4) as relay:
        far = f"http://127.0.0.1:{relay.port}"
        keeper = world.keeper(far, anchor_every=4, keep=2)
        engine = world.follower("engine", away)
        for number in range(0, 11):
            world.publish_to(number)
            world.converge(number)
        world.until(lambda: anchored(away, 8) and open_weights(away).numbers(LINE)[0] > 3)
        relay.cut(drop=True)
        world.publish_to(12)
        world.until_problem(keeper, "the other region cannot be copied from")
        keeper.restart()
        engine.restart()
        world.converge(10)
        assert engine.last["bytes"] > FULL_BYTES / 2
        world.until_problem(keeper, "the other region cannot be copied from")
        relay.restore()
        world.converge(12)
        world.check()
        world.close()


def test_an_engine_that_copies_by_itself_restarts_from_its_own_store(world: World) -> None:
    """The shorter path is a snapshot at home. It is not waited for while home is unreachable."""
    _, port = world.server()
    world.trainer(snapshot_every=5)
    with Relay(("127.0.0.1", port), mbit=1000, rtt_ms=4) as relay:
        engine = world.follower("engine", world.folder / "away", source=f"http://127.0.0.1:{relay.port}", patience=1.5)
        for number in range(0, 12):
            world.publish_to(number)
            world.converge(number)
        relay.cut()
        engine.restart()
        world.until(lambda: engine.number == 11)
        assert (engine.last["updates"], engine.last["bytes"] > FULL_BYTES / 2) == (1, True)
        world.until_problem(engine, "the other region cannot be copied from")
        relay.restore()
        world.publish_to(13)
        world.converge(13)
        world.check()
        world.close()
