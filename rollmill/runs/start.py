"""A run that starts from a version of another run: `rollmill train RUN.toml --from RUN VERSION`.

The version is imported into the new run's store, under a line named after the other run and the same number; the first
line that the new run trains has it as its parent. Config and tokenizer are kept beside it. Then nothing reads the other
run any more.
"""

from __future__ import annotations

from pathlib import Path

from rollmill import telemetry
from rollmill.errors import ConfigError
from rollmill.models.config import ModelConfig, with_adapter
from rollmill.runs.configuration.settings import Start
from rollmill.runs.import_checkpoint import TOKENIZER
from rollmill.runs.opening import open_run
from rollmill.runs.run import RunConfig
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights.files.companions import companions_of, keep_companions
from rollmill.weights.format.manifest import Manifest
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.writing.publisher import Publisher

FORM = "bf16"  # what an import is kept in: a quantised form gets its codes back from these numbers


def check_start(config: RunConfig) -> None:
    """Check that the version is there and is of the run's model. Reads no weights."""
    assert config.start is not None
    _find(config.start)
    other = with_adapter(_model(config.start), None)
    shortened = other.model_copy(update={"max_context": min(other.max_context, config.model.max_context)})
    if shortened != config.model:
        differ = [name for name in type(other).model_fields if getattr(shortened, name) != getattr(config.model, name)]
        raise ConfigError(
            f"[model] is not the model of {config.start.run}: {', '.join(differ)} differ",
            hint="leave [model] out, or set max_context only, to at most that of the other run",
        )


def import_start(config: RunConfig, weights: WeightStore) -> Version:
    """Import the version, unless it is there. The files beside the weights are kept first: once the version exists,
    nothing of the other run is needed any more."""
    assert config.start is not None
    version = Version(config.checkpoint_line, config.start.parsed.number)
    if weights.exists(version, FORM):
        return version
    source, manifest, companions = _find(config.start)
    tensors = source.load(manifest.version, manifest.form)
    form, adapted = manifest.form, _model(config.start).adapter is not None
    if form != FORM or adapted:
        from rollmill.models.merging import plain  # torch

        tensors = dict(plain(tensors, form))
    keep_companions(weights.objects, version.line, companions)
    origin = {
        "run": config.start.id,
        "version": str(manifest.version),
        "form": FORM if adapted else form,  # with what an adapter adds, these are not the form's numbers
        "digest": manifest.digest,
    }
    published = Publisher(weights, version.line, FORM).publish(version.number, tensors, None, {"imported_from": origin})
    telemetry.emit(
        "start",
        version=str(version),
        run=config.start.id,
        origin=str(manifest.version),
        form=manifest.form,
        bytes=published.bytes,
        digest=published.digest,
    )
    return version


def _model(start: Start) -> ModelConfig:
    return open_run(Path(start.run)).config.model_of(start.parsed.line)


def _find(start: Start) -> tuple[WeightStore, Manifest, dict[str, bytes]]:
    """The other run's store, the version in it, and its companions."""
    source = WeightStore(Objects.open(open_run(Path(start.run)).home_store))
    manifest = source.manifest(start.parsed, start.form)
    companions = companions_of(source, manifest)
    if TOKENIZER not in companions:
        raise ConfigError(
            f"{manifest.version} of {start.run} has no {TOKENIZER}",
            hint="it is kept when mid-training or an import begins; restore companions/ of its store from a backup",
        )
    return source, manifest, companions
