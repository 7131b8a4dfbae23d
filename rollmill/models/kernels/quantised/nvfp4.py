"""NVFP4: e2m1 codes, an e4m3 scale per block of 16 inputs, and one power of two per matrix or per token.

    value   = code · scale · power           2 + 4 significant bits and an exponent: exact in bf16
    codes     0 .5 1 1.5 2 3 4 6, and the sign; nearest, ties to the even code
    scale   = e4m3(largest of the block / 6 / power), at least 2^-6
    power   = smallest 2^e for which no scale rounds above 448 (see `fp8.scale_of`)

A normal e4m3 number is within 1/16 of the number it was rounded from. So the largest of a block gets the code 6, and
quantising the dequantised values finds the same scale. Below 2^-6 that would not hold, so scales stop there. Nothing is
divided: codes are found by comparing with exact multiples of the scale, and 1/6 is one FP32 constant, so every device
gives the same bytes. The power of a token depends on that token alone. With one power per batch, a token's result would
depend on its neighbours, and on later tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollmill.models.kernels.quantised.fp8 import CODES, has_e4m3, inverse, scale_of

BLOCK = 16
SIXTH = 0.1666666716337204  # the FP32 number next to 1/6
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# A code is the number of bounds a magnitude passes. A magnitude equal to bound 0, 2, 4 or 6 does not pass it.
BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
SMALLEST_SCALE = 2.0**-6


def power_of(largest: Tensor) -> Tensor:
    """The power of two for a matrix or token with this largest magnitude."""
    return scale_of(largest * SIXTH)


def quantise(x: Tensor, power: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises matrices [..., R, C], C even. Returns codes, two per byte [..., R, C / 2], and e4m3 scales
    [..., R, ⌈C / 16⌉]. `power` is [..., 1, 1], one per matrix."""
    blocks, scales = _scaled(x, power)
    codes = _codes(blocks, scales.float().mul_(power).unsqueeze(-1)).flatten(-2)[..., : x.shape[-1]]
    return codes[..., ::2] | (codes[..., 1::2] << 4), scales


def dequantise(packed: Tensor, scales: Tensor, power: Tensor) -> Tensor:
    """FP32, every value exact in bf16."""
    codes = unpacked(packed)
    blocks = pad(codes, (0, -codes.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    values = _values(blocks) * (scales.float() * power).unsqueeze(-1)
    return values.flatten(-2)[..., : codes.shape[-1]]


def rounded(x: Tensor, power: Tensor) -> Tensor:
    """dequantise(quantise(x)) in x's dtype."""
    if has_e4m3(x.device) and x.numel() > 0:
        from rollmill.models.kernels.quantised import nvfp4_triton

        return nvfp4_triton.rounded(x, power)
    return _rounded(x, power)


def _rounded(x: Tensor, power: Tensor) -> Tensor:
    blocks, scales = _scaled(x, power)
    factors = scales.float().mul_(power).unsqueeze(-1)
    return (_values(_codes(blocks, factors)) * factors).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def rounded_tokens(x_NW: Tensor) -> Tensor:
    """For activations: one power per token."""
    if has_e4m3(x_NW.device) and x_NW.numel() > 0:
        from rollmill.models.kernels.quantised import nvfp4_triton

        return nvfp4_triton.rounded(x_NW, None)
    return _rounded(x_NW, power_of(x_NW.float().abs().amax(-1, keepdim=True)))


def unpacked(data: Tensor) -> Tensor:
    """Two codes per byte into one code per byte; the first is in the low half."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def _scaled(x: Tensor, power: Tensor) -> tuple[Tensor, Tensor]:
    blocks = pad(x.float(), (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    wanted = blocks.abs().amax(-1) * SIXTH * inverse(power)
    return blocks, wanted.clamp(min=SMALLEST_SCALE).to(CODES)


def _codes(blocks: Tensor, factors: Tensor) -> Tensor:
    magnitude = blocks.abs()
    codes = blocks.signbit().to(torch.uint8) << 3
    for place, bound in enumerate(BOUNDS):
        codes += magnitude >= factors * bound if place % 2 else magnitude > factors * bound
    return codes


def _values(codes: Tensor) -> Tensor:
    table = torch.tensor([*VALUES, *(-value for value in VALUES)], device=codes.device)
    return table[codes.int()]
