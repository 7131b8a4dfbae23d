"""Triton passes of a router: scores and the best experts, gate weights, and rows sorted by expert.

Torch needs about thirty small kernels per layer for this; these are six. Expert numbers are in range whatever the
scores are, NaN included, because later kernels use them as addresses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 2048  # of a block: rows · experts


def _blocks(rows: int, experts: int) -> tuple[tuple[int], dict[str, int]]:
    """Returns (the grid, the sizes of a block)."""
    across = max(16, int(triton.next_power_of_2(experts)))
    block = max(1, _ELEMENTS // across)
    return (triton.cdiv(rows, block),), {"ROWS": block, "EXPERTS": across, "num_warps": 4}


@triton.jit
def _choose(
    logits_ptr, bias_ptr, scores_ptr, live_ptr, rows, experts, SOFTMAX: tl.constexpr, BIASED: tl.constexpr,
    K: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    inside = (row < rows)[:, None] & (expert < experts)[None, :]
    at = row[:, None] * experts + expert[None, :]
    logits = tl.load(logits_ptr + at, inside, -float("inf"))
    if SOFTMAX:
        # rows beyond the last are all −inf, and −inf − (−inf) would be NaN
        top = tl.where(row < rows, tl.max(logits, 1), 0.0)
        powers = tl.exp(logits - top[:, None])
        scores = powers / tl.sum(powers, 1)[:, None]
    else:
        scores = tl.sigmoid(logits)
    tl.store(scores_ptr + at, scores, inside)
    if BIASED:
        scores += tl.load(bias_ptr + expert, expert < experts, 0.0)[None, :]
    scores = tl.where(scores == scores, scores, -1e30)  # NaN ranks last, but before the padding
    scores = tl.where((expert < experts)[None, :], scores, -float("inf"))
    for choice in tl.static_range(K):
        best = tl.argmax(scores, 1)
        tl.store(live_ptr + row * K + choice, best.to(tl.int64), row < rows)
        scores = tl.where(expert[None, :] == best[:, None], -float("inf"), scores)


def choose(logits_NE: Tensor, bias_E: Tensor | None, k: int, *, softmax: bool) -> tuple[Tensor, Tensor]:
    """Returns (scores, int64 [N, k]: the best experts by score + bias, best first, ties by number)."""
    rows, experts = logits_NE.shape
    scores_NE = torch.empty_like(logits_NE)
    live_Nk = torch.empty((rows, k), dtype=torch.int64, device=logits_NE.device)
    grid, sizes = _blocks(rows, experts)
    if rows:
        bias = logits_NE if bias_E is None else bias_E
        flags = {"SOFTMAX": softmax, "BIASED": bias_E is not None, "K": k}
        _choose[grid](logits_NE, bias, scores_NE, live_Nk, rows, experts, **flags, **sizes)
    return scores_NE, live_Nk


@triton.jit
def _logit_slopes(
    scores_ptr, grad_ptr, out_ptr, rows, experts, SOFTMAX: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    inside = (row < rows)[:, None] & (expert < experts)[None, :]
    at = row[:, None] * experts + expert[None, :]
    scores = tl.load(scores_ptr + at, inside, 0.0)
    grad = tl.load(grad_ptr + at, inside, 0.0)
    if SOFTMAX:
        out = scores * (grad - tl.sum(scores * grad, 1)[:, None])
    else:
        out = grad * scores * (1.0 - scores)
    tl.store(out_ptr + at, out, inside)


def logit_slopes(scores_NE: Tensor, grad_NE: Tensor, *, softmax: bool) -> Tensor:
    """The gradient of the logits, given the gradient of the scores."""
    rows, experts = scores_NE.shape
    out_NE = torch.empty_like(scores_NE)
    grid, sizes = _blocks(rows, experts)
    if rows:
        _logit_slopes[grid](scores_NE, grad_NE.contiguous(), out_NE, rows, experts, SOFTMAX=softmax, **sizes)
    return out_NE


@triton.jit
def _weigh(
    scores_ptr, chosen_ptr, weights_ptr, rows, experts, scale, NORMALISED: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    total = tl.zeros([ROWS], tl.float32)
    for choice in tl.static_range(K):
        expert = tl.load(chosen_ptr + row * K + choice, inside, 0)
        total += tl.load(scores_ptr + row * experts + expert, inside, 0.0)
    for choice in tl.static_range(K):
        expert = tl.load(chosen_ptr + row * K + choice, inside, 0)
        weight = tl.load(scores_ptr + row * experts + expert, inside, 0.0)
        if NORMALISED:
            weight = weight / total
        tl.store(weights_ptr + row * K + choice, weight * scale, inside)


def weigh(scores_NE: Tensor, chosen_Nk: Tensor, scale: float, *, normalised: bool) -> Tensor:
    """[N, k]: the scores of the chosen experts, divided by their sum if `normalised`, times `scale`."""
    (rows, k), experts = chosen_Nk.shape, scores_NE.shape[1]
    weights_Nk = torch.empty((rows, k), dtype=torch.float32, device=scores_NE.device)
    if rows:
        _weigh[(triton.cdiv(rows, 256),)](
            scores_NE, chosen_Nk, weights_Nk, rows, experts, scale, NORMALISED=normalised, K=k, ROWS=256, num_warps=4
        )
    return weights_Nk


@triton.jit
def _score_slopes(
    scores_ptr, chosen_ptr, grad_ptr, out_ptr, rows, experts, scale, NORMALISED: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    inside = row < rows
    total = tl.zeros([ROWS], tl.float32)
    product = tl.zeros([ROWS], tl.float32)
    for choice in tl.static_range(K):
        chosen = tl.load(chosen_ptr + row * K + choice, inside, 0)
        score = tl.load(scores_ptr + row * experts + chosen, inside, 0.0)
        total += score
        product += score * tl.load(grad_ptr + row * K + choice, inside, 0.0)
    total = tl.where(inside, total, 1.0)
    out = tl.zeros([ROWS, EXPERTS], tl.float32)
    for choice in tl.static_range(K):
        chosen = tl.load(chosen_ptr + row * K + choice, inside, 0)
        grad = tl.load(grad_ptr + row * K + choice, inside, 0.0) * scale
        if NORMALISED:
            grad = (grad - product * scale / total) / total
        out += tl.where(expert[None, :] == chosen[:, None], grad[:, None], 0.0)
    at = row[:, None] * experts + expert[None, :]
    tl.store(out_ptr + at, out, inside[:, None] & (expert < experts)[None, :])


def score_slopes(scores_NE: Tensor, chosen_Nk: Tensor, grad_Nk: Tensor, scale: float, *, normalised: bool) -> Tensor:
    """The gradient of the scores, given the gradient of the weights."""
    (rows, k), experts = chosen_Nk.shape, scores_NE.shape[1]
    out_NE = torch.empty_like(scores_NE)
    grid, sizes = _blocks(rows, experts)
    if rows:
        grad = grad_Nk.float().contiguous()
        _score_slopes[grid](
            scores_NE, chosen_Nk, grad, out_NE, rows, experts, scale, NORMALISED=normalised, K=k, **sizes
        )
    return out_NE


@triton.jit
def _count(chosen_ptr, counts_ptr, pairs, experts, blocks, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    chosen = tl.load(chosen_ptr + pair, pair < pairs, -1).to(tl.int32)
    counts = tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + expert * blocks + tl.program_id(0), counts, expert < experts)


@triton.jit
def _place(
    chosen_ptr, ends_ptr, counts_ptr, place_ptr, order_ptr, token_ptr, pairs, experts, blocks, k, ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    inside = pair < pairs
    chosen = tl.load(chosen_ptr + pair, inside, -1).to(tl.int32)
    mine = (chosen[:, None] == expert[None, :]).to(tl.int32)
    at = expert * blocks + tl.program_id(0)
    # where this block's rows of an expert start, and how many of them come before each pair
    start = tl.load(ends_ptr + at, expert < experts, 0) - tl.load(counts_ptr + at, expert < experts, 0)
    before = tl.cumsum(mine, 0) - 1 + start[None, :].to(tl.int32)
    place = tl.sum(mine * before, 1).to(tl.int64)
    tl.store(place_ptr + pair, place, inside)
    tl.store(order_ptr + place, pair.to(tl.int64), inside)
    tl.store(token_ptr + place, (pair // k).to(tl.int64), inside)


def count(chosen: Tensor, experts: int) -> Tensor:
    """int64 [experts]: how often each expert was chosen."""
    return _count_blocks(chosen.contiguous(), experts).sum(1)


def _count_blocks(chosen: Tensor, experts: int) -> Tensor:
    """int32 [experts, blocks]: how often each expert was chosen in each block of pairs."""
    pairs = chosen.numel()
    (blocks,), sizes = _blocks(pairs, experts)
    counts_EB = torch.empty((experts, blocks), dtype=torch.int32, device=chosen.device)
    if pairs:
        _count[(blocks,)](chosen, counts_EB, pairs, experts, blocks, **sizes)
    return counts_EB


def sort_pairs(chosen_Nk: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of `grouped.ExpertRows`. Counts each block of pairs first, so each knows where its rows start."""
    pairs, device = chosen_Nk.numel(), chosen_Nk.device
    (blocks,), sizes = _blocks(pairs, experts)
    order_R, token_R = (torch.empty(pairs, dtype=torch.int64, device=device) for _ in range(2))
    place_Nk = torch.empty_like(chosen_Nk)
    if not pairs:
        return order_R, token_R, place_Nk, torch.zeros(experts, dtype=torch.int32, device=device)
    counts_EB = _count_blocks(chosen_Nk, experts)
    ends_EB = counts_EB.view(-1).cumsum(0, dtype=torch.int32).view(experts, blocks)
    k = chosen_Nk.shape[1]
    _place[(blocks,)](chosen_Nk, ends_EB, counts_EB, place_Nk, order_R, token_R, pairs, experts, blocks, k, **sizes)
    return order_R, token_R, place_Nk, ends_EB[:, -1].contiguous()
