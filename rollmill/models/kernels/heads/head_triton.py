"""Triton passes over rows of FP32 logits. Blocks of the vocabulary are read in order.

A pass that reads each row twice runs one large program per multiprocessor. The rows in flight then stay in the L2
cache, and the second read does not go to memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rollmill.models.kernels.tiles import multiprocessors

_BLOCK = 4096
_TWICE = {"BLOCK": 8192, "num_warps": 32}


@triton.jit
def _row_sums(x_ptr, vocabulary, BLOCK: tl.constexpr):
    """(largest logit m, Σ e^(x − m), Σ e^(x − m) · (x − m))."""
    top, total, weighted = -1e30, 0.0, 0.0  # not −inf: the first block may hold only excluded tokens
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, column < vocabulary, -float("inf"))
        higher = tl.maximum(top, tl.max(x, 0))
        shrink = tl.exp(top - higher)
        powers = tl.exp(x - higher)
        if start > 0:  # rescale the sums to the new maximum
            weighted = (weighted + total * (top - higher)) * shrink
        weighted += tl.sum(tl.where(powers > 0, powers * (x - higher), 0.0), 0)
        total = tl.fma(total, shrink, tl.sum(powers, 0))  # joined: the engine's sampler must have the same bits
        top = higher
    return top, total, weighted


@triton.jit
def _measure(x_ptr, target_ptr, out_ptr, rows_stride, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * vocabulary
    top, total, weighted = _row_sums(x_ptr, vocabulary, BLOCK)
    log_sum = top + tl.log(total)
    tl.store(out_ptr + row, tl.load(x_ptr + tl.load(target_ptr + row)) - log_sum)
    tl.store(out_ptr + rows_stride + row, tl.log(total) - weighted / total)
    tl.store(out_ptr + 2 * rows_stride + row, log_sum)


def measure(logits_MV: Tensor, targets_M: Tensor, out_3M: Tensor) -> None:
    rows, vocabulary = logits_MV.shape
    if rows:
        _measure[(rows,)](logits_MV, targets_M, out_3M, out_3M.stride(0), vocabulary, BLOCK=_BLOCK, num_warps=8)


@triton.jit
def _slopes(
    x_ptr, target_ptr, sum_ptr, entropy_ptr, grad_ptr, grad_entropy_ptr, out_ptr, vocabulary, ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * vocabulary
    out_ptr += row * vocabulary
    target, log_sum, grad = tl.load(target_ptr + row), tl.load(sum_ptr + row), tl.load(grad_ptr + row)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logprob = tl.load(x_ptr + column, column < vocabulary, -float("inf")) - log_sum
        probability = tl.exp(logprob)
        out = grad * (tl.where(column == target, 1.0, 0.0) - probability)
        if ENTROPY:
            surprise = tl.maximum(logprob, -1e4) + tl.load(entropy_ptr + row)
            out -= probability * surprise * tl.load(grad_entropy_ptr + row)
        tl.store(out_ptr + column, out.to(out_ptr.dtype.element_ty), column < vocabulary)


def slopes(
    logits_MV: Tensor,
    targets_M: Tensor,
    sums_M: Tensor,
    entropies_M: Tensor,
    grad_M: Tensor,
    grad_entropies_M: Tensor | None,
    out_MV: Tensor,
) -> None:
    rows, vocabulary = logits_MV.shape
    _slopes[(rows,)](
        logits_MV,
        targets_M,
        sums_M,
        entropies_M,
        grad_M.contiguous(),
        grad_M if grad_entropies_M is None else grad_entropies_M.contiguous(),
        out_MV,
        vocabulary,
        ENTROPY=grad_entropies_M is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )


@triton.jit
def _next_token(x_ptr, target_ptr, weight_ptr, logprob_ptr, out_ptr, rows, vocabulary, BLOCK: tl.constexpr):
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.full([], index, tl.int64)
        x_row, out_row = x_ptr + row * vocabulary, out_ptr + row * vocabulary
        # one maximum and one sum per place in a block: threads exchange nothing until the end
        top = tl.full([BLOCK], -1e30, tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocabulary, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(x_row + column, column < vocabulary, -float("inf"), eviction_policy="evict_last")
            higher = tl.maximum(top, x)
            total = total * tl.exp(top - higher) + tl.exp(x - higher)
            top = higher
        highest = tl.max(top, 0)
        log_sum = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
        target, weight = tl.load(target_ptr + row), tl.load(weight_ptr + row)
        tl.store(logprob_ptr + row, tl.load(x_row + target) - log_sum)
        for start in range(0, vocabulary, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(x_row + column, column < vocabulary, -float("inf"), eviction_policy="evict_first")
            out = weight * (tl.exp(x - log_sum) - tl.where(column == target, 1.0, 0.0))
            out = out.to(out_ptr.dtype.element_ty)
            tl.store(out_row + column, out, column < vocabulary, eviction_policy="evict_first")


def next_token_slopes(
    logits_MV: Tensor, targets_M: Tensor, weights_M: Tensor, logprobs_M: Tensor, out_MV: Tensor
) -> None:
    rows, vocabulary = logits_MV.shape
    programs = min(rows, multiprocessors(logits_MV.device))
    weights_M = weights_M.float().contiguous()
    _next_token[(programs,)](logits_MV, targets_M, weights_M, logprobs_M, out_MV, rows, vocabulary, **_TWICE)


@triton.jit
def _scale_into(x_ptr, scale_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < size, 0.0) * tl.load(scale_ptr).to(tl.float32)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), at < size)


def scale_into(x: Tensor, scale: Tensor, out: Tensor) -> None:
    """Writes x · scale into `out`, rounded to its type, with wide accesses although the types differ."""
    _scale_into[(triton.cdiv(x.numel(), _BLOCK),)](x, scale, out, x.numel(), BLOCK=_BLOCK, num_warps=8)
