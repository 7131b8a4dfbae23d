"""Context parallel attention: a rank's queries are slices of sequences; their keys are gathered from its group.

    k, v of this rank's tokens ─► k, v of the group ─► for each slice the keys up to its end ─► causal attention

The keys and values of the group's sequences are in memory for one layer at a time. Queries, scores and all other
activations stay sharded.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rollmill.models.attention import attention
from rollmill.models.kernels.attention.varlen import flash
from rollmill.training.parallel.collectives import gather_rows
from rollmill.training.parallel.token_split import SequenceSlice


class SliceAttention:
    """Causal attention of packed slices of queries to packed keys. Slice i has `queries[i]` queries and `keys[i]` keys;
    its last key is that of its last query."""

    def __init__(self, queries: Sequence[int], keys: Sequence[int], device: torch.device) -> None:
        self._queries, self._keys, self._device = list(queries), list(keys), device
        self._query_starts, self._key_starts = (
            torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)
            for lengths in (queries, keys)
        )

    def __call__(self, q_NHD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        if q_NHD.is_cuda and q_NHD.dtype in (torch.bfloat16, torch.float16):
            starts, longest = (self._query_starts, self._key_starts), (max(self._queries), max(self._keys))
            return flash(q_NHD, k_TKD, v_TKD, starts, longest)
        slices = zip(q_NHD.split(self._queries), k_TKD.split(self._keys), v_TKD.split(self._keys), strict=True)
        return torch.cat([self._one(*each) for each in slices])

    def _one(self, q_QHD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        (queries, heads, dim), (keys, kv_heads, value_dim) = q_QHD.shape, v_TKD.shape
        # query heads that share a KV head are stacked as further query rows, as in PackedAttention
        q_heads = q_QHD.view(queries, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
        mask = torch.full((queries, keys), float("-inf"), device=self._device).triu_(keys - queries + 1)
        out = attention(q_heads, k_TKD.transpose(0, 1), v_TKD.transpose(0, 1), mask.repeat(heads // kv_heads, 1))
        return out.view(kv_heads, -1, queries, value_dim).permute(2, 0, 1, 3).reshape(queries, heads * value_dim)


class ContextAttention:
    """The attention of one rank. `slices[c]` are those of rank c of the context group."""

    def __init__(
        self, slices: Sequence[Sequence[SequenceSlice]], rank: int, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._group = group
        self._counts = [max(1, sum(each.stop - each.start for each in own)) for own in slices]
        firsts = [0, *itertools.accumulate(self._counts)]
        lengths: dict[int, int] = {}
        for each in itertools.chain(*slices):
            lengths[each.first] = max(each.stop, lengths.get(each.first, 0))
        place = {first: np.empty(length, np.int64) for first, length in lengths.items()}
        for own, start in zip(slices, firsts, strict=False):
            for each in own:
                size = each.stop - each.start
                place[each.first][each.start : each.stop] = np.arange(start, start + size)
                start += size
        mine = slices[rank]
        # a rank without tokens has one filler token, which attends to itself
        keys = [place[each.first][: each.stop] for each in mine] or [np.array([firsts[rank]])]
        self._keys = torch.from_numpy(np.concatenate(keys)).to(device, non_blocking=True)
        queries = [each.stop - each.start for each in mine] or [1]
        self._attend = SliceAttention(queries, [len(each) for each in keys], device)

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        kv_heads, dim = k_NKD.shape[1:]
        both = torch.cat((k_NKD, v_NKD), dim=2).flatten(1)  # one message instead of two
        both = gather_rows(both, self._counts, self._group).index_select(0, self._keys).unflatten(1, (kv_heads, -1))
        k_TKD, v_TKD = both.split((dim, v_NKD.shape[2]), dim=2)
        return self._attend(q_NHD, k_TKD, v_TKD)
