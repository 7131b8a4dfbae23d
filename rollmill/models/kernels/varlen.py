"""Attention over packed sequences on CUDA, without padding and without a matrix of scores in memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from rollmill.models.attention import Attend, PackedAttention
from rollmill.models.kernels.call import call

_HALF = (torch.bfloat16, torch.float16)


def packed_attention(lengths: Sequence[int], device: torch.device | str, dtype: torch.dtype) -> Attend:
    """The strategy for packed sequences of `lengths` on this device, for a model that computes in `dtype`."""
    device = torch.device(device)
    if device.type == "cuda" and dtype in _HALF:
        return VarlenAttention(lengths, device)
    return PackedAttention(lengths, device)


class _Varlen(Function):
    """Flash attention of torch: scores are made again in the backward pass from one number a row."""

    @staticmethod
    def forward(ctx: Any, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, starts: Tensor, longest: int) -> Tensor:
        out, sums, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q_NHD, k_NKD, v_NKD, starts, starts, longest, longest, 0.0, True, False
        )
        ctx.save_for_backward(q_NHD, k_NKD, v_NKD, out, sums, state, unused, starts)
        ctx.longest = longest
        return out

    @staticmethod
    def backward(ctx: Any, grad_NHD: Tensor) -> tuple[Tensor | None, ...]:
        q_NHD, k_NKD, v_NKD, out, sums, state, unused, starts = ctx.saved_tensors
        longest = ctx.longest
        grads = torch.ops.aten._flash_attention_backward(
            grad_NHD.contiguous(),
            q_NHD,
            k_NKD,
            v_NKD,
            out,
            sums,
            starts,
            starts,
            longest,
            longest,
            0.0,
            True,
            state,
            unused,
        )
        return *grads, None, None


def _uniform(q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, length: int) -> Tensor:
    """Sequences of one length as a batch, through cuDNN: about twice as fast on Hopper as what takes any lengths."""
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q_NHD, k_NKD, v_NKD))
    out = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, torch.is_grad_enabled(), 0.0, True)[0]
    return out.transpose(1, 2).flatten(0, 1)


class VarlenAttention:
    """Block-diagonal causal attention: the packed tokens are sequences of `lengths`, end to end."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str) -> None:
        assert all(length > 0 for length in lengths), "an empty sequence has no token to pack"
        self._longest = max(lengths)
        starts = [0, *itertools.accumulate(lengths)]
        self._starts = torch.tensor(starts, dtype=torch.int32).to(device, non_blocking=True)
        # cuDNN plans anew for every shape, which pays where shapes come back: documents cut to one length
        self._uniform = len(set(lengths)) == 1 and len(lengths) > 1

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        value_dim, dim = v_NKD.shape[2], q_NHD.shape[2]
        if value_dim != dim:  # latent attention: the kernels want one width for keys and values
            v_NKD = pad(v_NKD, (0, dim - value_dim))
        if self._uniform and not torch.are_deterministic_algorithms_enabled():
            out_NHD = _uniform(q_NHD, k_NKD, v_NKD, self._longest)
        else:
            out_NHD = call(_Varlen, q_NHD, k_NKD, v_NKD, self._starts, self._longest)
        return out_NHD[..., :value_dim].flatten(1)
