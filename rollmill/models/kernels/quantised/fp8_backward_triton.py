"""FP8 codes for backward products on CUDA, since a product sums along rows of both factors (see `fp8`). One read of a
matrix gives its codes along both dimensions. The bits are those of `fp8`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollmill.models.kernels.quantised.fp8_triton import BLOCK, scale_of, token_codes

_LAUNCH = {"num_warps": 4}  # more programs at once than with eight

Parts = tuple[Tensor, Tensor]  # codes, scales


@triton.jit
def _both_ways(
    x_ptr, factor_ptr, row_codes_ptr, row_scale_ptr, column_codes_ptr, column_scale_ptr, tokens, padded, columns, wide,
    stride, FACTORS: tl.constexpr,
):  # fmt: skip
    """`wide`: columns of the row codes, `stride`: from one column's codes to the next one's."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < tokens)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * columns + column[None, :], inside, 0.0).to(tl.float32)
    if FACTORS:
        x *= tl.load(factor_ptr + row, row < tokens, 0.0)[:, None]
    codes, scale_R = token_codes(x)
    tl.store(row_codes_ptr + row.to(tl.int64)[:, None] * wide + column[None, :], codes)
    tl.store(row_scale_ptr + tl.program_id(1) * padded + row, scale_R)
    if tl.program_id(1) * BLOCK < columns:
        scale_C, inverse_C = scale_of(tl.max(tl.abs(x), 0))
        codes = (x * inverse_C[None, :]).to(tl.float8e4nv)
        tl.store(column_codes_ptr + column.to(tl.int64)[:, None] * stride + row[None, :], tl.trans(codes))
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
    of_columns = empty(x_NC.shape[1], padded, x_NC.device)
    return both_ways_into(x_NC, None, of_columns, 0, padded, BLOCK.value), of_columns


def both_ways_into(
    x_NC: Tensor, factors_N: Tensor | None, of_columns: Parts, start: int, padded: int, multiple: int
) -> Parts:
    """Codes and scales of the rows of x · `factors`: `padded` rows, columns padded to a multiple of `multiple`. Writes
    those of the columns into `of_columns`, from token `start` on, which is a multiple of 128."""
    tokens, columns = x_NC.shape
    wide = triton.cdiv(columns, multiple) * multiple
    of_rows = empty(padded, wide, x_NC.device)
    codes, scales = of_columns
    _both_ways[(triton.cdiv(padded, BLOCK.value), wide // BLOCK.value)](
        x_NC, factors_N, *of_rows, codes[:, start:], scales.t()[start // BLOCK.value :], tokens, padded, columns, wide,
        codes.shape[1], FACTORS=factors_N is not None, **_LAUNCH,
    )  # fmt: skip
    return of_rows


def empty(rows: int, columns: int, device: torch.device) -> Parts:
    """For codes [R, C], and their scales [R, C / 128] stored column by column."""
    codes = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=device)
    return codes, torch.empty((columns // BLOCK.value, rows), dtype=torch.float32, device=device).t()
