"""Chooses the attention for packed sequences: by device, type and numerics."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollmill.models.attention import Attend, PackedAttention
from rollmill.models.exact_attention import ExactAttention, OrderedAttention
from rollmill.models.kernels.attention.varlen import VarlenAttention
from rollmill.models.triton import has_triton

_HALF = (torch.bfloat16, torch.float16)


def packed_attention(
    lengths: Sequence[int], device: torch.device | str, dtype: torch.dtype, exact: bool = False
) -> Attend:
    """The attention for packed sequences of `lengths` on `device`, for a model that computes in `dtype`."""
    device = torch.device(device)
    if exact:
        if has_triton(device):
            return OrderedAttention(lengths, device, packed_attention(lengths, device, dtype))
        return ExactAttention(lengths)
    if device.type == "cuda" and dtype in _HALF:
        return VarlenAttention(lengths, device)
    return PackedAttention(lengths, device)
