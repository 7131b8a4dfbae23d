"""Draws tokens on CUDA from logits that are changed by nothing but a temperature: one program per row, one launch.

The row is read once, block by block, which gives the sum of the exponentials (with the bits of `head_triton`) and the
mass of each block. The draw chooses a block, and in it a token, by cumulative sums in FP64. The random number is that
of `sampler.uniform`. A row's token depends on that row alone, so it is the same in every batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 4096, 8  # those of head_triton.measure: other sizes sum in another order


class Steps(NamedTuple):
    """Where the draws of a burst go, and what the next step reads. B rows, K steps."""

    seeds_B: Tensor  # int64, the bits of an unsigned number
    temperatures_B: Tensor  # FP32
    tokens_B: Tensor  # int32: the token to compute next
    positions_B: Tensor  # int32: its position
    lasts_B: Tensor  # int32: the position at which a row stops to move on
    tiles_B4: Tensor  # int32, see paged_triton.Plan
    step: Tensor  # int64 [1]: number of the step in the burst
    tokens_KB: Tensor  # int32: the draws
    logprobs_KB: Tensor  # FP32


@triton.jit
def _uniform(seed, position):
    """SplitMix64's finaliser over (seed, position), as in `sampler.uniform`."""
    state = seed.to(tl.uint64, bitcast=True) * 0xD1342543DE82EF95 + position.to(tl.uint64) * 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    return (state >> 12).to(tl.int64).to(tl.float64) * 2.220446049250313e-16  # 2 ** -52


@triton.jit
def _first(found, index, BLOCK: tl.constexpr):
    """The smallest index that was found; BLOCK if none was."""
    return tl.min(tl.where(found, index, BLOCK), 0)


@triton.jit
def _draw_row(x_ptr, vocabulary, temperature, uniform, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """(token, its log-prob)."""
    divisor = tl.where(temperature > 0, temperature, 1.0)
    top, total = -1e30, 0.0
    number = tl.arange(0, BLOCKS)
    tops, masses = tl.full([BLOCKS], -1e30, tl.float32), tl.zeros([BLOCKS], tl.float32)
    for start in range(0, vocabulary, BLOCK):  # as in head_triton._row_sums
        column = start + tl.arange(0, BLOCK)
        x = tl.div_rn(tl.load(x_ptr + column, column < vocabulary, -float("inf")), divisor)
        higher = tl.maximum(top, tl.max(x, 0))
        shrink = tl.exp(top - higher)
        mass = tl.sum(tl.exp(x - higher), 0)
        total = tl.fma(total, shrink, mass)
        tops = tl.where(number == start // BLOCK, higher, tops)
        masses = tl.where(number == start // BLOCK, mass, masses)
        top = higher
    log_sum = top + tl.log(total)
    if temperature > 0:
        shares = (masses * tl.exp(tops - top)).to(tl.float64)
        sums = tl.cumsum(shares, 0)
        goal = uniform * tl.sum(shares, 0)
        block = _first((sums > goal) & (shares > 0), number, BLOCKS)
        if block == BLOCKS:  # rounding; or logits that are not finite, and then any token will do
            block = tl.maximum(tl.max(tl.where(shares > 0, number, 0), 0), 0)
        own = tl.sum(tl.where(number == block, shares, 0.0), 0)
        rest = goal - tl.sum(tl.where(number == block, sums - shares, 0.0), 0)
        column = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.div_rn(tl.load(x_ptr + column, column < vocabulary, -float("inf")), divisor)
        powers = tl.exp(x - top).to(tl.float64)
        sums_T = tl.cumsum(powers, 0)
        goal = rest / own * tl.sum(powers, 0)
        place = _first((sums_T > goal) & (powers > 0), tl.arange(0, BLOCK), BLOCK)
        if place == BLOCK:
            place = tl.max(tl.where(powers > 0, tl.arange(0, BLOCK), 0), 0)
        token = block * BLOCK + place
    else:
        token = vocabulary
        for start in range(0, vocabulary, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + column, column < vocabulary, -float("inf"))
            token = tl.minimum(token, tl.min(tl.where((x == top) & (column < vocabulary), column, vocabulary), 0))
    token = tl.minimum(token, vocabulary - 1)
    return token, tl.div_rn(tl.load(x_ptr + token), divisor) - log_sum


@triton.jit
def _draw(
    x_ptr, seeds_ptr, temperatures_ptr, tokens_ptr, positions_ptr, lasts_ptr, tiles_ptr, step_ptr, out_tokens_ptr,
    out_logprobs_ptr, rows, vocabulary, MOVES: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    position = tl.load(positions_ptr + row)
    uniform = _uniform(tl.load(seeds_ptr + row), (position + 1).to(tl.int64))
    temperature = tl.load(temperatures_ptr + row)
    token, logprob = _draw_row(x_ptr + row.to(tl.int64) * vocabulary, vocabulary, temperature, uniform, BLOCK, BLOCKS)
    at = row
    if MOVES:
        at = tl.load(step_ptr).to(tl.int32) * rows + row
        next_position = tl.minimum(position + 1, tl.load(lasts_ptr + row))
        tl.store(tokens_ptr + row, token)
        tl.store(positions_ptr + row, next_position)
        tl.store(tiles_ptr + row * 4 + 2, next_position)
    tl.store(out_tokens_ptr + at, token)
    tl.store(out_logprobs_ptr + at, logprob)


def _sizes(vocabulary: int) -> dict[str, int]:
    return {
        "BLOCK": _BLOCK,
        "BLOCKS": int(triton.next_power_of_2(triton.cdiv(vocabulary, _BLOCK))),
        "num_warps": _WARPS,
    }


def draw(logits_MV: Tensor, seeds_M: Tensor, positions_M: Tensor, temperatures_M: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens int32 [M], log-probs FP32 [M]). `positions` are those of the tokens before the drawn ones, int32."""
    rows, vocabulary = logits_MV.shape
    tokens_M = torch.empty(rows, dtype=torch.int32, device=logits_MV.device)
    logprobs_M = torch.empty(rows, dtype=torch.float32, device=logits_MV.device)
    if rows:
        _draw[(rows,)](
            logits_MV.contiguous(), seeds_M, temperatures_M, tokens_M, positions_M, positions_M, positions_M, seeds_M,
            tokens_M, logprobs_M, rows, vocabulary, MOVES=False, **_sizes(vocabulary),
        )  # fmt: skip
    return tokens_M, logprobs_M


def draw_and_move(logits_BV: Tensor, steps: Steps) -> None:
    """Draws the next token of every row, and prepares the next step: its token and its position."""
    rows, vocabulary = logits_BV.shape
    _draw[(rows,)](
        logits_BV, steps.seeds_B, steps.temperatures_B, steps.tokens_B, steps.positions_B, steps.lasts_B,
        steps.tiles_B4, steps.step, steps.tokens_KB, steps.logprobs_KB, rows, vocabulary, MOVES=True,
        **_sizes(vocabulary),
    )  # fmt: skip
    steps.step.add_(1)
