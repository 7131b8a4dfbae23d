"""A whole run whose S3 is 20 ms away, loses answers after it has done what was asked, and is too busy now and then."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.launch.supervise import drive
from rollmill.types import TrajectoryState
from tests.e2e.small_run import BRIEF_EVALS, ONE_REGION, small_run
from tests.e2e.test_kill import check_stores, digests, finished_ids, stores
from tests.launch.chance import TINY, train_first_stage
from tests.storage.serving import Forgetful, new_bucket, s3_environment, s3_server


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_survives_a_store_that_is_slow_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Forgetful(s3_server(), share=0.03, delay_s=0.02) as front:
        for name, value in s3_environment(front.url).items():
            monkeypatch.setenv(name, value)
        dials = ("stages.rl.steps=4", "stages.rl.groups_per_step=2", f"store={new_bucket()!r}")
        run = small_run(tmp_path, "poor", *TINY, *dials, *ONE_REGION, *BRIEF_EVALS)
        train_first_stage(run)
        weights, ledger, trajectories = stores(run)
        refused: set[int] = set()

        def tick() -> None:
            step = ledger.committed()
            if step not in refused:
                refused.add(step)
                front.busy_for = 10  # the next requests are answered with 503

        drive(run, tick)
        assert front.lost > 5 and len(refused) > 1
        check_stores(run, digests(weights, "rl"), finished_ids(trajectories, run))
        assert {row.state for row in trajectories.list(run=run.stage_key(run.config.stages[-1]), limit=1000)} == {
            TrajectoryState.graded
        }
