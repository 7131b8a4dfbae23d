"""Everything random in a run follows from its seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.cluster.drive import drive
from rollmill.cluster.run import RunDirectory
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.store import TrajectoryStore
from rollmill.types import Version
from rollmill.weights.reading.store import WeightStore
from tests.e2e.small_run import ONE_REGION, small_run
from tests.rollouts.test_seeds import Answers, answers


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_seed_is_the_same_run(tmp_path: Path, midtrained: RunDirectory) -> None:
    """Synchronous, one rollout at a time, every process real: the same tokens, the same weights bit for bit."""
    alone = [*ONE_REGION, "rollouts.concurrency=1", "evals.concurrency=1", "stages.rl.groups_per_step=2"]
    runs: list[tuple[Answers, str]] = []
    for name in ("first", "second"):
        dials = ("seed=3", "stages.rl.steps=2", "stages.rl.max_staleness=0")
        run = small_run(tmp_path, name, *alone, *dials, base=midtrained)
        drive(run)
        objects = Objects.open(run.home_store)
        store = TrajectoryStore(open_database(run.database_url), objects)
        runs.append((answers(store, store.list()), WeightStore(objects).manifest(Version("rl", 2)).digest))
    (tokens, digest), (same_tokens, same_digest) = runs
    assert len(tokens) >= 20 and tokens == same_tokens
    assert digest == same_digest
