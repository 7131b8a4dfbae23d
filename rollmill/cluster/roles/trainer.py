"""Trains the line with RL, from the newest version of the base line, until the last step is committed."""

from __future__ import annotations

from rollmill.cluster.local import TERMINATED
from rollmill.cluster.run import RunDirectory
from rollmill.errors import TrainingError
from rollmill.models.device import choose_device
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.training.fitting import fitted
from rollmill.training.loop import Trainer
from rollmill.training.objectives.rl import RLObjective
from rollmill.training.placement import place
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.store import TrajectoryStore
from rollmill.types import Version
from rollmill.weights.reading.store import WeightStore


def main(run: RunDirectory) -> None:
    config = run.config
    device = choose_device(config.device)
    placement = place("trainer", device, config.training)
    training = fitted(config.training, config.model, device)
    objects = Objects.open(run.home_store)
    weights = WeightStore(objects)
    database = open_database(run.database_url)
    base = weights.head(config.base_line, config.base_form)
    if base is None:
        raise TrainingError(f"line {config.base_line!r} has no version to start from", hint="mid-training comes first")
    objective = RLObjective(
        config.rl,
        Ledger(database, run.id),
        TrajectoryStore(database, objects),
        weights,
        pace=config.pace,
        model_config=config.model,
        tokens_per_microbatch=training.tokens_per_pass,
    )
    trainer = Trainer(
        training,
        config.model,
        objective,
        weights,
        objects,
        config.line,
        Version(config.base_line, base),
        steps=config.steps,
        seed=config.seed,
        form=config.form,
        device=config.device,
        placement=placement,
    )
    trainer.run(config.steps)
    placement.leave()
    if trainer.step < config.steps:
        raise SystemExit(TERMINATED)
