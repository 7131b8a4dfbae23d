"""Make the base line, which RL starts from: import the checkpoint or begin with random weights, then mid-train to the
last step. What is there already is not made again."""

from __future__ import annotations

import json

from rollmill.chat.formats.choice import format_of
from rollmill.chat.formats.compact import SPECIAL_TOKENS
from rollmill.chat.tokenizer import Tokenizer, train_tokenizer
from rollmill.cluster.checkpoint import TOKENIZER, import_checkpoint, imported_tokenizer
from rollmill.cluster.local import TERMINATED
from rollmill.cluster.run import MidtrainStage, RunDirectory
from rollmill.demo.demonstrations import Demonstrations, tokenizer_texts
from rollmill.models.device import choose_device
from rollmill.storage.objects import Objects
from rollmill.training.fitting import fitted
from rollmill.training.loop import Trainer
from rollmill.training.objectives.midtrain import MidtrainObjective
from rollmill.training.parallel.world import ALONE, World, join
from rollmill.types import Version
from rollmill.weights.files.companions import keep_companions, kept_companions
from rollmill.weights.reading.store import WeightStore

TOKENIZER_SESSIONS = 2000  # generated sessions the vocabulary is learnt from


def main(run: RunDirectory) -> None:
    config = run.config
    weights = WeightStore(Objects.open(run.home_store))
    stage = config.midtrain
    world = join("midtrain", choose_device(config.device), stage.training.ranks) if stage else ALONE
    start = None
    if world.first:
        start = _prepare(run, weights)
    start = world.from_first(start)
    if stage is not None:
        _train(run, stage, weights, start, world)
    world.leave()


def _prepare(run: RunDirectory, weights: WeightStore) -> Version | None:
    """Tokenizer, and the imported version if the run has a checkpoint."""
    config = run.config
    if config.checkpoint is None:
        make_tokenizer(run, weights.objects)
        return None
    start = import_checkpoint(config, weights)
    run.tokenizer.write_bytes(imported_tokenizer(config, weights))
    return start


def _train(run: RunDirectory, stage: MidtrainStage, weights: WeightStore, start: Version | None, world: World) -> None:
    config = run.config
    tokenizer = Tokenizer.load(run.tokenizer)
    format = format_of(tokenizer, tools_in_prompt=config.tools_in_prompt)
    training = fitted(stage.training, config.model, choose_device(config.device))
    objective = MidtrainObjective(
        stage,
        Demonstrations(format, tokenizer),
        seed=config.seed,
        max_context=config.model.max_context,
        tokens_per_microbatch=training.tokens_per_pass,
    )
    trainer = Trainer(
        training,
        config.model,
        objective,
        weights,
        weights.objects,
        config.base_line,
        start,
        steps=stage.steps,
        seed=config.seed,
        form=config.form,
        device=config.device,
        world=world,
    )
    trainer.run(stage.steps)
    if trainer.step < stage.steps:
        raise SystemExit(TERMINATED)


def make_tokenizer(run: RunDirectory, objects: Objects) -> None:
    """The vocabulary the weights are made for is learnt once. It is kept beside them, with what describes the model."""
    line, config = run.config.base_line, run.config
    kept = kept_companions(objects, line)
    if TOKENIZER not in kept:  # a start that was cut short may have left the rest
        texts = tokenizer_texts(TOKENIZER_SESSIONS)
        Tokenizer(train_tokenizer(texts, config.model.vocab_size, SPECIAL_TOKENS)).save(run.tokenizer)
        # the model's own keys as they are: the same file builds the same model here, and nobody else claims the type
        about = {"model_type": "rollmill", "dtype": "bfloat16", **config.model.model_dump(mode="json")}
        kept = {"config.json": (json.dumps(about, indent=2) + "\n").encode(), TOKENIZER: run.tokenizer.read_bytes()}
    keep_companions(objects, line, kept)
    run.tokenizer.write_bytes(kept[TOKENIZER])
