"""Adds steps to the last stage of a run: `rollmill train --resume RUN steps=64`.

Recorded steps keep their learning rates, so steps that run again give the same bits although the schedule is now over
more steps (rollmill/training/objectives/rl.py). The evaluation after training is made again for the new last version.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rollmill.cluster.launcher import Cluster
from rollmill.cluster.lock import exclusive
from rollmill.cluster.ranks import PATIENCE_S, outside_rank
from rollmill.cluster.run import RunConfig, RunDirectory
from rollmill.config import override_config
from rollmill.errors import ConfigError
from rollmill.kinds import build


def extend(run: RunDirectory, overrides: Sequence[str]) -> RunDirectory:
    """The run with more steps in its last stage, written to its run.json. Raises ConfigError for anything else."""
    if not overrides:
        return run
    last = run.config.stages[-1] if run.config.stages else None
    name = f"stages.{last.name if last else ''}.steps"
    others = [key for override in overrides if (key := override.partition("=")[0]) not in ("steps", name)]
    if others or last is None:
        raise ConfigError(
            f"--resume can change the `steps` of the last stage only, not `{others[0] if others else 'steps'}`",
            hint=f"`rollmill train RUN.toml --from {run.path} VERSION` starts a new run from a version of this one",
        )
    full = [f"{name}={override.partition('=')[2]}" for override in overrides]
    config = override_config(RunConfig, run.config.model_dump(mode="json"), full, "the command line")
    steps = config.stages[-1].steps
    if steps < last.steps:
        raise ConfigError(
            f"steps is {steps}, but stage {last.name!r} already has {last.steps}: --resume can only add steps",
            hint=f"leave it out to continue up to step {last.steps}",
        )
    if steps == last.steps:
        return run
    if outside_rank() > 0:
        return _wait_for(run, steps)
    cluster: Cluster = build(run.config.cluster)
    if cluster.elsewhere and (by := cluster.collect(run)) is not None:
        raise ConfigError(f"{run.path} is in use: {by}", hint=f"`rollmill stop {run.path}` stops it; then add steps")
    with exclusive(run.path, "supervisor", patience_s=5.0):
        return run.rewrite(config)


def _wait_for(run: RunDirectory, steps: int) -> RunDirectory:
    """Rank 0 writes run.json; the other ranks read it."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := RunDirectory.open(run.path)).config.stages[-1].steps != steps:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"rank 0 has not added steps to {run.path} after {PATIENCE_S:.0f} s",
                hint="its output says why; all machines must see the same run directory",
            )
        time.sleep(0.1)
    return found
