"""Adds RL steps to a run: `rollmill train --resume RUN steps=64`.

Recorded steps keep their learning rates, so steps that run again give the same bits although the schedule is now over
more steps (rollmill/training/objectives/rl.py). The evaluation after training is made again for the new last version.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rollmill.cluster.lock import exclusive
from rollmill.cluster.ranks import PATIENCE_S, outside_rank
from rollmill.cluster.run import RunConfig, RunDirectory
from rollmill.config import override_config
from rollmill.errors import ConfigError


def extend(run: RunDirectory, overrides: Sequence[str]) -> RunDirectory:
    """The run with more steps, written to its run.json. Raises ConfigError if anything but `steps` would change."""
    others = [key for override in overrides if (key := override.partition("=")[0]) != "steps"]
    if others:
        raise ConfigError(
            f"--resume can change `steps` only, not `{others[0]}`",
            hint=f"`rollmill train RUN.toml --from {run.path} VERSION` starts a new run from a version of this one",
        )
    config = override_config(RunConfig, run.config.model_dump(mode="json"), overrides, "the command line")
    if config.steps < run.config.steps:
        raise ConfigError(
            f"steps is {config.steps}, but the run already has {run.config.steps}: --resume can only add steps",
            hint=f"leave it out to continue up to step {run.config.steps}",
        )
    if config.steps == run.config.steps:
        return run
    if outside_rank() > 0:
        return _wait_for(run, config.steps)
    with exclusive(run.path, "supervisor", patience_s=5.0):
        return run.rewrite(config)


def _wait_for(run: RunDirectory, steps: int) -> RunDirectory:
    """The first rank writes run.json; the others read it."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := RunDirectory.open(run.path)).config.steps != steps and time.monotonic() < deadline:
        time.sleep(0.1)
    return found
