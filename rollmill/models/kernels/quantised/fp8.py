"""FP8 with power-of-two scales: e4m3 codes, and one scale per block. A block has 128 columns, and 128 rows (weights) or
one row (tokens).

The scale is the smallest 2^e for which the block's largest magnitude m does not round above 448. So m ≤ 464 · 2^e: 464
is half-way to the next step, and a tie rounds to 448. With half the scale it would round above 448, so m > 232 · 2^e,
and m rounds to 240 · 2^e or more. That is above 232 · 2^e again, so quantising the dequantised values finds the same
scale and the same codes. With 448 instead of 464, a value just above 224 would round to 224, and the scale would change
the second time.

Scaling by a power of two is exact, and e4m3 has four significant bits, so every value is exact in bf16.

Products on Hopper sum along rows of both factors, and a scale holds for 128 columns of a row:

    Y  = X · Wᵀ     X [N, I] by rows      W [O, I] by blocks
    dX = dY · W     dY [N, O] by rows     Wᵀ [I, O] by blocks: the same codes, transposed
    dW = dYᵀ · X    dYᵀ [O, N] by rows    Xᵀ [I, N] by blocks
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollmill.models.triton import has_triton

BLOCK = 128
TOKENS = 4 * BLOCK  # a sum over tokens is padded to a multiple: rows of the scales start at a multiple of 16 bytes
CODES = torch.float8_e4m3fn
LARGEST_WEIGHT = 2.0**127  # above this, rounding up could leave the range of bf16
_SMALLEST_SCALE = -60  # an exponent: the product of two scales is still a normal FP32 number
_FEWEST_ROWS = 2048  # with fewer rows, quantising the weight costs more than the product saves


def scale_of(largest: Tensor) -> Tensor:
    """The FP32 scale of blocks with these largest magnitudes. Computed on the bits, so nothing is rounded."""
    bits = largest.float().view(torch.int32)
    # a value above 464/256 = 1.8125 times its power of two (mantissa 0x680000) carries into the exponent
    exponent = ((bits + 0x17FFFF) >> 23) - 8
    return (exponent.clamp_(min=127 + _SMALLEST_SCALE) << 23).view(torch.float32)


def inverse(scale: Tensor) -> Tensor:
    """1 / 2^e, exactly."""
    return ((254 << 23) - scale.view(torch.int32)).view(torch.float32)


def quantise(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Codes in x's shape [..., R, C], and FP32 scales [..., ⌈R / rows⌉, ⌈C / 128⌉]."""
    if _one_pass(x):
        from rollmill.models.kernels.quantised import fp8_triton

        return fp8_triton.quantise(x, rows)
    blocks = _blocks(x, rows)
    scales = scale_of(blocks.abs().amax((-3, -1)))
    codes = (blocks * inverse(scales)[..., :, None, :, None]).to(CODES)
    return _whole(codes, x.shape), scales


def dequantise(codes: Tensor, scales: Tensor, rows: int) -> Tensor:
    """FP32, every value exact in bf16."""
    return _whole(_blocks(codes, rows) * scales[..., :, None, :, None], codes.shape)


def rounded(x: Tensor, rows: int) -> Tensor:
    """dequantise(quantise(x)) in x's dtype."""
    return round_into(x, x.new_empty(x.shape), rows)


def round_into(x: Tensor, out: Tensor, rows: int) -> Tensor:
    """The same, written into `out`, which may be `x`."""
    if _one_pass(x) and out.is_contiguous():
        from rollmill.models.kernels.quantised import fp8_triton

        return fp8_triton.round_into(x, out, rows)
    blocks = _blocks(x, rows)
    scales = scale_of(blocks.abs().amax((-3, -1)))[..., :, None, :, None]
    return out.copy_(_whole((blocks * inverse(scales)).to(CODES).float().mul_(scales), x.shape))


def round_blocks(x: Tensor, out: Tensor) -> Tensor:
    """The same for blocks of 128 × 128. Returns the largest magnitude of each block, not finite if the block is not."""
    if _one_pass(x) and out.is_contiguous():
        from rollmill.models.kernels.quantised import fp8_triton

        return fp8_triton.round_blocks(x, out)
    round_into(x, out, BLOCK)
    return _blocks(out, BLOCK).abs().amax((-3, -1))


def _one_pass(x: Tensor) -> bool:
    return has_e4m3(x.device) and x.is_contiguous() and x.numel() > 0


def rounded_tokens(x_NW: Tensor) -> Tensor:
    """For activations: one scale per token and 128 columns."""
    return rounded(x_NW, 1)


def _blocks(x: Tensor, rows: int) -> Tensor:
    """FP32 [..., R', rows, C', 128], padded with zeros."""
    x = x.float()
    more_rows, more_columns = -x.shape[-2] % rows, -x.shape[-1] % BLOCK
    if more_rows or more_columns:
        x = pad(x, (0, more_columns, 0, more_rows))
    return x.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, rows))


def _whole(blocks: Tensor, shape: torch.Size) -> Tensor:
    return blocks.flatten(-2).flatten(-3, -2)[..., : shape[-2], : shape[-1]].contiguous()


def has_e4m3(device: torch.device) -> bool:
    """Whether the Triton kernels of FP8 run on this device."""
    return has_triton(device) and (device.type != "cuda" or _capability(device) >= (8, 9))


def _has_block_products(device: torch.device) -> bool:
    return device.type == "cuda" and _capability(device) == (9, 0)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


class Codes(NamedTuple):
    """A factor of a product, with its rows along the sum."""

    codes: Tensor  # [R, C]
    scales: Tensor  # FP32: [R, C / 128] stored column by column, or [R / 128, C / 128] of a weight

    def values(self) -> Tensor:
        """FP32."""
        return dequantise(self.codes, self.scales, 1 if len(self.scales) == len(self.codes) else BLOCK)


class BothWays(NamedTuple):
    """A matrix with tokens as rows, with one scale per row or column of a block. Tokens are padded with zeros."""

    rows: Codes  # [N', C]
    columns: Codes  # of the transposed matrix, [C, N']


def multiplies(x_NI: Tensor, weight_OI: Tensor) -> bool:
    """Whether `product` takes these: whole blocks, and enough rows to be worth it."""
    # each row of the weight's scales and each column of the tokens' scales must start at a multiple of 16 bytes
    whole = weight_OI.shape[0] % BLOCK == 0 and weight_OI.shape[1] % (4 * BLOCK) == 0
    bf16 = x_NI.dtype == weight_OI.dtype == torch.bfloat16
    return _has_block_products(x_NI.device) and bf16 and whole and x_NI.shape[0] >= _FEWEST_ROWS


def differentiates(grad_NO: Tensor, weight_OI: Tensor) -> bool:
    """Whether the gradients of this product are computed in FP8 too: the transposed weight must fit as well."""
    return multiplies(grad_NO, weight_OI) and weight_OI.shape[0] % (4 * BLOCK) == 0


def differentiates_head(hidden_MW: Tensor, weight_VW: Tensor) -> bool:
    """Whether the gradients of a head are computed in FP8. Its vocabulary is padded, so whole blocks are enough."""
    whole = not any(size % BLOCK for size in weight_VW.shape)
    bf16 = hidden_MW.dtype == weight_VW.dtype == torch.bfloat16
    enough = len(hidden_MW) >= _FEWEST_ROWS
    return _has_block_products(hidden_MW.device) and bf16 and whole and enough and _one_pass(weight_VW)


def product(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """x · weightᵀ in FP8. Both are quantised here; a served weight gives exactly the codes it was made from."""
    tokens = x_NI.shape[0]
    return multiply(token_codes(x_NI), Codes(*quantise(weight_OI, BLOCK)))[:tokens]


def token_codes(x_NI: Tensor) -> Codes:
    """The codes of rows that are multiplied by a weight, padded to a multiple of 4 rows."""
    codes_NI, scales_NB = quantise(_padded(x_NI, 4), 1)
    return Codes(codes_NI, _by_column(scales_NB))


def multiply(left: Codes, right: Codes) -> Tensor:
    """left · rightᵀ in bf16: in FP8 on Hopper, elsewhere with the numbers that the codes stand for."""
    if not _has_block_products(left.codes.device):
        return (left.values() @ right.values().t()).bfloat16()
    factors = (left.codes, right.codes.t(), left.scales, right.scales.t())
    return torch._scaled_mm(*factors, out_dtype=torch.bfloat16)


def transposed(weight_OI: Tensor) -> Codes:
    """The codes of the transposed weight. Blocks are square, so they are those of the weight."""
    if _one_pass(weight_OI):
        from rollmill.models.kernels.quantised import fp8_triton

        codes, scales = fp8_triton.quantise_transposed(weight_OI.unsqueeze(0))
        return Codes(codes.squeeze(0), scales.squeeze(0))
    codes, scales = quantise(weight_OI, BLOCK)
    return Codes(codes.t().contiguous(), scales.t().contiguous())


def both_ways(x_NC: Tensor) -> BothWays:
    """C is a multiple of 128."""
    x_NC = x_NC.contiguous()
    if _one_pass(x_NC):
        from rollmill.models.kernels.quantised import fp8_backward_triton

        rows, columns = fp8_backward_triton.both_ways(x_NC, padded_tokens(len(x_NC)))
        return BothWays(Codes(*rows), Codes(*columns))
    padded = _padded(x_NC, TOKENS)
    return BothWays(token_codes(padded), token_codes(padded.t().contiguous()))


def empty_columns(columns: int, tokens: int, device: torch.device) -> Codes:
    """For the codes of a transposed matrix [C, N'], with one scale per column and 128 tokens."""
    padded = padded_tokens(tokens)
    codes = torch.empty((columns, padded), dtype=CODES, device=device)
    return Codes(codes, torch.empty((padded // BLOCK, columns), dtype=torch.float32, device=device).t())


def both_ways_into(x_NC: Tensor, factors_N: Tensor | None, columns: Codes, start: int, *, pads: bool) -> Codes:
    """The codes of x · `factors` per row. Returns those of the rows, with columns padded to a multiple of 512. Writes
    those of the columns into `columns`, from token `start` on, and with `pads` zeros after the last token."""
    padded = columns.codes.shape[1] - start if pads else len(x_NC)
    if _one_pass(x_NC):
        from rollmill.models.kernels.quantised import fp8_backward_triton

        return Codes(*fp8_backward_triton.both_ways_into(x_NC, factors_N, columns, start, padded, TOKENS))
    x_NC = x_NC.float() if factors_N is None else x_NC.float() * factors_N[:, None]
    x_NC = pad(x_NC, (0, 0, 0, padded - len(x_NC)))
    turned, blocks = token_codes(x_NC.t().contiguous()), slice(start // BLOCK, (start + padded) // BLOCK)
    columns.codes[:, start : start + padded], columns.scales[:, blocks] = turned
    return token_codes(pad(x_NC, (0, -x_NC.shape[1] % TOKENS)))


def along_tokens(x_NC: Tensor) -> Codes:
    """The codes of the transposed matrix, in blocks of 128 tokens and 128 columns. C is a multiple of 128."""
    x_NC = x_NC.contiguous()
    if _one_pass(x_NC):
        from rollmill.models.kernels.quantised import fp8_backward_triton

        return Codes(*fp8_backward_triton.along_tokens(x_NC, padded_tokens(len(x_NC))))
    codes, scales = quantise(_padded(x_NC, TOKENS).t().contiguous(), BLOCK)
    return Codes(codes, scales)


def padded_tokens(tokens: int) -> int:
    return -(-tokens // TOKENS) * TOKENS


def _padded(x_NC: Tensor, multiple: int) -> Tensor:
    more = -len(x_NC) % multiple
    return pad(x_NC, (0, 0, 0, more)) if more else x_NC  # pad would copy


def _by_column(scales: Tensor) -> Tensor:
    return scales.t().contiguous().t()  # the Triton kernels store them so already
