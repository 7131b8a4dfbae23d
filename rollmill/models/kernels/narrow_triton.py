"""Products for one to four rows, joined with what comes before and after them: a decode step of a small batch.

Such a step is limited by the number of launches and by how soon the weights arrive, not by arithmetic. So a layer is
five launches: norm and qkv; rotation, store and attention over pages; output projection and residual; norm, gate, up
and SwiGLU; down projection and residual. A program takes a few rows of a weight and multiplies them with all rows of
the input. Intermediate results are rounded as between separate kernels; the order of sums differs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 4  # most rows of the input
_DEPTH = 2048  # columns at once


@triton.jit
def _inverse_rms(x_ptr, width, eps, WIDE: tl.constexpr, DEPTH: tl.constexpr):
    squares = 0.0
    for start in tl.static_range(0, WIDE, DEPTH):
        column = start + tl.arange(0, DEPTH)
        x = tl.load(x_ptr + column, column < width, 0.0).to(tl.float32)
        squares += tl.sum(x * x, 0)
    return 1.0 / tl.sqrt(squares / width + eps)


@triton.jit
def _input(x_ptr, norm_ptr, column, width, scale, NORM: tl.constexpr):
    x = tl.load(x_ptr + column, column < width, 0.0)
    if NORM:
        weight = tl.load(norm_ptr + column, column < width, 0.0).to(tl.float32)
        return (x.to(tl.float32) * scale * weight).to(x_ptr.dtype.element_ty).to(tl.float32)
    return x.to(tl.float32)


@triton.jit
def _multiply(
    x_ptr, norm_ptr, weight_ptr, bias_ptr, skip_ptr, out_ptr, inputs, outputs, eps, NORM: tl.constexpr,
    BIAS: tl.constexpr, SKIP: tl.constexpr, GATED: tl.constexpr, B: tl.constexpr, TILE: tl.constexpr,
    WIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out = skip + weight · norm(x) + bias, or, GATED, silu(gate) · up of a weight with the rows gate|up."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = row < outputs
    for b in tl.static_range(B):
        own = x_ptr + b * inputs
        scale = 1.0
        if NORM:
            scale = _inverse_rms(own, inputs, eps, WIDE, DEPTH)
        total, second = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
        for start in tl.static_range(0, WIDE, DEPTH):
            column = start + tl.arange(0, DEPTH)
            at = weight_ptr + row.to(tl.int64)[:, None] * inputs + column[None, :]
            there = inside[:, None] & (column < inputs)[None, :]
            # of the next rows of x, the weight is in the cache of the multiprocessor
            weight = tl.load(at, there, 0.0).to(tl.float32)
            if GATED:
                up = tl.load(at + outputs.to(tl.int64) * inputs, there, 0.0).to(tl.float32)
            x = _input(own, norm_ptr, column, inputs, scale, NORM)
            total += tl.sum(weight * x[None, :], 1)
            if GATED:
                second += tl.sum(up * x[None, :], 1)
        if GATED:
            gate = total.to(out_ptr.dtype.element_ty).to(tl.float32)
            total = gate * tl.sigmoid(gate) * second.to(out_ptr.dtype.element_ty).to(tl.float32)
        if BIAS:
            total += tl.load(bias_ptr + row, inside, 0.0).to(tl.float32)
        if SKIP:
            total += tl.load(skip_ptr + b * outputs + row, inside, 0.0).to(tl.float32)
        tl.store(out_ptr + b * outputs + row, total.to(out_ptr.dtype.element_ty), inside)


def multiply(
    x_BI: Tensor,
    weight_OI: Tensor,
    *,
    norm_I: Tensor | None = None,
    eps: float = 0.0,
    bias_O: Tensor | None = None,
    skip_BO: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """skip + weight · RMSNorm(x) + bias. With `gated`, SwiGLU of a weight with the rows gate|up."""
    rows, inputs = x_BI.shape
    outputs = weight_OI.shape[0] // (2 if gated else 1)
    out_BO = torch.empty((rows, outputs), dtype=x_BI.dtype, device=x_BI.device)
    tile = 4 if outputs <= 1024 or gated else 8
    depth = min(int(triton.next_power_of_2(inputs)), _DEPTH)
    _multiply[(triton.cdiv(outputs, tile),)](
        x_BI, x_BI if norm_I is None else norm_I, weight_OI, x_BI if bias_O is None else bias_O,
        x_BI if skip_BO is None else skip_BO, out_BO, inputs, outputs, eps, NORM=norm_I is not None,
        BIAS=bias_O is not None, SKIP=skip_BO is not None, GATED=gated, B=rows, TILE=tile,
        WIDE=triton.cdiv(inputs, depth) * depth, DEPTH=depth, num_warps=4 if depth <= 1024 else 8,
    )  # fmt: skip
    return out_BO
