"""FP8 codes for backward products on CUDA. One read of a matrix gives its codes along both dimensions, since a product
sums along rows of both factors (see `fp8`). SwiGLU's backward pass writes codes instead of numbers. The bits are those
of separate passes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollmill.models.kernels.fp8_triton import BLOCK, scale_of, token_codes

_WARPS = 8
_SWIGLU_WARPS = 16  # of a tile with five matrices

Parts = tuple[Tensor, Tensor]  # codes, scales


@triton.jit
def _store_rows(x, codes_ptr, scale_ptr, row, column, padded, columns):
    codes, scale_R = token_codes(x)
    tl.store(codes_ptr + row.to(tl.int64)[:, None] * columns + column[None, :], codes)
    first = tl.min(column, 0) // BLOCK
    tl.store(scale_ptr + first * padded + row, scale_R)


@triton.jit
def _store_columns(x, codes_ptr, scale_ptr, row, column, padded, columns):
    scale_C, inverse_C = scale_of(tl.max(tl.abs(x), 0))
    codes = (x * inverse_C[None, :]).to(tl.float8e4nv)
    tl.store(codes_ptr + column.to(tl.int64)[:, None] * padded + row[None, :], tl.trans(codes))
    first = tl.min(row, 0) // BLOCK
    tl.store(scale_ptr + first * columns + column, scale_C)


@triton.jit
def _both_ways(
    x_ptr, row_codes_ptr, row_scale_ptr, column_codes_ptr, column_scale_ptr, tokens, padded, columns,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    x = tl.load(x_ptr + at, (row < tokens)[:, None], 0.0).to(tl.float32)
    if ROWS:
        _store_rows(x, row_codes_ptr, row_scale_ptr, row, column, padded, columns)
    _store_columns(x, column_codes_ptr, column_scale_ptr, row, column, padded, columns)


def both_ways(x_NC: Tensor, *, rows: bool = True) -> tuple[Parts | None, Parts]:
    """Codes and scales of the rows (None if not `rows`), and of the columns. Tokens are padded to whole blocks."""
    tokens, columns = x_NC.shape
    padded = triton.cdiv(tokens, BLOCK.value) * BLOCK.value
    of_columns = _empty(columns, padded, x_NC.device)
    of_rows = _empty(padded, columns, x_NC.device) if rows else of_columns
    grid = (padded // BLOCK.value, columns // BLOCK.value)
    _both_ways[grid](x_NC, *of_rows, *of_columns, tokens, padded, columns, ROWS=rows, num_warps=_WARPS)
    return (of_rows if rows else None), of_columns


@triton.jit
def _swiglu_backward(
    x_ptr, grad_ptr, row_codes_ptr, row_scale_ptr, column_codes_ptr, column_scale_ptr, inner_codes_ptr,
    inner_scale_ptr, tokens, padded, width,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < tokens)[:, None]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    gate_at = at + row.to(tl.int64)[:, None] * width
    kind = x_ptr.dtype.element_ty  # rounded like the output of a separate pass
    # each part loads its tiles again, from the cache: registers hold no more than three
    gate = tl.load(x_ptr + gate_at, inside, 0.0).to(tl.float32)
    up = tl.load(x_ptr + gate_at + width, inside, 0.0).to(tl.float32)
    inner = (gate * tl.sigmoid(gate) * up).to(kind).to(tl.float32)
    _store_columns(inner, inner_codes_ptr, inner_scale_ptr, row, column, padded, width)
    gate = tl.load(x_ptr + gate_at, inside, 0.0).to(tl.float32)
    grad = tl.load(grad_ptr + at, inside, 0.0).to(tl.float32)
    slope = (grad * (gate * tl.sigmoid(gate))).to(kind).to(tl.float32)
    _store_rows(slope, row_codes_ptr, row_scale_ptr, row, column + width, padded, 2 * width)
    _store_columns(slope, column_codes_ptr, column_scale_ptr, row, column + width, padded, 2 * width)
    gate = tl.load(x_ptr + gate_at, inside, 0.0).to(tl.float32)
    up = tl.load(x_ptr + gate_at + width, inside, 0.0).to(tl.float32)
    grad = tl.load(grad_ptr + at, inside, 0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    slope = (grad * up * (sigmoid + silu * (1.0 - sigmoid))).to(kind).to(tl.float32)
    _store_rows(slope, row_codes_ptr, row_scale_ptr, row, column, padded, 2 * width)
    _store_columns(slope, column_codes_ptr, column_scale_ptr, row, column, padded, 2 * width)


def swiglu_backward(gate_up_NF: Tensor, grad_Nf: Tensor) -> tuple[Parts, Parts, Parts]:
    """Like `fused_triton.swiglu_backward`: the gradient of gate_up by rows and by columns, and SwiGLU's output by
    columns. Its width is a multiple of 128."""
    tokens, width = grad_Nf.shape
    padded = triton.cdiv(tokens, BLOCK.value) * BLOCK.value
    sizes = ((padded, 2 * width), (2 * width, padded), (width, padded))
    rows, columns, inner = (_empty(*size, grad_Nf.device) for size in sizes)
    grid = (padded // BLOCK.value, width // BLOCK.value)
    _swiglu_backward[grid](
        gate_up_NF, grad_Nf.contiguous(), *rows, *columns, *inner, tokens, padded, width, num_warps=_SWIGLU_WARPS
    )
    return rows, columns, inner


def _empty(rows: int, columns: int, device: torch.device) -> Parts:
    """For codes [R, C], and their scales [R, C / 128] stored column by column."""
    codes = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=device)
    return codes, torch.empty((columns // BLOCK.value, rows), dtype=torch.float32, device=device).t()
