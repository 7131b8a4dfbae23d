"""A run of the whole circle that is small enough for tests: the demo's parts, seconds instead of minutes."""

from __future__ import annotations

from pathlib import Path

from rollmill.cluster.run import RunConfig, RunDirectory
from rollmill.config import load_config

DEMO = Path(__file__).parents[2] / "rollmill" / "cli" / "demo.toml"
SMALL = (
    "name=small",
    "steps=6",
    "groups_per_step=2",
    "group_size=4",
    "midtrain.steps=60",
    "midtrain.training.checkpoint_every=60",
    "training.checkpoint_every=3",
    "evals.tasks=4",
    "evals.attempts=2",
    "evals.family_tasks=2",
)


def small_run(root: Path, *overrides: str) -> RunDirectory:
    return RunDirectory.create(root, load_config(RunConfig, DEMO, [*SMALL, *overrides]))
