"""Masters for weights of which only the rounded values are known: each value moves to a random place among the numbers
that round to it.

Values that stay where they were rounded to are all half a step away from the next served value. So a small update
would change none of them. Here each half of the way to a neighbour gets half of the places: an update that is a tenth
of a step changes one value in ten by a whole step, which is what was meant. The served values do not change:
quantising the moved values gives the same codes and scales.

Random places depend on seed, name and position alone, so any number of ranks draws the same ones. Lines one after
another need other seeds: with the same places, the same few values would take every step.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollmill.models.host_tensors import DTYPES
from rollmill.models.kernels.forms import is_quantised
from rollmill.models.kernels.quantised import nvfp4
from rollmill.models.kernels.quantised.fp8 import BLOCK
from rollmill.models.quantize import quantises

_PIECE = 1 << 24  # elements drawn at once
_BITS = {torch.bfloat16: 8, torch.float16: 11}  # significant ones; fp8's codes have 4


@torch.no_grad()
def dithered(name: str, values: Tensor, form: str, seed: int, first: int = 0) -> Tensor:
    """FP32 values that round to `values` in `form`. `first`: the position of the first value in its parameter. The
    matrices of a quantised form must be whole."""
    coded = is_quantised(form) and quantises(name, values)
    kept = DTYPES.get(form, torch.bfloat16)  # what quantised forms do not code stays bf16
    if values.numel() == 0 or kept not in _BITS:
        return values
    noise = _noise(name, values, seed, first)
    # of the way to the middle of two neighbours, where a tie would round to the even code; FP32 has to tell them apart
    bits = 4 if coded else _BITS[kept]
    noise.mul_(1 - 2.0 ** (bits - 22))
    if not coded:
        return _between(values, noise, bits)
    if form == "fp8":
        return torch.where(_sets_scale(values), values, _between(values, noise, bits))
    stacked = values.dim() == 3  # experts are [in, out], and blocks lie along the inputs
    if stacked:
        values, noise = values.transpose(1, 2), noise.transpose(1, 2)
    moved = _between_codes(values, noise)
    return moved.transpose(1, 2) if stacked else moved


def _noise(name: str, like: Tensor, seed: int, first: int) -> Tensor:
    """FP32 from −1 to 1: a hash of each position, with 24 random bits."""
    mask, found = 0xFFFFFFFF, torch.empty(like.numel(), device=like.device)
    key = zlib.crc32(f"{seed} {name}".encode())
    for start in range(0, like.numel(), _PIECE):
        stop = min(start + _PIECE, like.numel())
        place = torch.arange(first + start, first + stop, device=like.device)
        bits = (place ^ ((place >> 32) * 0x9E3779B1) ^ key) & mask
        bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & mask
        bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & mask
        bits ^= bits >> 16
        found[start:stop] = (bits >> 8).float().add_(0.5).mul_(2.0**-23).sub_(1)
    return found.view(like.shape)


def _between(values: Tensor, noise: Tensor, bits: int) -> Tensor:
    """Floating-point numbers of `bits` significant bits. Zero stays: its neighbours are too near to matter."""
    fraction, exponent = torch.frexp(values.abs())
    up = torch.ldexp(torch.ones_like(values), exponent - bits - 1)
    down = torch.where(fraction == 0.5, up / 2, up)  # below a power of two, numbers are twice as dense
    size = values.abs() + torch.where(noise > 0, noise * up, noise * down)
    return torch.where(values == 0, values, torch.copysign(size, values))


def _sets_scale(values: Tensor) -> Tensor:
    """Which values are the largest of their block of fp8, which its scale depends on."""
    rows, columns = values.shape[-2:]
    size = pad(values.abs(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = size.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    largest = (blocks == blocks.amax((-3, -1), keepdim=True)).flatten(-2).flatten(-3, -2)
    return largest[..., :rows, :columns]


def _between_codes(values: Tensor, noise: Tensor) -> Tensor:
    """nvfp4, in blocks along the last dimension. Values with the largest code stay: the scale depends on them."""
    blocks = pad(values.abs(), (0, -values.shape[-1] % nvfp4.BLOCK)).unflatten(-1, (-1, nvfp4.BLOCK))
    smallest = nvfp4.SMALLEST_SCALE * nvfp4.power_of(blocks.amax((-3, -2, -1), keepdim=True))
    step = torch.maximum(blocks.amax(-1, keepdim=True) / nvfp4.VALUES[-1], smallest)
    step = step.expand_as(blocks).flatten(-2)[..., : values.shape[-1]]
    size = (values.abs() / step).contiguous()
    codes, bounds = (torch.tensor(each, device=values.device) for each in (nvfp4.VALUES, nvfp4.BOUNDS))
    code = torch.bucketize(size, bounds)
    up = bounds[code.clamp(max=len(bounds) - 1)] - codes[code]
    down = codes[code] - bounds[(code - 1).clamp(min=0)]
    # zero keeps its sign, which the codes have: its places are on one side
    moved = torch.where(code == 0, noise.abs() * up, size + torch.where(noise > 0, noise * up, noise * down))
    return torch.where(code == len(bounds), values, torch.copysign(moved * step, values))
