"""Attention over the pages of the KV cache on CUDA, for single tokens and for chunks of prompts.

A program takes a tile: adjacent positions of one sequence, for all query heads that share a KV head. It reads the
sequence's keys from first to last in blocks of a fixed size. So the bits of a row depend only on its own context: not
on the batch, nor on whether the token was in a prompt or sampled. The kernel reads the lengths on the device, so a
launch depends only on the number of tiles and can be recorded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollmill.inference.embedded.cache import KVCache

_KEYS = 64  # at once
_ROWS = 64  # query rows in a tile of several positions; tensor cores need at least 16
_FEWEST_ROWS = 16
_LOG2_E = 1.4426950408889634


class Plan(NamedTuple):
    """Where the tokens of a step belong. All int32 on the device; S sequences of at most P pages."""

    tokens_N: Tensor
    positions_N: Tensor
    sequences_N: Tensor  # row of `tables`
    tiles_T4: Tensor  # first token, number of tokens, position of the first, sequence
    tables_SP: Tensor  # pages of each sequence


def tile_positions(group: int) -> int:
    """The most positions per tile, for `group` query heads per KV head."""
    return max(1, _ROWS // group)


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
    tl.store(keys_ptr + slot * DIM + d, k, d < DIM)
    tl.store(values_ptr + slot * VALUE_DIM + e, v, e < VALUE_DIM)


@triton.jit(do_not_specialize=["pages"])
def _attend(
    q_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    tiles_ptr,
    tables_ptr,
    q_token,
    q_head,
    pages,
    scale,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    tile, head = tiles_ptr + tl.program_id(0) * 4, tl.program_id(1)
    first, count, start = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    table_ptr = tables_ptr + tl.load(tile + 3).to(tl.int64) * pages
    row, d, e = tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    token, q_number = row // GROUP, head * GROUP + row % GROUP
    inside, position = token < count, start + token
    q = tl.load(
        q_ptr + (first + token)[:, None] * q_token + q_number[:, None] * q_head + d[None, :],
        inside[:, None] & (d < DIM)[None, :],
        0.0,
    )
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_E], tl.float32)
    length = start + count
    for begin in range(0, length, KEYS):
        key = begin + tl.arange(0, KEYS)
        block = tl.load(table_ptr + key // PAGE, key < length, 0).to(tl.int64)
        slot = (block * HEADS + head) * PAGE + key % PAGE
        k = tl.load(keys_ptr + slot[None, :] * DIM + d[:, None], (key < length)[None, :] & (d < DIM)[:, None], 0.0)
        v = tl.load(
            values_ptr + slot[:, None] * VALUE_DIM + e[None, :],
            (key < length)[:, None] & (e < VALUE_DIM)[None, :],
            0.0,
        )
        # the first block has a key for every row, so no row is empty
        scores = tl.where(key[None, :] <= position[:, None], tl.dot(q, k) * scale, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, 1)
        out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        largest = larger
    out = out / total[:, None]
    tl.store(
        out_ptr + ((first + token)[:, None] * (HEADS * GROUP) + q_number[:, None]) * VALUE_DIM + e[None, :],
        out.to(out_ptr.dtype.element_ty),
        inside[:, None] & (e < VALUE_DIM)[None, :],
    )


class TritonAttention:
    """Writes the new keys and values into their pages, then attends: two launches per layer."""

    def __init__(self, cache: KVCache, plan: Plan, positions: int) -> None:
        """`positions` is the most positions per tile."""
        self._cache, self._plan = cache, plan
        self._rows = max(_FEWEST_ROWS, triton.next_power_of_2(positions * cache.group))
        self._shape = {
            "HEADS": cache.kv_heads,
            "PAGE": cache.block_size,
            "DIM": cache.head_dim,
            "VALUE_DIM": cache.value_dim,
            "BLOCK_D": max(16, triton.next_power_of_2(cache.head_dim)),
            "BLOCK_E": max(16, triton.next_power_of_2(cache.value_dim)),
        }
        self._scale = cache.head_dim**-0.5 * _LOG2_E

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        cache, plan = self._cache, self._plan
        keys, values = cache.keys[layer], cache.values[layer]
        assert q_NHD.stride(2) == k_NKD.stride(2) == v_NKD.stride(2) == 1
        tokens, heads = q_NHD.shape[:2]
        pages = plan.tables_SP.stride(0)
        _store[(tokens, cache.kv_heads)](
            k_NKD,
            v_NKD,
            keys,
            values,
            plan.positions_N,
            plan.sequences_N,
            plan.tables_SP,
            *k_NKD.stride()[:2],
            *v_NKD.stride()[:2],
            pages,
            **self._shape,
            num_warps=1,
        )
        out = torch.empty((tokens, heads * cache.value_dim), dtype=q_NHD.dtype, device=q_NHD.device)
        _attend[(len(plan.tiles_T4), cache.kv_heads)](
            q_NHD,
            keys,
            values,
            out,
            plan.tiles_T4,
            plan.tables_SP,
            *q_NHD.stride()[:2],
            pages,
            self._scale,
            GROUP=cache.group,
            ROWS=self._rows,
            KEYS=_KEYS,
            **self._shape,
            num_warps=4,
        )
        return out
