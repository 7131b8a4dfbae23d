"""FP8 on CUDA with one read and one write. The bits are the same as those of `fp8`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(128)
_TOKENS = 32  # rows of a tile of activations


@triton.jit
def scale_of(largest):
    """Returns (2^e, 2^-e), see `fp8.scale_of`."""
    exponent = tl.maximum(((largest.to(tl.int32, bitcast=True) + 0x17FFFF) >> 23) - 8, 67)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def token_codes(x):
    """Returns (codes, scales) of a tile with one scale per row."""
    scale_R, inverse_R = scale_of(tl.max(tl.abs(x), 1))
    return (x * inverse_R[:, None]).to(tl.float8e4nv), scale_R


@triton.jit
def _quantise_fp8(
    x_ptr, out_ptr, scale_ptr, rows, columns, scale_row, scale_column, scale_matrix, TOKENS: tl.constexpr,
    CODES: tl.constexpr, TRANSPOSED: tl.constexpr, LARGEST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One tile: 128 columns of one block of rows, or of several tokens with one scale each. With LARGEST the block's
    largest magnitude is written instead of a scale, and infinity if there is a NaN."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    matrix = tl.program_id(2).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = (matrix * rows + row)[:, None] * columns + column[None, :]
    x = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
    scale_at = matrix * scale_matrix + tl.program_id(1) * scale_column
    if TOKENS:
        codes, scale_R = token_codes(x)
        scale = scale_R[:, None]
        if CODES:
            tl.store(scale_ptr + scale_at + row * scale_row, scale_R, row < rows)
    else:
        scale, inverse = scale_of(tl.max(tl.max(tl.abs(x), 1), 0))
        codes = (x * inverse).to(tl.float8e4nv)
        if CODES:
            tl.store(scale_ptr + scale_at + tl.program_id(0) * scale_row, scale)
        if LARGEST:
            magnitude = tl.where(x == x, tl.abs(x), float("inf"))
            tl.store(scale_ptr + scale_at + tl.program_id(0) * scale_row, tl.max(tl.max(magnitude, 1), 0))
    if TRANSPOSED:
        at = (matrix * columns + column)[:, None] * rows + row[None, :]
        tl.store(out_ptr + at, tl.trans(codes), tl.trans(inside))
    elif CODES:
        tl.store(out_ptr + at, codes, inside)
    else:
        tl.store(out_ptr + at, (codes.to(tl.float32) * scale).to(out_ptr.dtype.element_ty), inside)


def _launch(
    x: Tensor, out: Tensor, scales: Tensor | None, rows: int, *, transposed: bool = False, largest: bool = False
) -> None:
    lead = x.shape[:-2].numel()
    tile = _TOKENS if rows == 1 else rows
    strides = (0, 0, 0) if scales is None else (*scales.stride()[-2:], scales.stride(0))
    grid = (triton.cdiv(x.shape[-2], tile), triton.cdiv(x.shape[-1], BLOCK.value), lead)
    _quantise_fp8[grid](
        x, out, scales, *x.shape[-2:], *strides, TOKENS=rows == 1, CODES=scales is not None and not largest,
        TRANSPOSED=transposed, LARGEST=largest, ROWS=tile, num_warps=4 if rows == 1 else 8,
    )  # fmt: skip


def quantise(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Like `fp8.quantise`. The scales of tokens are stored column by column, as the product needs them."""
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = _per_block(x, rows)
    if rows == 1:
        scales = torch.empty(scales.shape[::-1], dtype=torch.float32, device=x.device).t()
    _launch(x, codes, scales, rows)
    return codes, scales


def quantise_transposed(weight_EIO: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [E, O, I] and scales [E, O / 128, I / 128] of whole blocks. Transposed, because Hopper multiplies codes
    only if both factors are contiguous along the summed dimension."""
    experts, inputs, outputs = weight_EIO.shape
    codes_EOI = torch.empty((experts, outputs, inputs), dtype=torch.float8_e4m3fn, device=weight_EIO.device)
    shape = (experts, outputs // BLOCK.value, inputs // BLOCK.value)
    scales_ECB = torch.empty(shape, dtype=torch.float32, device=weight_EIO.device)
    _launch(weight_EIO, codes_EOI, scales_ECB.transpose(1, 2), BLOCK.value, transposed=True)
    return codes_EOI, scales_ECB


def round_into(x: Tensor, out: Tensor, rows: int) -> Tensor:
    _launch(x, out, None, rows)
    return out


def round_blocks(x: Tensor, out: Tensor) -> Tensor:
    """Like `fp8.round_blocks`."""
    largest = _per_block(x, BLOCK.value)
    _launch(x, out, largest, BLOCK.value, largest=True)
    return largest


def _per_block(x: Tensor, rows: int) -> Tensor:
    shape = (*x.shape[:-2], triton.cdiv(x.shape[-2], rows), triton.cdiv(x.shape[-1], BLOCK.value))
    return torch.empty(shape, dtype=torch.float32, device=x.device)
