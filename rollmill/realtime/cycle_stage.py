"""The stage that a cycle trains: a line `cycle-N` from the live version, on conversations that are admitted at once.

It is no stage of the run's configuration: `rollmill train --resume` does not see it. Its trainer has a directory of its
own, RUN/cycles/N, for log, events and locks, and works on the stores of the run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollmill.config import validate_config
from rollmill.models.counts import all_parameters
from rollmill.runs.configuration.settings import CYCLE
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.training.config import OptimizerConfig, lr_by_size
from rollmill.training.stage import StageSection
from rollmill.training.stages.rl import RLSettings


def cycle_run(
    run: RunDirectory, number: int, live: str, conversations: int, *, begin: bool = False
) -> tuple[RunDirectory, StageSection]:
    """The run with the stage of cycle `number` at its end. With `begin`, the stage has no step: its trainer publishes
    version 0, which conversations are admitted to, and ends."""
    stage = stage_settings(run.config, number, live, conversations)
    tree = run.config.model_dump(mode="json")
    tree["stages"] = [*tree["stages"], {**stage, "steps": 0} if begin else stage]
    name = f"{CYCLE}{number}"
    config = validate_config(RunConfig, tree, f"the stage of {name}")
    path = run.path / "cycles" / str(number)
    path.mkdir(parents=True, exist_ok=True)
    return replace(run, path=path, config=config, service_of=run.path), config.stage(name)


def stage_settings(config: RunConfig, number: int, live: str, conversations: int) -> dict[str, Any]:
    """Like the last RL stage of the run, where it says nothing else. Each conversation is a group. All are admitted
    before the first step, so the staleness bound is what the last step needs."""
    cycle = config.cycle
    last = next((stage for stage in reversed(config.stages) if isinstance(stage, RLSettings)), None)
    kept = last.model_dump(mode="json", exclude_defaults=True) if last is not None else {}
    steps = min(cycle.steps, conversations)
    training = kept.get("training", {})
    optimizer = {**training.get("optimizer", {}), "warmup_steps": 0, "decay": "constant"}
    if last is not None:
        usual = last.training.optimizer.lr
    elif config.checkpoint is None and config.start is None:
        usual = OptimizerConfig().lr
    else:
        usual = lr_by_size(all_parameters(config.model), rollouts=True)
    # one reward per conversation is noisier than a group's, and each cycle's optimizer starts without a memory
    optimizer["lr"] = cycle.lr if cycle.lr is not None else 0.4 * usual
    return {
        **kept,
        "kind": "rl",
        "name": f"{CYCLE}{number}",
        "parent": live,
        "steps": steps,
        "groups_per_step": -(-conversations // steps),
        "group_size": 1,
        "max_staleness": steps - 1 + cycle.max_lag,
        "baseline": "none",
        "credit": cycle.credit,
        "rollouts": False,
        "evaluate": False,
        "max_context": None,
        "training": {**training, "optimizer": optimizer, "checkpoint_every": 1},
    }
