"""What a run may change when it is resumed: `rollmill train --resume RUN steps=64 ranks=2`.

`steps` adds steps to the last stage, and `replacement` lets it start more groups per step. `ranks`, `expert_parallel`
and `context_parallel` are those of every stage: the trainer goes on from its checkpoint on fewer or more ranks.
Sums are then made in another order, so a step that runs again may give other bits; it goes on in a new line then, which
names its parent.

Recorded steps keep their learning rates, so steps that run again give the same bits although the schedule is now over
more steps (rollmill/training/rl/rl_objective.py). The evaluation after training is made again for the new last version.

Between two cycles of real-time RL, [cycle] and [gate] may change: `rollmill cycle run RUN cycle.share=0.1`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rollmill.config import override_config
from rollmill.errors import ConfigError
from rollmill.kinds import build
from rollmill.launch.launcher import Cluster
from rollmill.launch.rank_processes import PATIENCE_S, outside_rank
from rollmill.runs.cycle_journal import Journal
from rollmill.runs.lock import exclusive
from rollmill.runs.run import RunConfig, RunDirectory

ELASTIC = ("ranks", "expert_parallel", "context_parallel")


def extend(run: RunDirectory, overrides: Sequence[str]) -> RunDirectory:
    """The run with more steps in its last stage, or on other ranks, written to its run.json. Raises ConfigError for
    anything else."""
    if not overrides:
        return run
    last = run.config.stages[-1] if run.config.stages else None
    name = f"stages.{last.name if last else ''}.steps"
    allowed = ("steps", "replacement", name, *ELASTIC)
    others = [key for override in overrides if (key := override.partition("=")[0]) not in allowed]
    if others or last is None:
        raise ConfigError(
            "--resume can change `steps` and `replacement` of the last stage only, and `ranks`, not "
            f"`{others[0] if others else 'steps'}`",
            hint=f"`rollmill train RUN.toml --from {run.path} VERSION` starts a new run from a version of this one",
        )
    full = []
    for override in overrides:
        key, _, value = override.partition("=")
        own = [name if key == name else f"stages.{last.name}.{key}"]
        names = [f"stages.{stage.name}.training.{key}" for stage in run.config.stages] if key in ELASTIC else own
        full += [f"{each}={value}" for each in names]
    config = override_config(RunConfig, run.config.model_dump(mode="json"), full, "the command line")
    steps = config.stages[-1].steps
    if steps < last.steps:
        raise ConfigError(
            f"steps is {steps}, but stage {last.name!r} already has {last.steps}: --resume can only add steps",
            hint=f"leave it out to continue up to step {last.steps}",
        )
    if config.stages == run.config.stages:
        return run
    if outside_rank() > 0:
        return _wait_for(run, config)
    cluster: Cluster = build(run.config.cluster)
    if cluster.elsewhere and (by := cluster.collect(run)) is not None:
        raise ConfigError(f"{run.path} is in use: {by}", hint=f"`rollmill stop {run.path}` stops it; then change it")
    with exclusive(run.path, "supervisor", patience_s=5.0):
        return run.rewrite(config)


def change_cycle(run: RunDirectory, overrides: Sequence[str]) -> RunDirectory:
    """The run with other settings of [cycle] and [gate], written to its run.json. Raises ConfigError for anything else,
    and while a cycle trains or is judged: it ends as it began."""
    if not overrides:
        return run
    others = [key for override in overrides if not (key := override.partition("=")[0]).startswith(("cycle.", "gate."))]
    if others:
        raise ConfigError(
            f"a cycle can change the settings of [cycle] and [gate] only, not `{others[0]}`",
            hint="for example `cycle.share=0.1` or `gate.offline_bar=0.5`",
        )
    tree = run.config.model_dump(mode="json")
    tree = {name: part for name, part in tree.items() if part is not None}  # a section that the run does not have yet
    config = override_config(RunConfig, tree, overrides, "the command line")
    with exclusive(run.path, "supervisor", patience_s=5.0), exclusive(run.path, "cycle", patience_s=5.0):
        cycle = Journal(run.database(), run.id).current()
        if cycle is not None and not cycle.is_over and cycle.state != "collecting":
            raise ConfigError(
                f"cycle {cycle.number} is {cycle.state}: its settings stay as they are",
                hint=f"`rollmill cycle run {run.path} --cycles 1` takes it to its end; then change them",
            )
        return run.rewrite(config)


def _wait_for(run: RunDirectory, config: RunConfig) -> RunDirectory:
    """Rank 0 writes run.json; the other ranks read it."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := RunDirectory.open(run.path)).config.stages != config.stages:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"rank 0 has not changed {run.path} after {PATIENCE_S:.0f} s",
                hint="its output says why; all machines must see the same run directory",
            )
        time.sleep(0.1)
    return found
