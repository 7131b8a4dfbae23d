"""The driver of cycles, without the processes that it starts: tests/e2e/test_cycle.py has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.cluster.cycle import CycleDriver
from rollmill.gateway.routing.splits import SplitStore
from rollmill.realtime.journal import Cycle
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights.reading.channels import Channels
from tests.cluster.served import published_run


def test_a_canary_ends_with_its_driver(tmp_path: Path) -> None:
    run = published_run(tmp_path, 2, "cycle.share=0.1")
    Channels(Objects.open(run.home_store)).move("live", Version("rl", 0))
    splits, seen = SplitStore(open_database(run.database_url), run.id), []

    def tick(cycle: Cycle) -> None:
        seen.append((cycle.state, splits.get()))
        if len(seen) == 2:
            raise KeyboardInterrupt

    driver = CycleDriver(run, tick)
    cycle = driver.journal.begin({"since": 0.0}, "test")
    for state in ("distilling", "training", "gating", "canary"):
        cycle = driver.journal.move(cycle, state, "test", live="rl@0", candidate="rl@1")
    with pytest.raises(KeyboardInterrupt):
        driver.run_cycle()
    assert seen == [("canary", {}), ("canary", {"rollmill": {"live": 0.9, "candidate": 0.1}})]
    assert splits.get() == {"rollmill": {"live": 1.0}}
