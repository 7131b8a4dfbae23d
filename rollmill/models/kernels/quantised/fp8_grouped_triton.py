"""The products of a mixture in FP8 on Hopper. Rows are in expert order; the host never learns how many each expert has.

Hopper's tensor cores keep few bits of a sum of FP8 products. So they sum 128 columns, and these partial sums, times the
scales of their row and block, are added in FP32. Scales are powers of two, so multiplying by them is exact. The numbers
are those of the emulated product, summed in another order.

A token's row is quantised once for all its places. SwiGLU's output is quantised by the kernel that computes it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollmill.models.kernels.quantised.fp8_triton import BLOCK, quantise_transposed, token_codes
from rollmill.models.kernels.tiles import descriptor, has_accelerator

# three programs fit on a multiprocessor: two multiply while the third adds, starts or writes
_ROWS = 64  # per tile of a product
_LAUNCH = {"num_warps": 4, "num_stages": 3}
_TOKENS = 32  # per tile of a quantising pass
# per expert, on average. With 4096 rows a forward pass takes four fifths of the time of the emulated one on an H200.
# With 1024, quantising the weights costs more than the products save, and the host launches more kernels.
_FEWEST_ROWS = 2048


@triton.jit
def _cut(ends_ptr, tiles_ptr, tiles, experts, ROWS: tl.constexpr, TILES: tl.constexpr, EXPERTS: tl.constexpr):
    expert = tl.arange(0, EXPERTS)
    inside = expert < experts
    start = tl.load(ends_ptr + expert - 1, inside & (expert > 0), 0)
    end = tl.load(ends_ptr + expert, inside, 0)
    count = tl.where(inside, tl.cdiv(end - start, ROWS), 0)
    last = tl.cumsum(count, 0)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    number = tile[:, None] - (last - count)[None, :]  # the tile's number among the tiles of each expert
    mine = (number >= 0) & (number < count[None, :])
    row = start[None, :] + number * ROWS
    tl.store(tiles_ptr + 3 * tile, tl.sum(tl.where(mine, expert[None, :], 0), 1), tile < tiles)
    tl.store(tiles_ptr + 3 * tile + 1, tl.sum(tl.where(mine, row, 0), 1), tile < tiles)
    tl.store(tiles_ptr + 3 * tile + 2, tl.sum(tl.where(mine, end[None, :], 0), 1), tile < tiles)


def row_tiles(ends_E: Tensor, rows: int) -> Tensor:
    """int32 [T, 3]: per tile of rows its expert, its first row, and where the expert's rows end. There are as many
    tiles as these rows can need; unused ones start and end at row 0."""
    experts = len(ends_E)
    tiles = triton.cdiv(rows, _ROWS) + experts
    tiles_T3 = torch.empty((tiles, 3), dtype=torch.int32, device=ends_E.device)
    sizes = {"ROWS": _ROWS, "TILES": 64, "EXPERTS": triton.next_power_of_2(experts)}
    _cut[(triton.cdiv(tiles, 64),)](ends_E, tiles_T3, tiles, experts, **sizes, num_warps=4)
    return tiles_T3


@triton.jit
def _multiply(
    codes_desc, weight_desc, out_ptr, row_scale_ptr, block_scale_ptr, tiles_ptr, rows, inputs, outputs,
    ROWS: tl.constexpr,
):  # fmt: skip
    across, depth = outputs // BLOCK, inputs // BLOCK
    tile_at = tiles_ptr + tl.program_id(0) // across * 3
    expert, first, end = tl.load(tile_at), tl.load(tile_at + 1), tl.load(tile_at + 2)
    if first < end:
        block = tl.program_id(0) % across
        row = tl.arange(0, ROWS)
        inside = row < end - first  # later rows belong to the next expert: they are read but not written
        block_scale_at = block_scale_ptr + (expert * across + block) * depth
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for step in range(depth):
            # loaded before the product, so that they have arrived after it
            scale_R = tl.load(row_scale_ptr + step * rows + first + row, inside, 0.0) * tl.load(block_scale_at + step)
            weight = weight_desc.load([expert, block * BLOCK, step * BLOCK]).reshape(BLOCK, BLOCK)
            total += tl.dot(codes_desc.load([first, step * BLOCK]), weight.T) * scale_R[:, None]
        at = out_ptr + first.to(tl.int64) * outputs + block * BLOCK
        at = at + (row * outputs)[:, None] + tl.arange(0, BLOCK)[None, :]
        tl.store(at, total.to(out_ptr.dtype.element_ty), inside[:, None])


def product(codes_RI: Tensor, scales_BR: Tensor, codes_EOI: Tensor, scales_ECB: Tensor, tiles_T3: Tensor) -> Tensor:
    """Multiplies each row by its expert's weight: [R, O] in bf16."""
    (rows, inputs), outputs, block = codes_RI.shape, codes_EOI.shape[1], BLOCK.value
    out_RO = torch.empty((rows, outputs), dtype=torch.bfloat16, device=codes_RI.device)
    _multiply[(len(tiles_T3) * (outputs // block),)](
        descriptor(codes_RI, [_ROWS, block]),
        descriptor(codes_EOI, [1, block, block]),
        out_RO, scales_BR, scales_ECB, tiles_T3, rows, inputs, outputs, ROWS=_ROWS, **_LAUNCH,
    )  # fmt: skip
    return out_RO


@triton.jit
def _spread_codes(x_ptr, place_ptr, codes_ptr, scale_ptr, tokens, rows, width, K: tl.constexpr, TOKENS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = token < tokens
    x = tl.load(x_ptr + token[:, None] * width + column, inside[:, None], 0.0).to(tl.float32)
    codes, scale_T = token_codes(x)
    for choice in tl.static_range(K):
        place = tl.load(place_ptr + token * K + choice, inside, 0)
        tl.store(codes_ptr + place[:, None] * width + column, codes, inside[:, None])
        tl.store(scale_ptr + tl.program_id(1) * rows + place, scale_T, inside)


def spread_codes(x_NW: Tensor, place_Nk: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [N · k, W] and scales [W / 128, N · k], with each token's row at its k places."""
    (tokens, width), rows = x_NW.shape, place_Nk.numel()
    codes, scales = _codes(rows, width, x_NW.device)
    grid = (triton.cdiv(tokens, _TOKENS), width // BLOCK.value)
    k = place_Nk.shape[1]
    _spread_codes[grid](
        x_NW.contiguous(), place_Nk, codes, scales, tokens, rows, width, K=k, TOKENS=_TOKENS, num_warps=4
    )
    return codes, scales


@triton.jit
def _swiglu_codes(x_ptr, codes_ptr, scale_ptr, rows, width, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < rows)[:, None]
    at = x_ptr + row[:, None] * 2 * width + column
    gate = tl.load(at, inside, 0.0).to(tl.float32)
    up = tl.load(at + width, inside, 0.0).to(tl.float32)
    out = (gate * tl.sigmoid(gate) * up).to(x_ptr.dtype.element_ty)  # rounded like the output of a separate pass
    codes, scale_R = token_codes(out.to(tl.float32))
    tl.store(codes_ptr + row[:, None] * width + column, codes, inside)
    tl.store(scale_ptr + tl.program_id(1) * rows + row, scale_R, row < rows)


def swiglu_codes(gate_up_RF: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [R, F / 2] and scales [F / 256, R] of SwiGLU's output."""
    rows, width = gate_up_RF.shape[0], gate_up_RF.shape[1] // 2
    codes, scales = _codes(rows, width, gate_up_RF.device)
    grid = (triton.cdiv(rows, _TOKENS), width // BLOCK.value)
    _swiglu_codes[grid](gate_up_RF, codes, scales, rows, width, ROWS=_TOKENS, num_warps=4)
    return codes, scales


def _codes(rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Empty tensors for codes and their scales. A tile of a product reads the scales of 128 columns together."""
    codes = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=device)
    return codes, torch.empty((width // BLOCK.value, rows), dtype=torch.float32, device=device)


def multiplies(x_NW: Tensor, place_Nk: Tensor, gate_up_EWF: Tensor, down_EfW: Tensor) -> bool:
    """Whether `through_experts` takes these: whole blocks, and enough rows to be worth it."""
    experts, inner, width = down_EfW.shape
    bf16 = x_NW.dtype == gate_up_EWF.dtype == down_EfW.dtype == torch.bfloat16
    whole = inner % BLOCK.value == width % BLOCK.value == 0
    plain = gate_up_EWF.is_contiguous() and down_EfW.is_contiguous()
    enough = place_Nk.numel() >= max(1, _FEWEST_ROWS * experts)
    return bf16 and whole and plain and enough and has_accelerator(x_NW.device)


def through_experts(
    x_NW: Tensor, place_Nk: Tensor, ends_E: Tensor, gate_up_EWF: Tensor, down_EfW: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns (gate_up [R, F], the experts' outputs [R, W]); row r is place r."""
    tiles_T3 = row_tiles(ends_E, place_Nk.numel())
    gate_up_RF = product(*spread_codes(x_NW, place_Nk), *quantise_transposed(gate_up_EWF), tiles_T3)
    return gate_up_RF, product(*swiglu_codes(gate_up_RF), *quantise_transposed(down_EfW), tiles_T3)
