"""Causal attention with the same bits in every batch: for the trainer's packed rows and the engine's pages.

On Hopper both use kernels.attention.fixed_order_triton. On the CPU both call `attend`, and differ only in where a row
of keys is:

    key t of sequence s, KV head h      firsts[s, t // size] + t % size · key_step + h · head_step
    packed rows [tokens, kv_heads]      one block per sequence; key_step = kv_heads, head_step = 1
    pages [page, kv_heads, block_size]  one block per page; key_step = 1, head_step = block_size
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from rollmill.errors import ConfigError
from rollmill.models.attention import Attend, PackedAttention
from rollmill.models.kernels.attention.varlen import values_in_keys
from rollmill.models.kernels.call import call

if TYPE_CHECKING:
    from rollmill.models.kernels.attention.packed_triton import Tiles

_THREADED = 1 << 22  # multiplications; for fewer, threads cost more than they save


@dataclass(frozen=True)
class Keys:
    """Where the keys of each query row are."""

    sequences_N: np.ndarray  # int64, the row's sequence
    counts_N: np.ndarray  # int64, how many keys it sees: the first ones of its sequence
    firsts_SB: np.ndarray  # int64, the row of the first key of each block, for the first KV head
    size: int  # keys per block
    head_step: int
    key_step: int


@functools.cache
def _loops() -> Any:
    try:
        from rollmill.models.kernels.attention import loops as attention_loops
    except RuntimeError as error:  # it found no place for its cache
        raise ConfigError(
            f"numerics is 'exact', but its loops cannot be compiled here: {error}",
            hint="set NUMBA_CACHE_DIR to a directory that can be written, or numerics = 'fast'",
        ) from error
    return attention_loops


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "attention")


def attend(q_NHD: Tensor, keys_RD: Tensor, values_RE: Tensor, kv_heads: int, where: Keys) -> Tensor:
    """[N, H · E]. `keys` and `values` have one row per key and KV head."""
    tokens, heads, dim = q_NHD.shape
    out_NHE = q_NHD.new_empty(tokens, heads, values_RE.shape[1])
    values = keys_RD if values_in_keys(keys_RD, values_RE) else values_RE  # the loops read what they need of a row
    given = [x.detach().contiguous().numpy() for x in (q_NHD, keys_RD, values)] + [out_NHE.numpy()]
    layout = np.array([where.size, where.head_step, where.key_step, heads // kv_heads])
    arguments = (*given, where.sequences_N, where.counts_N, where.firsts_SB, layout, np.float32(dim**-0.5))
    work, threads = np.cumsum(where.counts_N), torch.get_num_threads()
    if threads == 1 or int(work[-1]) * heads * dim < _THREADED:
        _loops().attend(*arguments, 0, tokens)
        return out_NHE.flatten(1)
    parts = 4 * threads  # more parts than threads: they take different times
    ends = [0, *np.searchsorted(work, work[-1] * np.arange(1, parts) / parts).tolist(), tokens]
    run = functools.partial(_loops().attend, *arguments)
    for done in [_pool(threads).submit(run, start, stop) for start, stop in itertools.pairwise(ends) if start < stop]:
        done.result()
    return out_NHE.flatten(1)


class _Packed(Function):
    """Only the forward pass has fixed bits. The backward pass is that of PackedAttention, which it runs again."""

    @staticmethod
    def forward(ctx: Any, q_NHD: Tensor, k_NKD: Tensor, v_NKE: Tensor, where: Keys, plain: Attend) -> Tensor:
        ctx.save_for_backward(q_NHD, k_NKD, v_NKE)
        ctx.plain = plain
        return attend(q_NHD, k_NKD.flatten(0, 1), v_NKE.flatten(0, 1), k_NKD.shape[1], where)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *gradients_of(functools.partial(ctx.plain, 0), ctx.saved_tensors, grad), None, None


def gradients_of(function: Callable[..., Tensor], tensors: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of `tensors`, from another forward pass."""
    inputs = [each.detach().requires_grad_() for each in tensors]
    with torch.enable_grad():
        out = function(*inputs)
    return torch.autograd.grad(out, inputs, grad)


class ExactAttention:
    """Block-diagonal causal attention: the packed tokens are sequences of `lengths`, end to end."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)
        self.plain: Attend = PackedAttention(lengths)
        self._keys: dict[int, Keys] = {}

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        kv_heads = k_NKD.shape[1]
        if kv_heads not in self._keys:
            self._keys[kv_heads] = self._packed(kv_heads)
        return call(_Packed, q_NHD, k_NKD, v_NKD, self._keys[kv_heads], self.plain)

    def _packed(self, kv_heads: int) -> Keys:
        starts = np.array([0, *itertools.accumulate(self._lengths[:-1])])
        return Keys(
            sequences_N=np.repeat(np.arange(len(self._lengths)), self._lengths),
            counts_N=np.concatenate([np.arange(1, length + 1) for length in self._lengths]),
            firsts_SB=(starts * kv_heads)[:, None],
            size=max(self._lengths),
            head_step=1,
            key_step=kv_heads,
        )


class _Ordered(Function):
    """The backward pass is that of the fast kernels. If they do not take these heads, `plain` runs again."""

    @staticmethod
    def forward(ctx: Any, q_NHD: Tensor, k_NKD: Tensor, v_NKE: Tensor, tiles: Tiles, plain: Attend) -> Tensor:
        from rollmill.models.kernels.attention.fixed_order_triton import attend_packed

        out_NHE, sums_HL = attend_packed(q_NHD, k_NKD, v_NKE, tiles)
        ctx.save_for_backward(q_NHD, k_NKD, v_NKE, out_NHE, sums_HL)
        ctx.tiles, ctx.plain = tiles, plain
        return out_NHE.flatten(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from rollmill.models.kernels.attention.packed_triton import attention_backward, fits

        q_NHD, k_NKD, v_NKE, out_NHE, sums_HL = ctx.saved_tensors
        if not fits(q_NHD, k_NKD, v_NKE):
            return *gradients_of(functools.partial(ctx.plain, 0), (q_NHD, k_NKD, v_NKE), grad), None, None
        grad_NHE = grad.contiguous().view_as(out_NHE)
        into = attention_backward(q_NHD, k_NKD, v_NKE, out_NHE, sums_HL, grad_NHE, ctx.tiles)
        kv_heads = k_NKD.shape[1]
        return *into.split((q_NHD.shape[1], kv_heads, kv_heads), 1), None, None


class OrderedAttention:
    """ExactAttention on Hopper. `plain` is the fast attention."""

    def __init__(self, lengths: Sequence[int], device: torch.device, plain: Attend) -> None:
        from rollmill.models.kernels.attention.packed_triton import Tiles

        self._tiles, self.plain = Tiles(lengths, device), plain

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        assert q_NHD.stride(2) == k_NKD.stride(2) == v_NKD.stride(2) == 1
        return call(_Ordered, q_NHD, k_NKD, v_NKD, self._tiles, self.plain)
