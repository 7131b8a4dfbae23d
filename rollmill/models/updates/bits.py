"""Elements as integers with the same bits. Deltas and audits work on these, for any dtype."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rollmill.errors import WeightsError

# Signed, because torch has few operations for unsigned integers; `unsigned` masks the sign off.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def bits_of(tensor: Tensor) -> Tensor:
    """The elements as flat integers of their width. Shares the memory."""
    if not tensor.is_contiguous():
        raise WeightsError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous", hint="tensor.contiguous()")
    if tensor.element_size() not in INTEGERS:
        raise WeightsError(f"{tensor.dtype} has elements of {tensor.element_size()} bytes", hint="1, 2 or 4 bytes")
    return tensor.detach().view(-1).view(INTEGERS[tensor.element_size()])


def unsigned(bits: Tensor) -> Tensor:
    """The bits of integers of any width as unsigned numbers, in int64."""
    return bits.to(torch.int64) & ((1 << 8 * bits.element_size()) - 1)


def ordered(bits: Tensor) -> Tensor:
    """Sign-magnitude bit patterns as integers (int64) in numeric order: …, −1 ULP, −0, +0, +1 ULP, …"""
    top = 1 << (8 * bits.element_size() - 1)
    numbers = unsigned(bits)
    return torch.where(numbers >= top, 2 * top - 1 - numbers, numbers + top)


def widened(bits: Tensor, form: torch.dtype, dtype: torch.dtype) -> Tensor:
    """The bits that elements of `form` have in a parameter of `dtype`, which must hold all of them exactly."""
    if form == dtype:
        return bits
    if (form, dtype) == (torch.bfloat16, torch.float32):
        return bits.to(torch.int32) << 16  # not a conversion, which may change a NaN
    if (form, dtype) != (torch.float16, torch.float32):
        raise WeightsError(f"a parameter of {dtype} cannot hold every {form}", hint=f"keep it in {form} or float32")
    return bits.view(form).to(dtype).view(INTEGERS[dtype.itemsize])


def packed_bits(flags: Tensor) -> Tensor:
    """Eight flags per byte, the first in the highest bit. The number of flags is a multiple of eight."""
    places = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=flags.device)
    return (flags.view(-1, 8).to(torch.uint8) * places).sum(1, dtype=torch.uint8)


def elements(data: np.ndarray, form: torch.dtype) -> Tensor:
    """Bytes or integers as integers of the form's width. Shares the memory if it is writable."""
    flat = data.reshape(-1).view(f"i{form.itemsize}")
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy())  # torch needs writable memory even to read
