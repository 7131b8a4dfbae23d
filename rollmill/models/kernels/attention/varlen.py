"""Attention over packed sequences on CUDA, without padding and without the matrix of scores in memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from rollmill.models.kernels.call import call
from rollmill.models.triton import has_triton

if TYPE_CHECKING:
    from rollmill.models.kernels.attention.packed_triton import Tiles

_WIDE = 64  # up to this head width our kernels are as fast as cuDNN


class _Flash(Function):
    """The backward pass recomputes the scores from one number per row."""

    @staticmethod
    def forward(
        ctx: Any, q_NHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, starts: tuple[Tensor, Tensor], longest: tuple[int, int]
    ) -> Tensor:
        out, sums, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q_NHD, k_TKD, v_TKD, *starts, *longest, 0.0, True, False
        )
        ctx.save_for_backward(q_NHD, k_TKD, v_TKD, out, sums, *starts, state, unused)
        ctx.longest = longest
        return out

    @staticmethod
    def backward(ctx: Any, grad_NHD: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums, query_starts, key_starts, state, unused = ctx.saved_tensors
        starts = (query_starts, key_starts)
        grads = torch.ops.aten._flash_attention_backward(
            grad_NHD.contiguous(), q, k, v, out, sums, *starts, *ctx.longest, 0.0, True, state, unused
        )
        return *grads, None, None


def flash(
    q_NHD: Tensor, k_TKD: Tensor, v_TKE: Tensor, starts: tuple[Tensor, Tensor], longest: tuple[int, int]
) -> Tensor:
    """Torch's flash attention from packed queries to packed keys, [N, H · E]. The last query of a sequence is aligned
    with its last key. `starts` and `longest` are (of the queries, of the keys)."""
    v_TKD = _wide(v_TKE, q_NHD.shape[2])
    out_NHD = call(_Flash, *(_aligned(each) for each in (q_NHD, k_TKD, v_TKD)), starts, longest)
    return out_NHD[..., : v_TKE.shape[2]].flatten(1)


def values_in_keys(keys: Tensor, values: Tensor) -> bool:
    """Whether values are the first columns of the keys, as with latents."""
    return keys.data_ptr() == values.data_ptr()


def _wide(v_TKE: Tensor, dim: int) -> Tensor:
    """For latent attention: the kernels need the same width for keys and values."""
    return v_TKE if v_TKE.shape[2] == dim else pad(v_TKE, (0, dim - v_TKE.shape[2]))


def _aligned(x: Tensor) -> Tensor:
    """The kernels read rows 16 bytes at a time and do not check the alignment."""
    good = x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in x.stride()[:-1])
    return x if good else x.clone(memory_format=torch.contiguous_format)


def _uniform(q_NHD: Tensor, k_NKD: Tensor, v_NKE: Tensor, length: int) -> Tensor:
    """Sequences of the same length as one batch, with cuDNN: [N, H · E]."""
    v_NKD = _wide(v_NKE, q_NHD.shape[2])
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q_NHD, k_NKD, v_NKD))
    out = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, torch.is_grad_enabled(), 0.0, True)[0]
    return out.transpose(1, 2).flatten(0, 1)[..., : v_NKE.shape[2]].flatten(1)


def _tiles(lengths: Sequence[int], device: torch.device) -> Tiles | None:
    """For our own kernels, if they run on this device."""
    if not has_triton(device):
        return None
    from rollmill.models.kernels.attention.packed_triton import Tiles

    return Tiles(lengths, device)


class VarlenAttention:
    """Block-diagonal causal attention: the packed tokens are sequences of `lengths`, end to end.

    It uses our own kernels, or torch's flash attention if these do not fit. Sequences of the same length with wide
    heads use cuDNN, which is faster there, unless determinism is required.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str) -> None:
        assert all(length > 0 for length in lengths), "an empty sequence has no token to pack"
        self._longest = max(lengths)
        starts = [0, *itertools.accumulate(lengths)]
        self._starts = torch.tensor(starts, dtype=torch.int32).to(device, non_blocking=True)
        # cuDNN plans for every new shape, which pays only if shapes repeat, as with documents cut to one length
        self._uniform = len(set(lengths)) == 1 and len(lengths) > 1
        self._tiles = _tiles(lengths, torch.device(device))

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        uniform = self._uniform and not torch.are_deterministic_algorithms_enabled()
        if self._tiles is not None and not (uniform and q_NHD.shape[2] > _WIDE):
            from rollmill.models.kernels.attention.packed_triton import attend, fits

            if fits(q_NHD, k_NKD, v_NKD):
                return attend(q_NHD, k_NKD, v_NKD, self._tiles).flatten(1)
        if uniform:
            return _uniform(q_NHD, k_NKD, v_NKD, self._longest)
        return flash(q_NHD, k_NKD, v_NKD, (self._starts, self._starts), (self._longest, self._longest))
