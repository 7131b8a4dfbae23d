"""Causal attention over packed sequences, for the trainer. (The engine attends over a paged cache.)

The decoder calls `attend(layer, q, k, v)` for N packed tokens, with rotated q [N, heads, D] and k [N, kv_heads, D], and
v [N, kv_heads, E]. E = D, except with latent attention. The result is [N, heads · E].
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from rollmill.models.kernels.call import call
from rollmill.models.kernels.rows import pad_rows, unpad_rows

# Sequences share a padded bucket while the shortest fills at least this part of it. Larger buckets mean fewer, larger
# products, but more padding.
BUCKET_FILL = 0.8


class Attend(Protocol):
    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor: ...


def packed_positions(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """The positions 0 … length − 1 of each sequence, end to end."""
    return torch.cat([torch.arange(length, device=device) for length in lengths])


class _Attention(Function):
    """softmax(q·kᵀ/√D + mask)·v and its backward pass, for batches of heads. K and V are copied to contiguous memory
    when transposed, because several BLAS libraries multiply by a transposed right side at a quarter of the speed."""

    @staticmethod
    def forward(ctx: Any, q_BQD: Tensor, k_BTD: Tensor, v_BTD: Tensor, mask_QT: Tensor) -> Tensor:
        q_BQD = q_BQD * q_BQD.shape[-1] ** -0.5
        scores_BQT = torch.bmm(q_BQD, k_BTD.transpose(1, 2).contiguous()).float().add_(mask_QT)
        weights_BQT = torch.softmax(scores_BQT, -1).to(v_BTD.dtype)
        ctx.save_for_backward(q_BQD, k_BTD, v_BTD, weights_BQT)
        return torch.bmm(weights_BQT, v_BTD)

    @staticmethod
    def backward(ctx: Any, grad_BQD: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_BQD, k_BTD, v_BTD, weights_BQT = ctx.saved_tensors
        grad_v_BTD = torch.bmm(weights_BQT.transpose(1, 2), grad_BQD)
        grad_weights = torch.bmm(grad_BQD, v_BTD.transpose(1, 2).contiguous())
        # softmax backward: w · (g - Σ w·g), masked entries have w = 0
        grad_scores = grad_weights.mul_(weights_BQT)
        grad_scores.addcmul_(weights_BQT, grad_scores.sum(-1, keepdim=True), value=-1)
        grad_q_BQD = torch.bmm(grad_scores, k_BTD).mul_(q_BQD.shape[-1] ** -0.5)
        grad_k_BTD = torch.bmm(grad_scores.transpose(1, 2), q_BQD)
        return grad_q_BQD, grad_k_BTD, grad_v_BTD, None


def attention(q_BQD: Tensor, k_BTD: Tensor, v_BTD: Tensor, mask_QT: Tensor) -> Tensor:
    """`mask` is added to the scores [B, Q, T]: 0 to attend, -inf to hide."""
    return call(_Attention, q_BQD, k_BTD, v_BTD, mask_QT)


class PackedAttention:
    """Block-diagonal causal attention: the packed tokens are sequences of `lengths`, end to end."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        assert all(length > 0 for length in lengths), "an empty sequence has no token to pack"
        order = sorted(range(len(lengths)), key=lambda index: lengths[index])
        starts = [0, *itertools.accumulate(lengths)]
        self._device = device
        self._buckets: list[tuple[int, int]] = []  # (sequences, padded length)
        source: list[Tensor] = []
        slot = torch.empty(starts[-1], dtype=torch.long)
        base = 0
        # padding is at the end of a sequence, so the causal mask hides it
        for members in _bucket(order, lengths):
            padded = max(lengths[index] for index in members)
            self._buckets.append((len(members), padded))
            for index in members:
                length, start = lengths[index], starts[index]
                source.append(torch.arange(start, start + padded).clamp_(max=start + length - 1))
                slot[start : start + length] = torch.arange(base, base + length)
                base += padded
        self._source, self._slot = torch.cat(source).to(device), slot.to(device)
        self._masks: dict[tuple[int, int], Tensor] = {}

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        tokens, heads, dim = q_NHD.shape
        kv_heads, value_dim = v_NKD.shape[1:]
        sizes = [sequences * length for sequences, length in self._buckets]
        q, k, v = (
            pad_rows(x.reshape(tokens, -1), self._source, self._slot).split(sizes) for x in (q_NHD, k_NKD, v_NKD)
        )
        outs = []
        for index, (sequences, length) in enumerate(self._buckets):
            batch = (sequences, length, kv_heads)
            # query heads that share a KV head become further query rows, so K and V are not copied
            q_heads = q[index].view(*batch, -1, dim).permute(0, 2, 3, 1, 4).reshape(sequences * kv_heads, -1, dim)
            k_heads, v_heads = (
                x[index].view(*batch, -1).transpose(1, 2).reshape(sequences * kv_heads, length, -1) for x in (k, v)
            )
            out = attention(q_heads, k_heads, v_heads, self._mask(length, heads // kv_heads))
            out = out.view(sequences, kv_heads, -1, length, value_dim).permute(0, 3, 1, 2, 4)
            outs.append(out.reshape(sequences * length, heads * value_dim))
        return unpad_rows(torch.cat(outs) if len(outs) > 1 else outs[0], self._slot)

    def _mask(self, length: int, group: int) -> Tensor:
        key = (length, group)
        if key not in self._masks:
            mask = torch.full((length, length), float("-inf"), device=self._device).triu_(1)
            self._masks[key] = mask.repeat(group, 1)
        return self._masks[key]


def _bucket(order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Cuts `order` (shortest first) into buckets whose shortest member fills BUCKET_FILL of the longest."""
    buckets: list[list[int]] = []
    for index in order:
        if buckets and lengths[buckets[-1][0]] >= BUCKET_FILL * lengths[index]:
            buckets[-1].append(index)
        else:
            buckets.append([index])
    return buckets
