"""The paged KV cache: pages of `block_size` positions, a free list, and the pages that finished turns leave.

A page has exactly one owner: a request, or a session between two turns. Only `KVCache` holds tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from rollmill.models.config import ModelConfig
from rollmill.types import PolicyRef


class KVCache:
    """The keys and values of all pages, one row per (page, head, position), so a head's positions of a page are
    adjacent."""

    def __init__(
        self,
        model: ModelConfig,
        blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.block_size, self.kv_heads = block_size, model.kv_heads
        self.head_dim, self.value_dim = model.head_dim, model.value_dim
        self.group = model.heads // model.kv_heads  # query heads that share a KV head
        self.device = torch.device(device)
        self.spare = blocks  # one extra page that is never given out, for padding rows of a batch
        self._heads = torch.arange(model.kv_heads)
        rows = (model.layers, (blocks + 1) * model.kv_heads * block_size)
        self.keys = torch.zeros((*rows, model.head_dim), dtype=dtype, device=device)
        self.values = torch.zeros((*rows, model.value_dim), dtype=dtype, device=device)

    def write(self, layer: int, rows_M: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> None:
        """`rows` says where each (token, head) is written; see `rows_of`."""
        self.keys[layer].index_copy_(0, rows_M, k_NKD.reshape(-1, k_NKD.shape[-1]))
        self.values[layer].index_copy_(0, rows_M, v_NKD.reshape(-1, v_NKD.shape[-1]))

    def read(self, layer: int, pages_P: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of pages, [pages, block_size · D] each. Here a page is that of one head; see
        `pages_of`."""
        keys, values = (
            rows[layer].view(-1, self.block_size * rows.shape[-1]).index_select(0, pages_P)
            for rows in (self.keys, self.values)
        )
        return keys, values

    def clear(self, blocks: list[int]) -> None:
        for rows in (self.keys, self.values):
            rows.unflatten(1, (-1, self.kv_heads * self.block_size))[:, blocks] = 0

    def rows_of(self, blocks_N: Tensor, offsets_N: Tensor) -> Tensor:
        pages_NK = blocks_N.unsqueeze(1) * self.kv_heads + self._heads
        return (pages_NK * self.block_size + offsets_N.unsqueeze(1)).flatten()

    def pages_of(self, tables_BP: Tensor) -> Tensor:
        """The pages of block tables, ordered (sequence, head, page). Gathered, they are [B · heads, positions, D]."""
        return (tables_BP.unsqueeze(1) * self.kv_heads + self._heads.unsqueeze(1)).flatten()


class BlockPool:
    """The free list."""

    def __init__(self, blocks: int) -> None:
        self.size = blocks
        self._free = list(range(blocks))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        assert count <= len(self._free), "room is made before blocks are taken"
        return [self._free.pop() for _ in range(count)]

    def give(self, blocks: list[int]) -> None:
        self._free.extend(blocks)


@dataclass
class CachedContext:
    """The computed positions of a context: `tokens` have their keys and values in `blocks`."""

    tokens: list[int]
    blocks: list[int]
    oldest: PolicyRef | None  # the oldest weights that wrote keys or values here


class SessionCache:
    """The pages that finished turns left, by session. When room is needed, the least recently used session loses
    them."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._contexts: OrderedDict[str, CachedContext] = OrderedDict()
        self.blocks = 0  # a counter, because other threads read it

    def keep(self, session: str, context: CachedContext) -> None:
        self.drop(session)
        self._contexts[session] = context
        self.blocks += len(context.blocks)

    def claim(self, session: str, tokens: list[int]) -> CachedContext | None:
        """Returns the session's pages if `tokens` extends their context exactly; otherwise frees them."""
        context = self._pop(session)
        if context is None:
            return None
        length = len(context.tokens)
        if length < len(tokens) and tokens[:length] == context.tokens:
            return context
        self._pool.give(context.blocks)
        return None

    def drop(self, session: str) -> None:
        context = self._pop(session)
        if context is not None:
            self._pool.give(context.blocks)

    def _pop(self, session: str) -> CachedContext | None:
        context = self._contexts.pop(session, None)
        if context is not None:
            self.blocks -= len(context.blocks)
        return context

    def evict(self) -> bool:
        """Frees the pages of the least recently used session. False if there is none."""
        if not self._contexts:
            return False
        self.drop(next(iter(self._contexts)))
        return True
