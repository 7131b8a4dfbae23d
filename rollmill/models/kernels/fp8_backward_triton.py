"""FP8 codes for backward products on CUDA, since a product sums along rows of both factors (see `fp8`). One read of a
matrix gives its codes along both dimensions. The bits are those of `fp8`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollmill.models.kernels.fp8_triton import BLOCK, scale_of, token_codes

_LAUNCH = {"num_warps": 4}  # more programs at once than with eight

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
    scale_C, inverse_C = scale_of(tl.max(tl.abs(x), 0))
    codes = (x * inverse_C[None, :]).to(tl.float8e4nv)
    tl.store(column_codes_ptr + column.to(tl.int64)[:, None] * padded + row[None, :], tl.trans(codes))
    tl.store(column_scale_ptr + tl.program_id(0) * columns + column, scale_C)


@triton.jit
def _along_tokens(x_ptr, codes_ptr, scale_ptr, tokens, padded, columns):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    x = tl.load(x_ptr + at, (row < tokens)[:, None], 0.0).to(tl.float32)
    scale, inverse = scale_of(tl.max(tl.max(tl.abs(x), 1), 0))
    codes = (x * inverse).to(tl.float8e4nv)
    tl.store(codes_ptr + column.to(tl.int64)[:, None] * padded + row[None, :], tl.trans(codes))
    tl.store(scale_ptr + tl.program_id(1) * (padded // BLOCK) + tl.program_id(0), scale)


def along_tokens(x_NC: Tensor, padded: int) -> Parts:
    """Codes [C, N'] and scales [C / 128, N' / 128] of the transposed matrix, with `padded` tokens."""
    tokens, columns = x_NC.shape
    codes = torch.empty((columns, padded), dtype=torch.float8_e4m3fn, device=x_NC.device)
    shape = (columns // BLOCK.value, padded // BLOCK.value)
    scales = torch.empty(shape, dtype=torch.float32, device=x_NC.device)
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


def _empty(rows: int, columns: int, device: torch.device) -> Parts:
    """For codes [R, C], and their scales [R, C / 128] stored column by column."""
    codes = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=device)
    return codes, torch.empty((columns // BLOCK.value, rows), dtype=torch.float32, device=device).t()
