"""Passes on the next-token loss. On CUDA, passes whose shape comes again are replayed (training/numerics/graphs.py)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rollmill.models.decoder import Decoder
from rollmill.models.moe import router_stats
from rollmill.models.packed_attention import packed_attention
from rollmill.training.batching import MicroBatch
from rollmill.training.numerics.graphs import MOST as GRAPHS
from rollmill.training.numerics.graphs import GraphedPasses
from rollmill.training.numerics.router_replay import expert_load
from rollmill.training.packed_pass import moved, predicting_rows, token_loss


class NextTokenPasses:
    """Forward and backward passes of one model."""

    def __init__(self, model: Decoder, balance: float, graphs: bool = True) -> None:
        """`balance`: factor of the loss that spreads tokens over experts. `graphs`: record CUDA graphs if possible."""
        self.model, self._balance = model, balance
        self._graphs = GraphedPasses(model) if graphs and model.recordable else None
        device, dtype = model.embedding.device, model.embedding.dtype
        self._attend = functools.lru_cache(GRAPHS)(functools.partial(packed_attention, device=device, dtype=dtype))

    def __call__(self, part: MicroBatch, targets: int, tokens: int) -> tuple[Tensor, Tensor | None]:
        """See training.parallelism.NextTokenPass. Counts are FP32."""
        # The closure must not refer to self: a graph keeps what its pass refers to, so both would live until the
        # garbage collector runs. If it runs while another pass is recorded, it spoils the recording.
        model, balance, attend = self.model, self._balance, self._attend(tuple(part.lengths))

        def backward(tokens_N: Tensor, positions_N: Tensor, rows_M: Tensor, targets_M: Tensor) -> Tensor:
            output = model(tokens_N, positions_N, attend)
            loss = token_loss(model, predicting_rows(output.hidden, rows_M), targets_M, targets)
            whole = loss
            if output.routings and balance:
                share = len(tokens_N) / tokens
                whole = loss + balance * share * router_stats(output.routings).balance
            whole.backward()
            load = [expert_load(output.routings).flatten()] if output.routings else []
            return torch.cat([loss.detach().view(1), *load])

        device = model.embedding.device
        inputs = [moved(x, device) for x in (part.tokens_N, part.positions_N, part.rows_M, part.targets_M)]
        if self._graphs is None:
            found = backward(*inputs)
        else:
            shape = (*part.lengths, len(part.rows_M), targets, tokens)
            found = self._graphs.run(shape, inputs, backward).clone()
        config = model.config
        return found[0], found[1:].view(config.moe_layers, config.experts) if config.moe_layers else None
