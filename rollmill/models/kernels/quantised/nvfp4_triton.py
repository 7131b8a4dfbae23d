"""NVFP4 values on CUDA with one read and one write. The bits are the same as those of `nvfp4`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollmill.models.kernels.quantised.fp8_triton import scale_of

_SIXTH = tl.constexpr(0.1666666716337204)


@triton.jit
def _round(x_ptr, out_ptr, power_ptr, columns, rows, GIVEN: tl.constexpr, BLOCKS: tl.constexpr):
    """One row. Its power is its own, or that of its matrix of `rows` rows if GIVEN."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCKS)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + row * columns + column, column < columns, 0.0).to(tl.float32)
    magnitude = tl.abs(x)
    largest_B = tl.max(magnitude, 1)
    if GIVEN:
        power = tl.load(power_ptr + row // rows)
        inverse = (0x7F000000 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    else:
        power, inverse = scale_of(tl.max(largest_B, 0) * _SIXTH)
    scale_B = tl.maximum(largest_B * _SIXTH * inverse, 0.015625).to(tl.float8e4nv).to(tl.float32)
    factor = (scale_B * power)[:, None]
    value = tl.where(magnitude > factor * 0.25, 0.5, 0.0)
    value = tl.where(magnitude >= factor * 0.75, 1.0, value)
    value = tl.where(magnitude > factor * 1.25, 1.5, value)
    value = tl.where(magnitude >= factor * 1.75, 2.0, value)
    value = tl.where(magnitude > factor * 2.5, 3.0, value)
    value = tl.where(magnitude >= factor * 3.5, 4.0, value)
    value = tl.where(magnitude > factor * 5.0, 6.0, value)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    out = ((value * factor).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    out = tl.where(magnitude < float("inf"), out, x)  # values that are not finite are passed on
    tl.store(out_ptr + row * columns + column, out.to(out_ptr.dtype.element_ty), column < columns)


def rounded(x: Tensor, power: Tensor | None) -> Tensor:
    """Rounds matrices [..., R, C] with one power each, or tokens if `power` is None."""
    x = x.contiguous()
    out = torch.empty_like(x)
    columns = x.shape[-1]
    blocks = triton.next_power_of_2(triton.cdiv(columns, 16))
    warps = 1 if blocks <= 16 else 4 if blocks <= 256 else 8
    _round[(x.numel() // columns,)](
        x, out, power if power is None else power.contiguous(), columns, x.shape[-2], GIVEN=power is not None,
        BLOCKS=blocks, num_warps=warps,
    )  # fmt: skip
    return out
