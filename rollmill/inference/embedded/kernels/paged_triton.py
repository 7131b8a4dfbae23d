"""Attention over the pages of the KV cache on CUDA, for single tokens and for chunks of prompts.

A program takes a tile: adjacent positions of one sequence, for the query heads that share a KV head
(attention.fixed_order_triton). The kernel reads the lengths on the device, so a launch depends only on the number of
tiles and can be recorded.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from rollmill.inference.embedded.cache import KVCache
from rollmill.models.kernels.attention.fixed_order_triton import attend_pages, shape_of
from rollmill.models.kernels.attention.varlen import values_in_keys

ROWS = 64  # query rows in a tile of several positions
_FEWEST_ROWS = 16  # that tensor cores need


class Plan(NamedTuple):
    """Where the tokens of a step belong. All int32 on the device; S sequences of at most P pages."""

    tokens_N: Tensor
    positions_N: Tensor
    sequences_N: Tensor  # row of `tables`
    tiles_T4: Tensor  # first token, number of tokens, position of the first, sequence
    tables_SP: Tensor  # pages of each sequence


def tile_positions(group: int) -> int:
    """The most positions per tile, for `group` query heads per KV head."""
    return max(1, ROWS // group)


def heads_together(group: int) -> int:
    """The query heads of a KV head in one tile: all, or an equal part that fits."""
    return max(count for count in range(1, min(group, ROWS) + 1) if group % count == 0)


@triton.jit
def kept(x, ptr):
    """As it is kept at `ptr`. FP8 has no infinity: it ends at 448."""
    if ptr.dtype.element_ty == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0)
    return x.to(ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["pages"])
def _store(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    positions_ptr,
    sequences_ptr,
    tables_ptr,
    k_token,
    k_head,
    v_token,
    v_head,
    pages,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions_ptr + token)
    block = tl.load(tables_ptr + tl.load(sequences_ptr + token).to(tl.int64) * pages + position // PAGE).to(tl.int64)
    slot = (block * HEADS + head) * PAGE + position % PAGE
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    k = tl.load(k_ptr + token * k_token + head * k_head + d, d < DIM, 0.0)
    v = tl.load(v_ptr + token * v_token + head * v_head + e, e < VALUE_DIM, 0.0)
    tl.store(keys_ptr + slot * DIM + d, kept(k, keys_ptr), d < DIM)
    tl.store(values_ptr + slot * VALUE_DIM + e, kept(v, values_ptr), e < VALUE_DIM)


class TritonAttention:
    """Writes the new keys and values into their pages, then attends: two launches per layer."""

    def __init__(self, cache: KVCache, plan: Plan, positions: int, exact: bool = False) -> None:
        """`positions` is the most positions per tile. `exact`: with the bits of the trainer's exact attention."""
        self._cache, self._plan = cache, plan
        latent, together = values_in_keys(cache.keys, cache.values), heads_together(cache.group)
        rows = max(ROWS if exact else _FEWEST_ROWS, triton.next_power_of_2(positions * together))
        sizes = (cache.kv_heads, cache.group, cache.head_dim, cache.value_dim)
        self._shape = shape_of(*sizes, rows, together=together, latent=latent)
        if exact and positions == 1 and max(cache.head_dim, cache.value_dim) <= 64:
            self._shape["num_stages"] = 5  # single tokens wait for memory; measured on an H200
        width = 0 if latent else cache.value_dim
        self._stored = {"HEADS": cache.kv_heads, "DIM": cache.head_dim, "VALUE_DIM": width}
        self._stored |= {"BLOCK_D": triton.next_power_of_2(cache.head_dim), "BLOCK_E": self._shape["BLOCK_E"]}

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        cache, plan = self._cache, self._plan
        keys, values = cache.keys[layer], cache.values[layer]
        assert q_NHD.stride(2) == k_NKD.stride(2) == v_NKD.stride(2) == 1
        _store[(len(q_NHD), cache.kv_heads)](
            k_NKD,
            v_NKD,
            keys,
            values,
            plan.positions_N,
            plan.sequences_N,
            plan.tables_SP,
            *k_NKD.stride()[:2],
            *v_NKD.stride()[:2],
            plan.tables_SP.stride(0),
            PAGE=cache.block_size,
            **self._stored,
            num_warps=1,
        )
        return attend_pages(q_NHD, keys, values, plan.tiles_T4, plan.tables_SP, cache.block_size, self._shape)
