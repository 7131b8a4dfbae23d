"""The tensors of the paged KV cache: keys and values in pages of `block_size` positions. `pages` says who uses them.

They can be kept in FP8 (e4m3, without a scale): half of the memory of bf16. They are then computed with in the model's
type, and a value beyond 448 is kept as 448.

With latent attention, one latent per position is kept for all heads: it is their key, and its first part their value
(models.latent).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rollmill.models.config import ModelConfig
from rollmill.models.kernels.quantised.fp8 import CODES

LARGEST = 448.0  # of e4m3


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
        *,
        fp8: bool = False,
    ) -> None:
        """`dtype` is that of the model."""
        self.block_size, latent = block_size, model.latent
        self.kv_heads, self.head_dim, self.value_dim = model.kv_heads, model.head_dim, model.value_dim
        if latent is not None:
            self.kv_heads, self.head_dim, self.value_dim = 1, latent.kv_rank + latent.rope_dim, latent.kv_rank
        self.group = model.heads // self.kv_heads  # query heads that share a KV head
        self.device, self.dtype = torch.device(device), dtype
        kept = CODES if fp8 else dtype
        self.spare = blocks  # one extra page that is never given out, for padding rows of a batch
        self._heads = torch.arange(self.kv_heads)
        rows = (model.layers, (blocks + 1) * self.kv_heads * block_size)
        self.keys = torch.zeros((*rows, self.head_dim), dtype=kept, device=device)
        self._kept = [self.keys]
        if latent is not None:
            self.values = self.keys[..., : self.value_dim]
        else:
            self.values = torch.zeros((*rows, self.value_dim), dtype=kept, device=device)
            self._kept.append(self.values)

    def write(self, layer: int, rows_M: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> None:
        """`rows` says where each (token, head) is written; see `rows_of`."""
        for rows, new in zip(self._kept, (k_NKD, v_NKD), strict=False):
            new = new.reshape(-1, new.shape[-1])
            if rows.dtype == CODES:
                new = new.clamp(-LARGEST, LARGEST).to(CODES)
            _moved(rows[layer]).index_copy_(0, rows_M, _moved(new))

    def read(self, layer: int, pages_P: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of pages, [pages, block_size, D] each. Here a page is that of one head; see
        `pages_of`."""
        read = [
            rows[layer].view(-1, self.block_size * rows.shape[-1]).index_select(0, pages_P).to(self.dtype)
            for rows in self._kept
        ]
        keys, *values = (rows.unflatten(1, (self.block_size, -1)) for rows in read)
        return keys, values[0] if values else keys[..., : self.value_dim]

    def clear(self, blocks: Sequence[int]) -> None:
        for rows in self._kept:
            self._by_page(rows)[:, blocks] = 0

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages, in order: (source, target) each. A target may be the source of a later pair."""
        while pairs:
            # as many as do not depend on each other are copied at once
            targets: set[int] = set()
            count = 0
            for source, target in pairs:
                if source in targets or target in targets:
                    break
                targets.add(target)
                count += 1
            sources_C, targets_C = torch.tensor(pairs[:count], device=self.device).unbind(1)
            for rows in self._kept:
                pages = self._by_page(rows)
                pages.index_copy_(1, targets_C, pages.index_select(1, sources_C))
            pairs = pairs[count:]

    def _by_page(self, rows: Tensor) -> Tensor:
        return _moved(rows).unflatten(1, (-1, self.kv_heads * self.block_size))

    def rows_of(self, blocks_N: Tensor, offsets_N: Tensor) -> Tensor:
        pages_NK = blocks_N.unsqueeze(1) * self.kv_heads + self._heads
        return (pages_NK * self.block_size + offsets_N.unsqueeze(1)).flatten()

    def pages_of(self, tables_BP: Tensor) -> Tensor:
        """The pages of block tables, ordered (sequence, head, page). Gathered, they are [B · heads, positions, D]."""
        return (tables_BP.unsqueeze(1) * self.kv_heads + self._heads.unsqueeze(1)).flatten()


def _moved(rows: Tensor) -> Tensor:
    """As bytes if they are FP8, which torch cannot move on every device."""
    return rows.view(torch.uint8) if rows.dtype == CODES else rows
