"""A training step on packed tokens, on whichever device the model is: forward, loss without logits, backward, update.

    micro-batch ─► decoder, packed attention ─► rows of the targets ─► head in pieces ─► log-probs or loss ─► backward
    after several micro-batches: gradients summed in FP32 ─► one update of masters, moments and served weights

Nothing in it waits for the device before the update is queued.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from rollmill.models.attention import Attend
from rollmill.models.decoder import Decoder, DecoderOutput
from rollmill.models.kernels.head import PIECE_ELEMENTS, head_logprobs, head_next_token
from rollmill.models.kernels.varlen import packed_attention
from rollmill.models.moe import Replay, router_stats
from rollmill.training.batching import MicroBatch
from rollmill.training.graphs import MOST as GRAPHS
from rollmill.training.graphs import GraphedPasses
from rollmill.training.loss import next_token_loss, target_logprobs
from rollmill.training.optimizer import MasterOptimizer, Update


def forward_packed(model: Decoder, part: MicroBatch, replay: Replay | None = None) -> tuple[DecoderOutput, Tensor]:
    """The decoder's output, and the rows [M, width] of it that predict the targets."""
    device, dtype = model.embedding.device, model.embedding.dtype
    tokens_N, positions_N, rows_M = (moved(x, device) for x in (part.tokens_N, part.positions_N, part.rows_M))
    if replay is not None:
        replay = Replay(moved(replay.routes, device), moved(replay.valid, device), replay.plausibility)
    output = model(tokens_N, positions_N, packed_attention(part.lengths, device, dtype), replay)
    return output, _rows(output.hidden, rows_M)


def _rows(hidden_NW: Tensor, rows_M: Tensor) -> Tensor:
    if hidden_NW.is_cuda and len(rows_M) == len(hidden_NW):
        return hidden_NW  # rows ascend, so these are all of them
    return hidden_NW.index_select(0, rows_M)


def token_logprobs(
    model: Decoder, hidden_MW: Tensor, targets_M: Tensor, temperatures_M: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(log-probs of the targets, entropies) under the distribution sampled from, both with gradient."""
    targets_M = moved(targets_M, hidden_MW.device)
    if temperatures_M is not None:
        temperatures_M = None if bool((temperatures_M == 1).all()) else moved(temperatures_M, hidden_MW.device)
    if _in_pieces(model, hidden_MW):
        return head_logprobs(hidden_MW, head_weight(model), targets_M, temperatures_M)
    return target_logprobs(model.logits(hidden_MW), targets_M, temperatures_M)


def token_loss(model: Decoder, hidden_MW: Tensor, targets_M: Tensor, divisor: float) -> Tensor:
    """Cross-entropy of the targets ÷ `divisor`."""
    targets_M = moved(targets_M, hidden_MW.device)
    if _in_pieces(model, hidden_MW):
        weights_M = torch.full((len(targets_M),), 1 / divisor, dtype=torch.float32, device=hidden_MW.device)
        return head_next_token(hidden_MW, head_weight(model), targets_M, weights_M)
    logprobs_M, _ = target_logprobs(model.logits(hidden_MW), targets_M)
    return next_token_loss(logprobs_M, divisor)


class NextTokenStep:
    """Updates of a model on the next-token loss. On CUDA, passes whose shape comes back are replayed (see graphs)."""

    def __init__(
        self, model: Decoder, optimizer: MasterOptimizer, *, balance: float = 0.0, graphs: bool = True
    ) -> None:
        """`balance`: factor of the router's loss."""
        self._model, self._optimizer, self._balance = model, optimizer, balance
        self._graphs = GraphedPasses(model) if graphs and model.embedding.is_cuda else None
        self._attend = functools.lru_cache(GRAPHS)(self._packed)

    def __call__(self, parts: Sequence[MicroBatch], lr: float) -> tuple[float, Update]:
        """One update on all targets of the micro-batches, and their mean loss."""
        targets = sum(len(part.targets_M) for part in parts)
        tokens = sum(len(part.tokens_N) for part in parts)
        losses = []
        for part in parts:
            losses.append(self._pass(part, targets, tokens).clone())
            if len(parts) > 1:
                self._optimizer.accumulate()
        update = self._optimizer.update(lr)
        return float(torch.stack(losses).sum()), update

    def _packed(self, lengths: tuple[int, ...]) -> Attend:
        return packed_attention(lengths, self._model.embedding.device, self._model.embedding.dtype)

    def _pass(self, part: MicroBatch, targets: int, tokens: int) -> Tensor:
        """Forward and backward of a micro-batch of a step with so many targets and tokens; its part of the loss."""
        device = self._model.embedding.device
        attend = self._attend(tuple(part.lengths))

        def backward(tokens_N: Tensor, positions_N: Tensor, rows_M: Tensor, targets_M: Tensor) -> Tensor:
            output = self._model(tokens_N, positions_N, attend)
            loss = token_loss(self._model, _rows(output.hidden, rows_M), targets_M, targets)
            whole = loss
            if output.routings and self._balance:
                whole = loss + self._balance * len(tokens_N) / tokens * router_stats(output.routings).balance
            whole.backward()
            return loss.detach()

        inputs = [moved(x, device) for x in (part.tokens_N, part.positions_N, part.rows_M, part.targets_M)]
        if self._graphs is None:
            return backward(*inputs)
        return self._graphs.run((*part.lengths, len(part.rows_M), targets, tokens), inputs, backward)


def head_weight(model: Decoder) -> Tensor:
    return model.embedding if model.head is None else model.head


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device, without waiting for it."""
    if tensor.device == device:
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def _in_pieces(model: Decoder, hidden_MW: Tensor) -> bool:
    """On the CPU only where logits would be large: a small product has other bits when it is cut."""
    return hidden_MW.is_cuda or hidden_MW.shape[0] * model.config.vocab_size > PIECE_ELEMENTS
