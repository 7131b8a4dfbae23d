"""Trains one stage of the run, from the last version of the stage before, until no step can follow.

The first stage starts from the weights that the run starts from, which are imported first. Without a stage it only
imports them.
"""

from __future__ import annotations

from typing import Any

from rollmill import telemetry
from rollmill.chat.formats.choice import format_beside
from rollmill.chat.tokenizer import Tokenizer
from rollmill.errors import TrainingError
from rollmill.kinds import build
from rollmill.launch.launcher import TERMINATED
from rollmill.models.device import choose_device
from rollmill.runs.prepare import describe_longer, need_tokenizer, prepare
from rollmill.runs.run import RunDirectory
from rollmill.runs.stages import is_trained, last_version
from rollmill.training.config import TrainingConfig
from rollmill.training.loop import Trainer
from rollmill.training.memory_estimate import fitted
from rollmill.training.objective import Objective
from rollmill.training.parallelism import Parallelism, Ranks
from rollmill.training.single import choose_parallelism
from rollmill.training.stage import RolloutSettings, Stage, StageContext, StageSection
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Version
from rollmill.weights.reading.weight_store import WeightStore


def main(run: RunDirectory, name: str = "") -> None:
    weights = run.weights()
    if not name:
        prepare(run, weights)
        return
    config, stage = run.config, run.config.stage(name)
    telemetry.label_events(stage=name)
    device = choose_device(config.device)
    parallel = choose_parallelism(name, device, stage.training)
    with parallel.ranks.watched():
        trainer = _trainer(run, stage, weights, parallel)
        trainer.run(stage.steps)
    parallel.ranks.leave()
    if trainer.step < stage.steps and not is_trained(run, stage):
        raise SystemExit(TERMINATED)


def _trainer(run: RunDirectory, stage: StageSection, weights: WeightStore, parallel: Parallelism) -> Trainer[Any]:
    config, name, device = run.config, stage.name, choose_device(run.config.device)
    parent = parallel.ranks.from_first_slowly(lambda: _parent(run, stage, weights))  # it may import a checkpoint
    model = config.model_of(name)
    training = fitted(stage.training, model, device)
    return Trainer(
        training,
        model,
        _objective(run, stage, weights, training, parallel.ranks),
        weights,
        weights.objects,
        name,
        parent,
        steps=stage.steps,
        seed=config.seed,
        form=config.form,
        other_forms=config.forms[1:],
        exact=config.numerics == "exact" and isinstance(stage, RolloutSettings),  # others compare with no engine
        device=config.device,
        parallel=parallel,
    )


def _parent(run: RunDirectory, stage: StageSection, weights: WeightStore) -> Version | None:
    """The version that a stage starts from; None: random weights."""
    if stage.parent is not None:
        return _named_parent(run, stage, stage.parent, weights)
    before = run.config.before(stage)
    version = prepare(run, weights) if before is None else last_version(weights, before, run.config.form)
    if version is None and before is not None:
        raise TrainingError(f"stage {before.name!r} has no version to start from", hint="it comes first")
    if version is not None:
        describe_longer(weights, version, stage.name, run.config.model_of(stage.name))
    return version


def _named_parent(run: RunDirectory, stage: StageSection, name: str, weights: WeightStore) -> Version:
    line, _, number = name.rpartition("@")
    version = Version(line, int(number))
    if not any(weights.exists(version, form) for form in weights.forms(line)):
        raise TrainingError(f"stage {stage.name!r} starts from {version}, which is not there", hint="see its `parent`")
    describe_longer(weights, version, stage.name, run.config.model_of(stage.name))
    return version


def _objective(
    run: RunDirectory, stage: StageSection, weights: WeightStore, training: TrainingConfig, ranks: Ranks
) -> Objective[Any]:
    config, database = run.config, run.database()
    tokenizer = Tokenizer.load(need_tokenizer(run))
    kind: Stage = build(stage)
    objective = kind.objective(
        StageContext(
            name=stage.name,
            steps=stage.steps,
            seed=config.seed_of(stage),
            model=config.model_of(stage.name),
            tokenizer=tokenizer,
            format=format_beside(run.tokenizer, tokenizer, config.chat.kept, tools_in_prompt=config.tools_in_prompt),
            tokens_per_microbatch=training.tokens_per_pass,
            ranks=ranks,
            ledger=Ledger(database, run.stage_key(stage)),
            trajectories=TrajectoryStore(database, weights.objects),
            weights=weights,
            directory=run.data / "stages" / stage.name,
        )
    )
    if not isinstance(objective, Objective):
        raise TrainingError(
            f"the objective of stage {stage.name!r}, {type(objective).__name__}, is no Objective",
            hint="derive it from rollmill.training.objective.Objective",
        )
    return objective
