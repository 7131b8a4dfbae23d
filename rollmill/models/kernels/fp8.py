"""FP8 with power-of-two scales: e4m3 codes, and one scale per block. A block has 128 columns, and 128 rows (weights) or
one row (tokens).

The scale is the smallest 2^e for which the block's largest magnitude m does not round above 448. So m ≤ 464 · 2^e: 464
is half-way to the next step, and a tie rounds to 448. With half the scale it would round above 448, so m > 232 · 2^e,
and m rounds to 240 · 2^e or more. That is above 232 · 2^e again, so quantising the dequantised values finds the same
scale and the same codes. With 448 instead of 464, a value just above 224 would round to 224, and the scale would change
the second time.

Scaling by a power of two is exact, and e4m3 has four significant bits, so every value is exact in bf16.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollmill.models.triton import has_triton

BLOCK = 128
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
        from rollmill.models.kernels import fp8_triton

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
    if _one_pass(x):
        from rollmill.models.kernels import fp8_triton

        return fp8_triton.rounded(x, rows)
    blocks = _blocks(x, rows)
    scales = scale_of(blocks.abs().amax((-3, -1)))[..., :, None, :, None]
    return _whole((blocks * inverse(scales)).to(CODES).float().mul_(scales), x.shape).to(x.dtype)


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


def multiplies(x_NI: Tensor, weight_OI: Tensor) -> bool:
    """Whether `product` takes these: whole blocks, and enough rows to be worth it."""
    # each row of the weight's scales and each column of the tokens' scales must start at a multiple of 16 bytes
    whole = weight_OI.shape[0] % BLOCK == 0 and weight_OI.shape[1] % (4 * BLOCK) == 0
    bf16 = x_NI.dtype == weight_OI.dtype == torch.bfloat16
    return _has_block_products(x_NI.device) and bf16 and whole and x_NI.shape[0] >= _FEWEST_ROWS


def product(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """x · weightᵀ in FP8 on Hopper. Both are quantised here; a served weight gives exactly the codes it was made
    from."""
    tokens = x_NI.shape[0]
    codes_NI, scales_NB = quantise(pad(x_NI, (0, 0, 0, -tokens % 4)), 1)
    codes_OI, scales_CB = quantise(weight_OI, BLOCK)
    scales_NB = scales_NB.t().contiguous().t()  # the product needs column order; the Triton kernel wrote it already
    return torch._scaled_mm(codes_NI, codes_OI.t(), scales_NB, scales_CB.t(), out_dtype=torch.bfloat16)[:tokens]
