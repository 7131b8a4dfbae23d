"""Makes the base line, which RL starts from: imports a checkpoint or a version of another run, or draws random weights,
then mid-trains.

Skips what is already there."""

from __future__ import annotations

from pathlib import Path

from rollmill.chat.formats.choice import format_of
from rollmill.chat.formats.compact import SPECIAL_TOKENS
from rollmill.chat.tokenizer import Tokenizer
from rollmill.cluster.checkpoint import TOKENIZER, import_checkpoint, imported_tokenizer
from rollmill.cluster.local import TERMINATED
from rollmill.cluster.run import MidtrainStage, RunDirectory
from rollmill.cluster.start import import_start
from rollmill.demo.demonstrations import DemonstrationStream
from rollmill.demo.tokenizer import demo_tokenizer
from rollmill.models.config import ModelConfig
from rollmill.models.device import choose_device
from rollmill.models.huggingface.describe import describe_model
from rollmill.models.huggingface.files import CONFIG
from rollmill.storage.objects import Objects
from rollmill.training.fitting import fitted
from rollmill.training.loop import Trainer
from rollmill.training.mixture import Mixture, Part
from rollmill.training.objectives.midtrain import MidtrainObjective
from rollmill.training.placement import Placement, place
from rollmill.training.whole import WHOLE
from rollmill.types import Version
from rollmill.weights.files.companions import keep_companions, kept_companions
from rollmill.weights.files.directory import encode_json
from rollmill.weights.reading.store import WeightStore


def main(run: RunDirectory) -> None:
    config = run.config
    weights = WeightStore(Objects.open(run.home_store))
    stage = config.midtrain
    placement = place("midtrain", choose_device(config.device), stage.training) if stage else WHOLE
    start = None
    if placement.first:
        start = _prepare(run, weights)
    start = placement.from_first(start)
    if stage is not None:
        _train(run, stage, weights, start, placement)
    placement.leave()


def _prepare(run: RunDirectory, weights: WeightStore) -> Version | None:
    """Make the tokenizer. Import the weights that the run starts from, if any, and return their version."""
    config = run.config
    if config.checkpoint is None and config.start is None:
        make_tokenizer(run, weights.objects)
        return None
    start = import_checkpoint(config, weights) if config.start is None else import_start(config, weights)
    run.tokenizer.write_bytes(imported_tokenizer(config, weights))
    return start


def _train(
    run: RunDirectory, stage: MidtrainStage, weights: WeightStore, start: Version | None, placement: Placement
) -> None:
    config = run.config
    tokenizer = Tokenizer.load(run.tokenizer)
    format = format_of(tokenizer, tools_in_prompt=config.tools_in_prompt)
    training = fitted(stage.training, config.model, choose_device(config.device))
    objective = MidtrainObjective(
        stage,
        Mixture([Part("demonstrations", DemonstrationStream(format, tokenizer, config.seed))], config.seed),
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
        placement=placement,
    )
    trainer.run(stage.steps)
    if trainer.step < stage.steps:
        raise SystemExit(TERMINATED)


def make_tokenizer(run: RunDirectory, objects: Objects) -> None:
    """Learn the vocabulary once, and keep it beside the weights with the files that describe the model."""
    line, config = run.config.base_line, run.config
    kept = kept_companions(objects, line)
    if TOKENIZER not in kept:  # an interrupted start may have kept only some files
        demo_tokenizer(config.model.vocab_size).save(run.tokenizer)
        kept = {**_model_files(config.model, run.tokenizer), TOKENIZER: run.tokenizer.read_bytes()}
    keep_companions(objects, line, kept)
    run.tokenizer.write_bytes(kept[TOKENIZER])


def _model_files(model: ModelConfig, tokenizer: Path) -> dict[str, bytes]:
    """What transformers needs beside weights and tokenizer.json to load an export of a model that began here."""
    end = SPECIAL_TOKENS[0]
    ids = {"bos_token_id": None, "eos_token_id": Tokenizer.load(tokenizer).token_id(end), "pad_token_id": None}
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "model_max_length": model.max_context,
        "clean_up_tokenization_spaces": False,
    }
    return {CONFIG: encode_json(describe_model(model) | ids), "tokenizer_config.json": encode_json(described)}
