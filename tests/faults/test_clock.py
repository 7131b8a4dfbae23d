"""Every process has another date. Only the clocks of the stores decide anything."""

from __future__ import annotations

import os
import time

import pytest

from rollmill import telemetry
from rollmill.storage.objects import Objects
from rollmill.weights.reading.leases import Leases
from rollmill.weights.regions.arrivals import Arrivals
from tests.faults.roles import LINE
from tests.faults.world import World, open_weights

DAY = 86_400.0


@pytest.mark.parametrize("late", [1, -1], ids=["the region is behind", "the region is ahead"])
def test_leases_hold_and_collection_goes_on_whatever_the_clocks_show(world: World, late: int) -> None:
    world.trainer(clock=late * DAY)
    keeper = world.keeper(world.home, anchor_every=2, keep=2, clock=-late * DAY)
    away = world.folder / "away"
    quick = world.follower("engine-quick", away, clock=DAY)
    slow = world.follower("engine-slow", away, clock=-DAY)
    world.publish_to(3)
    world.converge(3)
    slow.freeze()
    world.publish_to(16)
    world.converge(16, [quick])
    world.until(lambda: open_weights(away).anchors(LINE)[-1:] == [16])
    world.until(lambda: open_weights(away).numbers(LINE)[0] > 0)  # versions that nobody needs were removed
    told = len(keeper.reports)
    world.publish_to(18)
    world.until(lambda: sum(report["removed"] for report in keeper.reports[told:]) or quick.number == 18)
    assert {lease.holder: lease.number for lease in Leases(Objects.open(away), LINE).held()} == {
        "engine-quick": quick.number,
        "engine-slow": 3,
    }
    # the next version for the slow follower still exists
    assert set(range(3, 18)) <= set(open_weights(away).numbers(LINE))
    slow.thaw()
    world.converge(18)
    assert slow.last["bytes"] < 60_000, "it continued with deltas"

    slow.freeze()
    lease = away / f"weights/{LINE}/bf16/leases/engine-slow.json"
    past = lease.stat().st_mtime - 400
    os.utime(lease, (past, past))  # by the store's clock it has ended
    for number in (22, 24):
        world.publish_to(number)
        world.until(lambda number=number: open_weights(away).anchors(LINE)[-1] == number)
    world.until(lambda: open_weights(away).numbers(LINE)[0] > 18)
    slow.thaw()
    world.converge(24)
    world.check()

    rows = Arrivals().fold(telemetry.read_events(world.folder / "events"))
    (row,) = [row for row in rows if row["version"] == 24]
    assert row["regions"]["away"]["skewed"] == (late == 1)
    assert row["regions"]["away"]["arrived_seconds"] == pytest.approx(0 if late == 1 else 2 * DAY, abs=60)


@pytest.mark.parametrize("shift", [DAY, -DAY])
def test_a_file_that_is_being_written_is_not_removed(world: World, shift: float) -> None:
    """Not even by a process whose clock says that the file is from yesterday."""
    staging = world.home / ".staging"
    staging.mkdir(parents=True)
    under_way, abandoned = staging / "somebody-is-writing", staging / "somebody-died"
    for path, age in ((under_way, 0), (abandoned, 2 * 3600)):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age,) * 2)
    follower = world.follower("engine", world.home, clock=shift)
    world.until(lambda: follower.last)
    assert under_way.exists() and not abandoned.exists()
