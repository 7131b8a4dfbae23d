"""A second decoder for the weights of published versions, sharded like the trained one.

It computes where and as the trained model does: any other way would show as a difference of the weights. Nothing here
changes the trained weights, the optimizer or a random state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollmill.models.decoder import Decoder
from rollmill.models.moe import Replay
from rollmill.training.batching import MicroBatch
from rollmill.training.parallelism import Parallelism


class FrozenModel:
    def __init__(self, parallel: Parallelism, model: Decoder) -> None:
        """Collective."""
        self.parallel = parallel
        self.decoder = parallel.models.make_like(model)

    @torch.no_grad()
    def round_to_form(self) -> None:
        """Round weights of another form to the trained model's form. Collective."""
        rows = self.parallel.rows
        own = [(name, rows.local(each)) for name, each in self.decoder.named_parameters()]
        rows.round_into([(name, each, each) for name, each in own], self.decoder.form)

    @torch.no_grad()
    def logprobs(self, part: MicroBatch, replay: Replay | None) -> Tensor:
        """[M], of all targets, on every rank. Collective."""
        return self.parallel.passes.recompute(self.decoder, part, replay).logprobs_M
