"""FP8 codes for backward products on CUDA, since a product sums along rows of both factors (see `fp8`). One read of a
matrix gives its codes along both dimensions. SwiGLU's backward pass writes codes instead of numbers. The bits are those
of separate passes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollmill.models.kernels.fp8_triton import BLOCK, scale_of, token_codes

_LAUNCH = {"num_warps": 4}  # more programs at once than with eight
_PART = 32  # columns of a tile that SwiGLU's pass holds at once

Parts = tuple[Tensor, Tensor]  # codes, scales


@triton.jit
def _both_ways(
    x_ptr, row_codes_ptr, row_scale_ptr, column_codes_ptr, column_scale_ptr, tokens, padded, columns,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    x = tl.load(x_ptr + at, (row < tokens)[:, None], 0.0).to(tl.float32)
    codes, scale_R = token_codes(x)
    tl.store(row_codes_ptr + at, codes)
    tl.store(row_scale_ptr + tl.program_id(1) * padded + row, scale_R)
    _store_columns(x, column_codes_ptr, column_scale_ptr, row, column, padded, columns)


@triton.jit
def _store_columns(x, codes_ptr, scale_ptr, row, column, padded, columns):
    """Codes with one scale per column of 128 tokens, transposed."""
    scale_C, inverse_C = scale_of(tl.max(tl.abs(x), 0))
    codes = (x * inverse_C[None, :]).to(tl.float8e4nv)
    tl.store(codes_ptr + column.to(tl.int64)[:, None] * padded + row[None, :], tl.trans(codes))
    tl.store(scale_ptr + tl.program_id(0) * columns + column, scale_C)


@triton.jit
def _store_block(x, codes_ptr, inverse, row, column, padded):
    """Codes with one scale for 128 tokens and 128 columns, transposed."""
    codes = (x * inverse).to(tl.float8e4nv)
    tl.store(codes_ptr + column.to(tl.int64)[:, None] * padded + row[None, :], tl.trans(codes))


@triton.jit
def _along_tokens(x_ptr, codes_ptr, scale_ptr, tokens, padded, columns):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    x = tl.load(x_ptr + at, (row < tokens)[:, None], 0.0).to(tl.float32)
    scale, inverse = scale_of(tl.max(tl.max(tl.abs(x), 1), 0))
    _store_block(x, codes_ptr, inverse, row, column, padded)
    tl.store(scale_ptr + tl.program_id(1) * (padded // BLOCK) + tl.program_id(0), scale)


def along_tokens(x_NC: Tensor, padded: int) -> Parts:
    """Codes [C, N'] and scales [C / 128, N' / 128] of the transposed matrix, with `padded` tokens."""
    tokens, columns = x_NC.shape
    codes, scales = _empty_blocks(columns, padded, x_NC.device)
    grid = (padded // BLOCK.value, columns // BLOCK.value)
    _along_tokens[grid](x_NC, codes, scales, tokens, padded, columns, **_LAUNCH)
    return codes, scales


def both_ways(x_NC: Tensor, padded: int) -> tuple[Parts, Parts]:
    """Codes and scales of the rows, and of the columns, with `padded` tokens."""
    tokens, columns = x_NC.shape
    of_rows, of_columns = _empty(padded, columns, x_NC.device), _empty(columns, padded, x_NC.device)
    grid = (padded // BLOCK.value, columns // BLOCK.value)
    _both_ways[grid](x_NC, *of_rows, *of_columns, tokens, padded, columns, **_LAUNCH)
    return of_rows, of_columns


@triton.jit
def _swiglu_slopes(x_ptr, grad_ptr, row, column, tokens, width):
    """Returns (gradient of gate, gradient of up, SwiGLU's output), rounded like those of a separate pass."""
    inside = (row < tokens)[:, None]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    gate_at = x_ptr + at + row.to(tl.int64)[:, None] * width
    gate = tl.load(gate_at, inside, 0.0).to(tl.float32)
    up = tl.load(gate_at + width, inside, 0.0).to(tl.float32)
    grad = tl.load(grad_ptr + at, inside, 0.0).to(tl.float32)
    kind = x_ptr.dtype.element_ty
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    of_gate = (grad * up * (sigmoid + silu * (1.0 - sigmoid))).to(kind).to(tl.float32)
    return of_gate, (grad * silu).to(kind).to(tl.float32), (silu * up).to(kind).to(tl.float32)


@triton.jit
def _store_part(x, codes_ptr, inverse_R, row, column, columns):
    codes = (x * inverse_R[:, None]).to(tl.float8e4nv)
    tl.store(codes_ptr + row.to(tl.int64)[:, None] * columns + column[None, :], codes)


@triton.jit
def _swiglu_backward(
    x_ptr, grad_ptr, row_codes_ptr, row_scale_ptr, column_codes_ptr, column_scale_ptr, inner_codes_ptr,
    inner_scale_ptr, tokens, padded, width, PART: tl.constexpr,
):  # fmt: skip
    """A tile of 128 tokens and 128 columns, in parts, because whole it does not fit into registers. The scales of rows
    and blocks are known after all parts, so these are computed again then: their inputs are in the cache."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(1) * BLOCK
    gate_R, up_R, inner_R = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, BLOCK, PART):
        column = first + start + tl.arange(0, PART)
        of_gate, of_up, inner = _swiglu_slopes(x_ptr, grad_ptr, row, column, tokens, width)
        _store_columns(of_gate, column_codes_ptr, column_scale_ptr, row, column, padded, 2 * width)
        _store_columns(of_up, column_codes_ptr, column_scale_ptr, row, column + width, padded, 2 * width)
        gate_R = tl.maximum(gate_R, tl.max(tl.abs(of_gate), 1))
        up_R = tl.maximum(up_R, tl.max(tl.abs(of_up), 1))
        inner_R = tl.maximum(inner_R, tl.max(tl.abs(inner), 1))
    gate_scale_R, gate_inverse_R = scale_of(gate_R)
    up_scale_R, up_inverse_R = scale_of(up_R)
    inner_scale, inner_inverse = scale_of(tl.max(inner_R, 0))
    tl.store(row_scale_ptr + tl.program_id(1) * padded + row, gate_scale_R)
    tl.store(row_scale_ptr + (tl.program_id(1) + width // BLOCK) * padded + row, up_scale_R)
    tl.store(inner_scale_ptr + tl.program_id(1) * (padded // BLOCK) + tl.program_id(0), inner_scale)
    for start in range(0, BLOCK, PART):
        column = first + start + tl.arange(0, PART)
        of_gate, of_up, inner = _swiglu_slopes(x_ptr, grad_ptr, row, column, tokens, width)
        _store_block(inner, inner_codes_ptr, inner_inverse, row, column, padded)
        _store_part(of_gate, row_codes_ptr, gate_inverse_R, row, column, 2 * width)
        _store_part(of_up, row_codes_ptr, up_inverse_R, row, column + width, 2 * width)


def swiglu_backward(gate_up_NF: Tensor, grad_Nf: Tensor, padded: int) -> tuple[Parts, Parts, Parts]:
    """Like `fused_triton.swiglu_backward`: the gradient of gate_up by rows and by columns, and SwiGLU's output as
    `along_tokens` gives it. Its width is a multiple of 128."""
    (tokens, width), device = grad_Nf.shape, grad_Nf.device
    rows, columns = _empty(padded, 2 * width, device), _empty(2 * width, padded, device)
    inner = _empty_blocks(width, padded, device)
    grid = (padded // BLOCK.value, width // BLOCK.value)
    given = (gate_up_NF, grad_Nf.contiguous(), *rows, *columns, *inner)
    _swiglu_backward[grid](*given, tokens, padded, width, PART=_PART, **_LAUNCH)
    return rows, columns, inner


def _empty(rows: int, columns: int, device: torch.device) -> Parts:
    """For codes [R, C], and their scales [R, C / 128] stored column by column."""
    codes = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=device)
    return codes, torch.empty((columns // BLOCK.value, rows), dtype=torch.float32, device=device).t()


def _empty_blocks(rows: int, columns: int, device: torch.device) -> Parts:
    """For codes [R, C], and their scales [R / 128, C / 128]."""
    codes = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=device)
    shape = (rows // BLOCK.value, columns // BLOCK.value)
    return codes, torch.empty(shape, dtype=torch.float32, device=device)
