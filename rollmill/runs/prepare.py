"""What a run needs before its first stage: a tokenizer, and the weights that it starts from, if any.

What is already there is kept: an interrupted start is completed by the next.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from rollmill.chat.chat_files import TEMPLATE
from rollmill.chat.config import ChatConfig
from rollmill.chat.formats.choice import format_of
from rollmill.chat.tokenizer import Tokenizer
from rollmill.errors import ConfigError
from rollmill.kinds import load_object
from rollmill.models.config import ModelConfig
from rollmill.models.huggingface.describe import describe_model, describe_rope
from rollmill.models.huggingface.files import CONFIG
from rollmill.runs.import_checkpoint import TOKENIZER, import_checkpoint, imported_tokenizer, of_tokenizer
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.runs.start import import_start
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights.files.checkpoint_directory import encode_json
from rollmill.weights.files.companions import companions_of, keep_companions, kept_companions
from rollmill.weights.reading.weight_store import WeightStore


def prepare(run: RunDirectory, weights: WeightStore) -> Version | None:
    """Make the tokenizer. Import the weights that the run starts from, if any, and return their version."""
    config = run.config
    if config.checkpoint is None and config.start is None:
        keep_tokenizer(run, weights.objects)
        return None
    start = import_checkpoint(config, weights) if config.start is None else import_start(config, weights)
    _write_beside(run, imported_tokenizer(config, weights))
    return start


def need_tokenizer(run: RunDirectory) -> Path:
    """The tokenizer in the run's directory, brought there if this host does not have it yet."""
    if not run.tokenizer.exists():
        restore_tokenizer(run)
    return run.tokenizer


def is_prepared(run: RunDirectory) -> bool:
    """Whether the store has all that the first stage needs, so that nothing is read from this host any more."""
    config, objects = run.config, run.objects()
    if config.checkpoint is None and config.start is None:
        return TOKENIZER in kept_companions(objects, config.stages[0].name)
    start = Version(config.checkpoint_line, config.start.parsed.number if config.start else 0)
    return WeightStore(objects).exists(start, "bf16") and TOKENIZER in kept_companions(objects, start.line)


def restore_tokenizer(run: RunDirectory) -> None:
    """Write the tokenizer into the run's directory again, from what is kept beside its weights."""
    config = run.config
    random = config.checkpoint is None and config.start is None
    line = config.stages[0].name if random else config.checkpoint_line
    kept = kept_companions(run.objects(), line)
    if TOKENIZER in kept:
        _write_beside(run, of_tokenizer(kept))


def _write_beside(run: RunDirectory, files: Mapping[str, bytes]) -> None:
    """Write the tokenizer and the files of its chat format. The template that the configuration names is read once."""
    directory, named = run.tokenizer.parent, run.config.chat.template
    if named is not None:
        files = {**files, TEMPLATE: _template(run, Path(named))}
    directory.mkdir(parents=True, exist_ok=True)
    for name in sorted(files, key=lambda name: name == TOKENIZER):  # the tokenizer last: others wait for it
        draft = directory / f".{name}-{os.getpid()}"  # several processes of a host may need it at once
        draft.write_bytes(files[name])
        os.replace(draft, directory / name)


def _template(run: RunDirectory, named: Path) -> bytes:
    """The chat template as it was when the run began. In a remote store it is kept there: other hosts have no file."""
    template, key = run.tokenizer.parent / TEMPLATE, f"cluster/{TEMPLATE}"
    if template.exists():
        return template.read_bytes()
    objects = run.objects() if run.config.store is not None else None
    if objects is not None and objects.head(key) is not None:
        return objects.get(key)
    content = named.read_bytes()
    if objects is not None:
        objects.put(key, content)
    return content


def keep_tokenizer(run: RunDirectory, objects: Objects) -> None:
    """Make the tokenizer once, and keep it beside the weights with the files that describe the model."""
    line, config = run.config.stages[0].name, run.config
    kept = kept_companions(objects, line)
    if TOKENIZER not in kept:  # an interrupted start may have kept only some files
        made = make_tokenizer(config)
        run.tokenizer.parent.mkdir(parents=True, exist_ok=True)
        made.save(run.tokenizer)
        kept = {**_model_files(config.model_of(line), made, config.chat), TOKENIZER: run.tokenizer.read_bytes()}
    keep_companions(objects, line, kept)
    _write_beside(run, of_tokenizer(kept))


def describe_longer(weights: WeightStore, parent: Version, line: str, model: ModelConfig) -> None:
    """Keep a config.json of its own beside a line whose context is longer than that of its parent. An export has it."""
    form = next(form for form in weights.forms(parent.line) if weights.exists(parent, form))
    files = companions_of(weights, weights.manifest(parent, form))
    described = json.loads(files.get(CONFIG, b"{}"))
    if described.get("max_position_embeddings", model.max_context) >= model.max_context:
        return
    scaling = describe_rope(model)
    described["max_position_embeddings"] = model.max_context
    if "rope_parameters" in described:  # newer files have it instead
        described["rope_parameters"] = {**(scaling or {}), "rope_theta": model.rope_theta}
    else:
        described["rope_scaling"] = scaling
    keep_companions(weights.objects, line, {**files, CONFIG: encode_json(described)})


def make_tokenizer(config: RunConfig) -> Tokenizer:
    """The tokenizer that `tokenizer` names: a file, or what a function returns. ConfigError if it does not fit."""
    setting, size = config.tokenizer or "", config.model.vocab_size
    if setting.endswith(".json"):
        made = Tokenizer.load(Path(setting))
    else:
        made = load_object(f"tokenizer = {setting!r}", setting)(size)
    if not isinstance(made, Tokenizer):
        raise ConfigError(
            f"tokenizer = {setting!r} returned a {type(made).__name__}", hint="it must return a rollmill.Tokenizer"
        )
    if made.vocab_size > size:
        raise ConfigError(
            f"tokenizer = {setting!r} has {made.vocab_size} tokens, but model.vocab_size is {size}",
            hint=f"set model.vocab_size to at least {made.vocab_size}",
        )
    format_of(made, config=config.chat)
    return made


def check_tokenizer(config: RunConfig) -> None:
    """Check that the tokenizer can be made. Calls no function: learning a vocabulary takes time."""
    if config.tokenizer is not None and config.tokenizer.endswith(".json"):
        make_tokenizer(config)
    elif config.tokenizer is not None and not callable(load_object("tokenizer", config.tokenizer)):
        raise ConfigError(f"tokenizer = {config.tokenizer!r} is not a function")


def _model_files(model: ModelConfig, tokenizer: Tokenizer, chat: ChatConfig) -> dict[str, bytes]:
    """What transformers needs beside weights and tokenizer.json to load an export of a model that began here."""
    end = format_of(tokenizer, config=chat).stop_tokens[0]
    ids = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None}
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.decode([end]),
        "model_max_length": model.max_context,
        "clean_up_tokenization_spaces": False,
    }
    return {CONFIG: encode_json(describe_model(model) | ids), "tokenizer_config.json": encode_json(described)}
