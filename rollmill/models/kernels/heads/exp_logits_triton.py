"""The head's product, writing exponentials instead of logits. For the next token's loss, logits are never written.

A softmax is e^(x − m) / s, where s is the sum of e^(x − m), for any m that keeps the powers in range. The largest logit
is known too late, so m is the target's logit plus a margin, which is known before. The kernel writes the power in bf16,
which has the exponent range of FP32. The gradient products use it as it is, because the factor weight / s is one number
per row. At the target it writes e^(x − m) − s, so that a probability near 1 keeps its small gradient.

    surprise of the target, in nats         powers
    0                                       up to e^−40, a probability is 0 below e^−47
    40                                      up to 1
    105 and more                            cut at e^65: counted as 105, with the gradient of that
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollmill.models.kernels.tiles import descriptor, has_accelerator, programs

_MARGIN, _LIMIT = 40.0, 65.0
_LOG2_E = math.log2(math.e)
# Of a tile: tokens, half of its columns, columns of x per step. With wide rows, one program per multiprocessor takes
# large tiles: 767 TFLOP/s instead of 643 at width 4096 on an H200.
_SIZES = {"ROWS": 128, "HALF": 64, "DEPTH": 64}
_LAUNCH = {"num_warps": 8, "num_stages": 3, "maxnreg": 128}
_WIDE, _WIDE_SIZES = 2048, {"ROWS": 128, "HALF": 128, "DEPTH": 64}
_WIDE_LAUNCH = {"num_warps": 8, "num_stages": 3}


@triton.jit
def _shifts(
    x_ptr, weight_ptr, target_ptr, shift_ptr, rows, width, margin, log2_e, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    target = tl.load(target_ptr + row, row < rows, 0)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        x = tl.load(x_ptr + row[:, None] * width + column[None, :], inside, 0.0).to(tl.float32)
        weight = tl.load(weight_ptr + target[:, None] * width + column[None, :], inside, 0.0).to(tl.float32)
        total += tl.sum(x * weight, 1)
    tl.store(shift_ptr + row, (total + margin) * log2_e, row < rows)


@triton.jit
def _power(logits, shift, column, vocabulary, log2_e, limit, HALF: tl.constexpr):
    exponent = tl.minimum(logits * log2_e - shift[:, None], limit, propagate_nan=tl.PropagateNan.ALL)
    return tl.where((column + tl.arange(0, HALF) < vocabulary)[None, :], tl.exp2(exponent), 0.0)


@triton.jit
def _powers(
    x_desc, weight_desc, out_desc, shift_ptr, sums_ptr, rows, vocabulary, width, log2_e, limit, ROWS: tl.constexpr,
    HALF: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    down = tl.cdiv(rows, ROWS)
    tiles = down * tl.cdiv(vocabulary, 2 * HALF)
    # flat: the first loads of a tile overlap with the powers of the tile before
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, column = tile % down * ROWS, tile // down * (2 * HALF)
        logits = tl.zeros([ROWS, 2 * HALF], tl.float32)
        for start in range(0, width, DEPTH):
            logits = tl.dot(x_desc.load([row, start]), weight_desc.load([column, start]).T, logits)
        at = row + tl.arange(0, ROWS)
        shift = tl.load(shift_ptr + at, at < rows, 0.0)
        left, right = logits.reshape(ROWS, 2, HALF).permute(0, 2, 1).split()
        left = _power(left, shift, column, vocabulary, log2_e, limit, HALF)
        right = _power(right, shift, column + HALF, vocabulary, log2_e, limit, HALF)
        out_desc.store([row, column], left.to(out_desc.dtype))
        out_desc.store([row, column + HALF], right.to(out_desc.dtype))
        tl.store(sums_ptr + (tile // down).to(tl.int64) * rows + at, tl.sum(left, 1) + tl.sum(right, 1), at < rows)


@triton.jit
def _finish(
    sums_ptr, target_ptr, weight_ptr, logprob_ptr, scale_ptr, out_ptr, rows, tiles, vocabulary, at_target,
    ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        at = tile[:, None].to(tl.int64) * rows + row[None, :]
        total += tl.sum(tl.load(sums_ptr + at, (tile < tiles)[:, None] & inside[None, :], 0.0), 0)
    total = tl.where(inside, total, 1.0)
    # in two steps: exact for probabilities near 1, and no product overflows
    below, above = tl.minimum(total, 1.0), tl.maximum(total, 1.0)
    surprise = tl.log(below / at_target) + tl.log(above)
    tl.store(logprob_ptr + row, tl.where(total == total, -surprise, total), inside)
    tl.store(scale_ptr + row, tl.load(weight_ptr + row, inside, 0.0) / total, inside)
    target = tl.load(target_ptr + row, inside, 0)
    tl.store(out_ptr + row * vocabulary + target, (at_target - total).to(out_ptr.dtype.element_ty), inside)


def fits(hidden_MW: Tensor, weight_VW: Tensor) -> bool:
    """Whether the kernel takes these: the TMA needs rows of a multiple of 16 bytes."""
    whole = hidden_MW.shape[1] % 8 == 0 and len(weight_VW) % 8 == 0
    alike = hidden_MW.dtype == weight_VW.dtype == torch.bfloat16
    plain = hidden_MW.is_contiguous() and weight_VW.is_contiguous()
    return whole and alike and plain and has_accelerator(hidden_MW.device)


def next_token_powers(
    hidden_MW: Tensor, weight_VW: Tensor, targets_M: Tensor, weights_M: Tensor, logprobs_M: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns (powers, factors [M] of their rows). Their product is the gradient of Σ weight · (−log-prob) for the
    logits. Writes the log-probs."""
    (rows, width), vocabulary, device = hidden_MW.shape, len(weight_VW), hidden_MW.device
    wide = width >= _WIDE
    sizes, launch = (_WIDE_SIZES, _WIDE_LAUNCH) if wide else (_SIZES, _LAUNCH)
    size, half, depth = sizes.values()
    across = triton.cdiv(vocabulary, 2 * half)
    powers_MV = hidden_MW.new_empty(rows, vocabulary)
    shifts_M, scales_M = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    sums = torch.empty((across, rows), dtype=torch.float32, device=device)
    tiles = [
        descriptor(tensor, shape)
        for tensor, shape in ((hidden_MW, [size, depth]), (weight_VW, [2 * half, depth]), (powers_MV, [size, half]))
    ]
    _shifts[(triton.cdiv(rows, 8),)](
        hidden_MW, weight_VW, targets_M, shifts_M, rows, width, _MARGIN, _LOG2_E, ROWS=8, BLOCK=256, num_warps=4
    )
    _powers[programs(triton.cdiv(rows, size) * across, 1 if wide else 2, device)](
        *tiles, shifts_M, sums, rows, vocabulary, width, _LOG2_E, _LIMIT * _LOG2_E, **sizes, **launch
    )
    weights_M, at_target = weights_M.float().contiguous(), math.exp(-_MARGIN)
    _finish[(triton.cdiv(rows, 16),)](
        sums, targets_M, weights_M, logprobs_M, scales_M, powers_MV, rows, across, vocabulary, at_target, ROWS=16,
        TILES=64, num_warps=4,
    )  # fmt: skip
    return powers_MV, scales_M
