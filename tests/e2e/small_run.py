"""A small run for tests: the parts of the demo, in seconds instead of minutes."""

from __future__ import annotations

import shutil
from pathlib import Path

from rollmill.config import load_config
from rollmill.demo import CONFIG as DEMO
from rollmill.runs.run import RunConfig, RunDirectory

SMALL = (
    "stages.rl.steps=3",
    "stages.rl.groups_per_step=3",
    "stages.rl.group_size=4",
    "stages.midtrain.steps=140",  # enough to solve some tasks and fail others: RL needs both
    "stages.midtrain.training.threads=1",
    "stages.rl.training.checkpoint_every=3",
    "evals.tasks=2",
    "evals.attempts=1",
    "evals.fresh_tasks=1",
    "evals.family_tasks=1",
)
ONE_REGION = ('engines=[{region="home"}]',)
BRIEF_EVALS = ("evals.tasks=1", "evals.fresh_tasks=0", "evals.family_tasks=0", "evals.greedy=false")


def small_run(root: Path, name: str, *overrides: str, base: RunDirectory | None = None) -> RunDirectory:
    """A run directory that is not started yet. With `base`, mid-training is already done."""
    run = RunDirectory.create(root, load_config(RunConfig, DEMO, [f"name={name}", *SMALL, *overrides]))
    if base is not None:
        copy_store(base, run)
    return run


def copy_store(base: RunDirectory, run: RunDirectory) -> None:
    shutil.copytree(base.home_store, run.home_store)
