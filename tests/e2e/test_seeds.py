"""Everything random in a run follows from its seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.launch.supervise import drive
from rollmill.runs.run import RunDirectory
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Version
from rollmill.weights.reading.weight_store import WeightStore
from tests.e2e.small_run import ONE_REGION, small_run
from tests.launch.chance import ANY_SIGNAL
from tests.rollouts.test_seeds import Answers, answers

DIALS = (*ANY_SIGNAL, "seed=3", "stages.rl.steps=2", "stages.rl.max_staleness=0", "stages.rl.groups_per_step=2")


def tokens_and_digest(root: Path, name: str, base: RunDirectory, *dials: str) -> tuple[Answers, str]:
    """The tokens of all rollouts of a run, and the digest of its last version."""
    run = small_run(root, name, *ONE_REGION, *DIALS, *dials, base=base)
    drive(run)
    objects = Objects.open(run.home_store)
    store = TrajectoryStore(open_database(run.database_url), objects)
    return answers(store, store.list()), WeightStore(objects).manifest(Version("rl", 2)).digest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_seed_is_the_same_run(tmp_path: Path, midtrained: RunDirectory) -> None:
    """Synchronous, one rollout at a time, every process real: the same tokens, the same weights bit for bit."""
    alone = ("rollouts.concurrency=1", "evals.concurrency=1")
    first, second = (tokens_and_digest(tmp_path, name, midtrained, *alone) for name in ("first", "second"))
    assert len(first[0]) >= 20 and first == second


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_exact_numerics_it_is_the_same_run_at_any_concurrency(tmp_path: Path, midtrained: RunDirectory) -> None:
    alone, together = (
        tokens_and_digest(
            tmp_path,
            f"at-once-{count}",
            midtrained,
            "numerics=exact",
            f"rollouts.concurrency={count}",
            f"evals.concurrency={count}",
        )
        for count in (1, 6)
    )
    assert len(alone[0]) >= 20 and alone == together
