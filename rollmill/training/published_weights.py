"""Published weights as what training begins from, and as what an adapter is trained beside."""

from __future__ import annotations

from rollmill.models.decoder import Decoder
from rollmill.training.lineage import form_held
from rollmill.training.parallelism import Parallelism
from rollmill.types import Version
from rollmill.weights.reading.weight_store import WeightStore


def load_published(parallel: Parallelism, model: Decoder, weights: WeightStore, version: Version, form: str) -> str:
    """Load a version into the model. Returns the form it was read in."""
    held = form_held(weights, version, form)
    parallel.models.load_version(model, weights, version, held)
    return held


def load_frozen(
    parallel: Parallelism, model: Decoder, weights: WeightStore, known: Version | None, form: str, seed: int
) -> None:
    """Load what an adapter is beside, which is in no checkpoint. `known`: the newest version of the line, or its
    parent; None: the line began with random weights."""
    if model.config.adapter is None:
        return
    if known is None:
        parallel.models.initialise(model, seed)
    else:
        load_published(parallel, model, weights, known, form)
