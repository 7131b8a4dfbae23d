"""The parts of a pass over packed tokens, on the model's device. None of them waits for the device.

micro-batch ─► decoder, packed attention ─► rows of the targets ─► head, in chunks ─► log-probs or loss ─► backward
after several micro-batches: gradients summed in FP32 ─► one update of masters, moments and served weights
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rollmill.models.decoder import Decoder, DecoderOutput
from rollmill.models.kernels.fused import fp32_linear
from rollmill.models.kernels.heads.head import PIECE_ELEMENTS, head_logprobs, head_next_token, log_softmax
from rollmill.models.moe import Replay
from rollmill.models.packed_attention import packed_attention
from rollmill.models.shaping import shape_logits
from rollmill.training.batching import MicroBatch


def forward_packed(model: Decoder, part: MicroBatch, replay: Replay | None = None) -> tuple[DecoderOutput, Tensor]:
    """The decoder's output, and its rows [M, width] that predict the targets."""
    device, dtype = model.embedding.device, model.embedding.dtype
    tokens_N, positions_N, rows_M = (moved(x, device) for x in (part.tokens_N, part.positions_N, part.rows_M))
    if replay is not None:
        replay = Replay(moved(replay.routes, device), moved(replay.valid, device), replay.plausibility)
    output = model(tokens_N, positions_N, packed_attention(part.lengths, device, dtype, model.exact), replay)
    return output, predicting_rows(output.hidden, rows_M)


def predicting_rows(hidden_NW: Tensor, rows_M: Tensor) -> Tensor:
    if hidden_NW.is_cuda and len(rows_M) == len(hidden_NW):
        return hidden_NW  # rows ascend, so these are all rows in order
    return hidden_NW.index_select(0, rows_M)


def token_logprobs(
    model: Decoder,
    hidden_MW: Tensor,
    targets_M: Tensor,
    temperatures_M: Tensor | None = None,
    shapes_M: np.ndarray | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probs of the targets, entropies) under the distribution sampled from, both with gradient."""
    targets_M = moved(targets_M, hidden_MW.device)
    if temperatures_M is not None:
        temperatures_M = None if bool((temperatures_M == 1).all()) else moved(temperatures_M, hidden_MW.device)
    shaped = np.zeros(len(targets_M), np.bool_) if shapes_M is None else shapes_M != np.array(None)
    if shapes_M is not None and shaped.any():
        return _some_shaped(model, hidden_MW, targets_M, temperatures_M, shapes_M, shaped)
    if _in_chunks(model, hidden_MW):
        return head_logprobs(hidden_MW, head_weight(model), targets_M, temperatures_M, model.exact, model.form)
    return target_logprobs(model.logits(hidden_MW), targets_M, temperatures_M)


def _some_shaped(
    model: Decoder,
    hidden_MW: Tensor,
    targets_M: Tensor,
    temperatures_M: Tensor | None,
    shapes_M: np.ndarray,
    shaped: np.ndarray,
) -> tuple[Tensor, Tensor]:
    """Rows with a shape go in chunks of their own, whose logits are computed again in the backward pass."""
    rows = max(1, PIECE_ELEMENTS // 8 // model.config.vocab_size)
    places = np.flatnonzero(shaped)
    parts = [places[start : start + rows] for start in range(0, len(places), rows)]
    plain = np.flatnonzero(~shaped)
    found = []
    for part in [plain, *parts] if len(plain) else parts:
        part_m = moved(torch.from_numpy(part), hidden_MW.device)
        hidden_mW, targets_m = hidden_MW.index_select(0, part_m), targets_M.index_select(0, part_m)
        temperatures_m = None if temperatures_M is None else temperatures_M.index_select(0, part_m)
        if part is plain:
            found.append(token_logprobs(model, hidden_mW, targets_m, temperatures_m))
        else:
            given = (hidden_mW, head_weight(model), targets_m, temperatures_m, shapes_M[part], model.exact)
            found.append(checkpoint(_shaped_logprobs, *given, use_reentrant=False))
    order_M = np.argsort(np.concatenate([plain, *parts]))
    back_M = moved(torch.from_numpy(order_M), hidden_MW.device)
    logprobs_M, entropies_M = (torch.cat(column).index_select(0, back_M) for column in zip(*found, strict=True))
    return logprobs_M, entropies_M


def _shaped_logprobs(
    hidden_MW: Tensor,
    weight_VW: Tensor,
    targets_M: Tensor,
    temperatures_M: Tensor | None,
    shapes_M: np.ndarray,
    exact: bool,
) -> tuple[Tensor, Tensor]:
    logits_MV = shape_logits(fp32_linear(hidden_MW, weight_VW, exact), temperatures_M, shapes_M.tolist())
    return target_logprobs(logits_MV, targets_M)


def token_loss(model: Decoder, hidden_MW: Tensor, targets_M: Tensor, divisor: float) -> Tensor:
    """Cross-entropy of the targets ÷ `divisor`."""
    targets_M = moved(targets_M, hidden_MW.device)
    if _in_chunks(model, hidden_MW):
        weights_M = torch.full((len(targets_M),), 1 / divisor, dtype=torch.float32, device=hidden_MW.device)
        return head_next_token(hidden_MW, head_weight(model), targets_M, weights_M, model.form)
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


class _TargetLogprobs(torch.autograd.Function):
    """Log-softmax at the targets, and the entropies. Keeps only one [M, vocab] tensor: the probabilities."""

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_MV = log_softmax(logits_MV)
        logprobs_M = logprobs_MV.gather(1, targets_M[:, None]).squeeze(1)
        probabilities_MV = logprobs_MV.exp()
        entropies_M = -logprobs_MV.mul_(probabilities_MV).nansum(-1)  # 0 · −inf is 0 here
        ctx.save_for_backward(probabilities_MV, targets_M, entropies_M)
        ctx.set_materialize_grads(False)  # there is rarely an entropy bonus
        return logprobs_M, entropies_M

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor | None, grad_entropies_M: Tensor | None) -> tuple[Tensor | None, None]:
        probabilities_MV, targets_M, entropies_M = ctx.saved_tensors
        if grad_M is None and grad_entropies_M is None:
            return None, None
        grad_MV = torch.zeros_like(probabilities_MV) if grad_M is None else probabilities_MV * -grad_M[:, None]
        if grad_M is not None:
            grad_MV.scatter_add_(1, targets_M[:, None], grad_M[:, None])
        if grad_entropies_M is not None:  # dH/dlogit = −p · (log p + H), and p · log p is 0 where p is
            surprise_MV = probabilities_MV.log().clamp_(min=-1e4).add_(entropies_M[:, None])
            grad_MV -= probabilities_MV * surprise_MV.mul_(grad_entropies_M[:, None])
        return grad_MV, None


def target_logprobs(
    logits_MV: Tensor, targets_M: Tensor, temperatures_M: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(log-probs of the targets, entropies) under the distribution sampled from, both with gradient."""
    if temperatures_M is not None and not bool((temperatures_M == 1).all()):
        logits_MV = logits_MV / temperatures_M[:, None]
    return _TargetLogprobs.apply(logits_MV, targets_M)


def next_token_loss(logprobs_M: Tensor, divisor: float) -> Tensor:
    """Mid-training and SFT: cross-entropy of the targets. Tokens that are not targets are masked."""
    return -logprobs_M.sum() / divisor
