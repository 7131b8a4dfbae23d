"""Checks a checkpoint before a run begins, and imports it when the run starts.

The weights become version 0 of the line `RunConfig.checkpoint_line`. config.json and tokenizer are kept beside them:
`rollmill weights export` writes them with every version that descends from it. Then nothing reads the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rollmill import telemetry
from rollmill.chat.chat_files import CHAT_FILES
from rollmill.chat.formats.choice import format_beside
from rollmill.chat.tokenizer import Tokenizer
from rollmill.errors import ConfigError
from rollmill.runs.run import RunConfig
from rollmill.types import Version
from rollmill.weights.files.companions import kept_companions
from rollmill.weights.files.exchange import Import, publish_import
from rollmill.weights.reading.weight_store import WeightStore

if TYPE_CHECKING:
    from rollmill.models.huggingface.convert import HuggingFaceModel

TOKENIZER = "tokenizer.json"


def check_checkpoint(config: RunConfig) -> HuggingFaceModel:
    """Check names, shapes and dtypes of all weights, and that the tokenizer works. Reads no weight."""
    from rollmill.models.huggingface.convert import open_checkpoint  # torch

    assert config.checkpoint is not None
    directory = Path(config.checkpoint)
    checkpoint = open_checkpoint(directory)
    model = checkpoint.layout.model
    if model.model_copy(update={"max_context": config.model.max_context}) != config.model:
        raise ConfigError(
            f"[model] is not what the config.json of {directory} describes",
            hint="with `checkpoint`, [model] may only set max_context",
        )
    if not (directory / TOKENIZER).is_file():
        raise ConfigError(
            f"{directory} has no {TOKENIZER}",
            hint="transformers writes one: AutoTokenizer.from_pretrained(NAME).save_pretrained(DIRECTORY)",
        )
    tokenizer = Tokenizer.load(directory / TOKENIZER)
    if tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"the tokenizer of {directory} has {tokenizer.vocab_size} tokens, but its model only {model.vocab_size}",
            hint=f"{TOKENIZER} and weights must come from the same checkpoint; download or copy it again",
        )
    format_beside(directory / TOKENIZER, tokenizer, config.chat)
    return checkpoint


def import_checkpoint(config: RunConfig, weights: WeightStore) -> Version:
    """Import the checkpoint as version 0 of its line, unless it is there. The files beside the weights are kept first:
    once the version exists, nothing of the checkpoint is needed any more."""
    from rollmill.models.huggingface.served import FORM, served_companions, served_tensors  # torch

    version = Version(config.checkpoint_line, 0)
    if weights.exists(version, FORM):
        return version
    checkpoint = check_checkpoint(config)
    companions = served_companions(checkpoint)
    with served_tensors(checkpoint) as tensors:
        imported = Import(tensors, converted=(), files=len(checkpoint.files.shards))
        manifest = publish_import(weights, checkpoint.files.directory, version.line, FORM, imported, companions)
    telemetry.emit(
        "import",
        version=str(version),
        parameters=checkpoint.parameters,
        active_parameters=checkpoint.active_parameters,
        stored_as=str(checkpoint.dtype).removeprefix("torch."),
        bytes=manifest.bytes,
        full_bytes=manifest.full_bytes,
        digest=manifest.digest,
    )
    return version


def imported_tokenizer(config: RunConfig, weights: WeightStore) -> dict[str, bytes]:
    """The tokenizer, and the files that say how the model chats."""
    return of_tokenizer(kept_companions(weights.objects, config.checkpoint_line))


def of_tokenizer(companions: Mapping[str, bytes]) -> dict[str, bytes]:
    """Those of the files that say how text becomes tokens."""
    return {name: companions[name] for name in (TOKENIZER, *CHAT_FILES) if name in companions}
