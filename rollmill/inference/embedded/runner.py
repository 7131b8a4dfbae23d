"""One forward pass of the decoder over all work of a step: new prompts, suffixes and single tokens.

They are packed into one batch. Only attention looks at sequences, in groups of similar shape, so that little is padded.
This runs on any device; on CUDA, `device_runner` does the same with its own kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rollmill.inference.embedded.cache import KVCache
from rollmill.inference.embedded.outputs import StepOutput, StepRunner, fp32_logits, narrow_routes, sampled_rows
from rollmill.inference.embedded.scheduler import Work
from rollmill.models.decoder import Decoder
from rollmill.models.exact_attention import Keys
from rollmill.models.exact_attention import attend as attend_exactly
from rollmill.models.triton import has_triton


def make_runner(model: Decoder, cache: KVCache, longest: int) -> StepRunner:
    """`longest` is the number of positions of the longest possible context."""
    if not has_triton(cache.device):
        return Runner(model, cache)
    from rollmill.inference.embedded.device_runner import DeviceRunner

    return DeviceRunner(model, cache, longest)


class Runner:
    def __init__(self, model: Decoder, cache: KVCache) -> None:
        model.attend_latents()
        self.model, self._cache = model, cache

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> StepOutput:
        computed = sorted((item for item in work if item.twin_of is None), key=self._shape)
        tokens = [token for item in computed for token in item.tokens]
        attend: PagedAttention | ExactPagedAttention
        if self.model.exact:
            attend = ExactPagedAttention(self._cache, computed)
        else:
            attend = PagedAttention(self._cache, [list(group) for _, group in itertools.groupby(computed, self._shape)])
        device = self._cache.device
        output = self.model(torch.tensor(tokens, device=device), attend.positions, attend)
        ordered = _with_twins(computed, work)
        rows = torch.tensor(sampled_rows(ordered), dtype=torch.long, device=device)
        hidden_MW = output.hidden.index_select(0, rows)
        return StepOutput(ordered, narrow_routes(output.routes, self.model.config), fp32_logits(self.model, hidden_MW))

    def _shape(self, item: Work) -> tuple[int, int]:
        """Work of the same shape is padded together: within a factor of two in new positions and in pages."""
        pages = -(-(item.start + item.count) // self._cache.block_size)
        return (item.count - 1).bit_length(), (pages - 1).bit_length()


def _with_twins(computed: Sequence[Work], work: Sequence[Work]) -> list[Work]:
    """Each work, followed by its twins."""
    twins = [item for item in work if item.twin_of is not None]
    return [one for item in computed for one in (item, *(twin for twin in twins if twin.twin_of is item.generation))]


class PagedAttention:
    """Writes the new keys and values into their pages, then attends over each sequence's pages."""

    def __init__(self, cache: KVCache, groups: Sequence[Sequence[Work]]) -> None:
        self._cache = cache
        self._groups = [_Group(cache, group) for group in groups]
        self._sizes = [group.tokens for group in self._groups]
        self.positions = torch.cat([group.positions for group in self._groups]).to(cache.device)
        self._rows = torch.cat([group.rows for group in self._groups]).to(cache.device)

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        self._cache.write(layer, self._rows, k_NKD, v_NKD)
        queries = q_NHD.reshape(q_NHD.shape[0], -1).split(self._sizes)
        return torch.cat([group.attend(layer, q_NW) for group, q_NW in zip(self._groups, queries, strict=True)])


class _Group:
    """B sequences padded together, with up to Q new positions each, over up to P pages."""

    def __init__(self, cache: KVCache, group: Sequence[Work]) -> None:
        self._cache = cache
        size, counts = cache.block_size, np.array([item.count for item in group])
        starts = np.array([item.start for item in group])
        longest = int(counts.max())
        pages = -(-int((starts + counts).max()) // size)
        tables_BP = _block_tables(group, pages)
        # padded query slots repeat the last real one, and their output is dropped
        slots_BQ = np.minimum(np.arange(longest), (counts - 1)[:, None])
        positions_BQ = starts[:, None] + slots_BQ
        real_BQ = np.arange(longest) < counts[:, None]
        self.tokens = int(counts.sum())
        self.positions = torch.from_numpy(positions_BQ[real_BQ])
        blocks_BQ = np.take_along_axis(tables_BP, positions_BQ // size, axis=1)
        self.rows = cache.rows_of(torch.from_numpy(blocks_BQ[real_BQ]), self.positions % size)
        self._pages = cache.pages_of(torch.from_numpy(tables_BP)).to(cache.device)
        hidden_BQT = torch.from_numpy(np.arange(pages * size) > positions_BQ[:, :, None])
        mask_BQT = torch.zeros(hidden_BQT.shape, dtype=cache.dtype).masked_fill_(hidden_BQT, -torch.inf)
        mask_BQT = mask_BQT.to(cache.device)
        self._mask_B1QT = mask_BQT.repeat(1, cache.group, 1).unsqueeze(
            1
        )  # Q is query heads per KV head times positions
        self._padding: tuple[Tensor, Tensor] | None = None
        if not real_BQ.all():
            source_BQ = (np.cumsum(counts) - counts)[:, None] + slots_BQ
            padding = torch.from_numpy(source_BQ.ravel()), torch.from_numpy(np.flatnonzero(real_BQ))
            self._padding = padding[0].to(cache.device), padding[1].to(cache.device)
        self._shape = (len(group), longest)

    def attend(self, layer: int, q_NW: Tensor) -> Tensor:
        batch, longest = self._shape
        heads, dim = self._cache.kv_heads, self._cache.head_dim
        if self._padding is not None:
            q_NW = q_NW.index_select(0, self._padding[0])
        # query heads that share a KV head become further query rows, so K and V are not copied
        q = q_NW.view(batch, longest, heads, -1, dim).permute(0, 2, 3, 1, 4)
        k, v = (each.unflatten(0, (batch, heads, -1)).flatten(2, 3) for each in self._cache.read(layer, self._pages))
        out = scaled_dot_product_attention(q.reshape(batch, heads, -1, dim), k, v, attn_mask=self._mask_B1QT)
        out = out.view(batch, heads, -1, longest, self._cache.value_dim).permute(0, 3, 1, 2, 4)
        out_NW = out.reshape(batch * longest, -1)
        return out_NW if self._padding is None else out_NW.index_select(0, self._padding[1])


class ExactPagedAttention:
    """The same with the trainer's bits, without padding and without copies of pages (models.exact_attention)."""

    def __init__(self, cache: KVCache, work: Sequence[Work]) -> None:
        self._cache, size = cache, cache.block_size
        counts = np.array([item.count for item in work])
        pages = -(-max(item.start + item.count for item in work) // size)
        tables_BP = _block_tables(work, pages)
        sequences_N = np.repeat(np.arange(len(work)), counts)
        positions_N = np.concatenate([np.arange(item.start, item.start + item.count) for item in work])
        self.positions = torch.from_numpy(positions_N)
        blocks_N = torch.from_numpy(tables_BP[sequences_N, positions_N // size])
        self._rows = cache.rows_of(blocks_N, self.positions % size)
        firsts_BP = tables_BP * (cache.kv_heads * size)
        self._where = Keys(sequences_N, positions_N + 1, firsts_BP, size, head_step=size, key_step=1)

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        cache = self._cache
        cache.write(layer, self._rows, k_NKD, v_NKD)
        return attend_exactly(q_NHD, cache.keys[layer], cache.values[layer], cache.kv_heads, self._where)


def _block_tables(group: Sequence[Work], pages: int) -> np.ndarray:
    """int64 [B, P]. Sequences with fewer pages are padded with page 0, which the mask hides."""
    tables_BP = np.zeros((len(group), pages), dtype=np.int64)
    for row, item in enumerate(group):
        blocks = item.generation.blocks[:pages]
        tables_BP[row, : len(blocks)] = blocks
    return tables_BP
