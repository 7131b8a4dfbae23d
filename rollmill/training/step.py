"""The parts of a pass over packed tokens, on the model's device. None of them waits for the device.

micro-batch ─► decoder, packed attention ─► rows of the targets ─► head, in chunks ─► log-probs or loss ─► backward
after several micro-batches: gradients summed in FP32 ─► one update of masters, moments and served weights
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollmill.models.decoder import Decoder, DecoderOutput
from rollmill.models.kernels.head import PIECE_ELEMENTS, head_logprobs, head_next_token
from rollmill.models.kernels.varlen import packed_attention
from rollmill.models.moe import Replay
from rollmill.training.batching import MicroBatch
from rollmill.training.loss import next_token_loss, target_logprobs


def forward_packed(model: Decoder, part: MicroBatch, replay: Replay | None = None) -> tuple[DecoderOutput, Tensor]:
    """The decoder's output, and its rows [M, width] that predict the targets."""
    device, dtype = model.embedding.device, model.embedding.dtype
    tokens_N, positions_N, rows_M = (moved(x, device) for x in (part.tokens_N, part.positions_N, part.rows_M))
    if replay is not None:
        replay = Replay(moved(replay.routes, device), moved(replay.valid, device), replay.plausibility)
    output = model(tokens_N, positions_N, packed_attention(part.lengths, device, dtype), replay)
    return output, predicting_rows(output.hidden, rows_M)


def predicting_rows(hidden_NW: Tensor, rows_M: Tensor) -> Tensor:
    if hidden_NW.is_cuda and len(rows_M) == len(hidden_NW):
        return hidden_NW  # rows ascend, so these are all rows in order
    return hidden_NW.index_select(0, rows_M)


def token_logprobs(
    model: Decoder, hidden_MW: Tensor, targets_M: Tensor, temperatures_M: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(log-probs of the targets, entropies) under the distribution sampled from, both with gradient."""
    targets_M = moved(targets_M, hidden_MW.device)
    if temperatures_M is not None:
        temperatures_M = None if bool((temperatures_M == 1).all()) else moved(temperatures_M, hidden_MW.device)
    if _in_chunks(model, hidden_MW):
        return head_logprobs(hidden_MW, head_weight(model), targets_M, temperatures_M)
    return target_logprobs(model.logits(hidden_MW), targets_M, temperatures_M)


def token_loss(model: Decoder, hidden_MW: Tensor, targets_M: Tensor, divisor: float) -> Tensor:
    """Cross-entropy of the targets ÷ `divisor`."""
    targets_M = moved(targets_M, hidden_MW.device)
    if _in_chunks(model, hidden_MW):
        weights_M = torch.full((len(targets_M),), 1 / divisor, dtype=torch.float32, device=hidden_MW.device)
        return head_next_token(hidden_MW, head_weight(model), targets_M, weights_M)
    logprobs_M, _ = target_logprobs(model.logits(hidden_MW), targets_M)
    return next_token_loss(logprobs_M, divisor)


def head_weight(model: Decoder) -> Tensor:
    return model.embedding if model.head is None else model.head


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; does not wait for the copy."""
    if tensor.device == device:
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def _in_chunks(model: Decoder, hidden_MW: Tensor) -> bool:
    """On the CPU only if the logits would be large: a small product gives other bits when it is cut."""
    return hidden_MW.is_cuda or hidden_MW.shape[0] * model.config.vocab_size > PIECE_ELEMENTS
