"""Weights into decoders, and a second decoder for those of published versions: whole, or sharded as the trained one is.

Nothing here touches the trained weights, the optimizer or a random state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollmill.models.decoder import Decoder
from rollmill.models.device import decoder_like
from rollmill.models.host import load_host
from rollmill.models.moe import Replay
from rollmill.training.batching import MicroBatch
from rollmill.training.parallel.rows import local, rounded, shards_of
from rollmill.training.parallel.world import ALONE
from rollmill.training.recompute import recompute
from rollmill.types import Version
from rollmill.weights.format.tensors import Tensors
from rollmill.weights.reading.store import WeightStore


def initialise(model: Decoder, seed: int) -> None:
    """Random weights of the seed."""
    if shards_of(model) is None:
        return model.initialise(seed)
    from rollmill.training.parallel.load import drawn_rows, fill_rows

    fill_rows(model, drawn_rows(model, seed))


def load_version(model: Decoder, store: WeightStore, version: Version, form: str) -> None:
    """Those of a published version. Of many ranks each reads what it holds, by itself."""
    if shards_of(model) is None:
        return load_host(model, store.load(version, form))
    from rollmill.training.parallel.load import fill_rows, stored_rows

    fill_rows(model, stored_rows(model, store, version, form))


def load_held(model: Decoder, tensors: Tensors) -> None:
    """Those that a publisher of this model held."""
    if shards_of(model) is None:
        return load_host(model, tensors)
    from rollmill.training.parallel.load import fill_rows

    fill_rows(model, [tensors])


class Twin:
    """Computes where and as the trained model does: any other way would show as a difference of the weights."""

    def __init__(self, model: Decoder) -> None:
        """Of many ranks each calls it, as all that computes."""
        shards = shards_of(model)
        if shards is None:
            self.decoder, self.world = decoder_like(model), ALONE
        else:
            from rollmill.training.parallel.shard import sharded_like

            self.decoder, self.world = sharded_like(model, shards), shards.world

    @torch.no_grad()
    def round_to_form(self) -> None:
        """To what the trained model is served as, where the weights are of another form."""
        for name, parameter in self.decoder.named_parameters():
            held = local(parameter)
            held.copy_(rounded(name, held, self.decoder.form, shards_of(self.decoder)))

    @torch.no_grad()
    def logprobs(self, part: MicroBatch, replay: Replay | None) -> Tensor:
        """[M], of all targets on every rank."""
        found = recompute(self.decoder, part, replay).logprobs_M
        if self.world.size > 1:
            from rollmill.training.parallel.shard import release

            release(self.decoder)
        return found
