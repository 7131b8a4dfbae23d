"""The demo's run in virtual machines: one line of its configuration is different."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.cli.train import run_to_report
from rollmill.errors import MachineError
from rollmill.machines.qemu.parts import find_parts
from rollmill.runs.run import RunDirectory
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import TrajectoryState
from tests.e2e.small_run import BRIEF_EVALS, ONE_REGION, small_run

_BRIEF = ("stages.rl.steps=1", "stages.rl.groups_per_step=2", "stages.rl.group_size=2", *BRIEF_EVALS, *ONE_REGION)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_trains_in_virtual_machines(tmp_path: Path, midtrained: RunDirectory) -> None:
    try:
        find_parts()
    except MachineError as error:
        pytest.skip(str(error))
    run = small_run(tmp_path, "virtual", 'machine.kind="qemu"', *_BRIEF, base=midtrained)
    run_to_report(run)
    trajectories = TrajectoryStore(open_database(run.database_url), Objects.open(run.home_store))
    rows = trajectories.list()
    assert rows and {row.state for row in rows} == {TrajectoryState.graded}, [row.reason for row in rows]
    assert len(Ledger(open_database(run.database_url), run.stage_key(run.config.stages[1])).steps()) == 1
