"""A second decoder for the weights of published versions, sharded like the trained one.

It computes where and as the trained model does: any other way would show as a difference of the weights. Nothing here
changes the trained weights, the optimizer or a random state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import round_to_form_
from rollmill.models.kernels.forms import is_quantised
from rollmill.models.moe import Replay
from rollmill.training.batching import MicroBatch
from rollmill.training.parallelism import Parallelism
from rollmill.types import Version
from rollmill.weights.format.tensors import Tensors
from rollmill.weights.reading.weight_store import WeightStore


class FrozenModel:
    def __init__(self, parallel: Parallelism, model: Decoder) -> None:
        """Collective."""
        self.parallel = parallel
        self.decoder = parallel.models.make_like(model)

    def load_version(self, store: WeightStore, version: Version, form: str) -> None:
        self.parallel.models.load_version(self.decoder, store, version, form)

    def load_held(self, tensors: Tensors) -> None:
        self.parallel.models.load_held(self.decoder, tensors)

    @torch.no_grad()
    def round_to_form(self) -> None:
        """Round weights of another form to the trained model's form. Collective."""
        own = {name: self.parallel.rows.local(each) for name, each in self.decoder.named_parameters()}
        if is_quantised(self.decoder.form):
            self.parallel.rows.round_into([(name, each, each) for name, each in own.items()], self.decoder.form)
        else:
            round_to_form_(list(own.items()), self.decoder.form)

    @torch.no_grad()
    def logprobs(self, part: MicroBatch, replay: Replay | None) -> Tensor:
        """[M], of all targets, on every rank. Collective."""
        return self.parallel.passes.recompute(self.decoder, part, replay).logprobs_M
