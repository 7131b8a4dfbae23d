"""The plan of a step on CUDA, from the host's side: which tokens, where their keys go, which tiles attend.

All parts are in one buffer, so that one copy brings them to the device. `Prefill` keeps such buffers for one shape, so
that a step of that shape can be recorded as a CUDA graph: tokens, sequences and sampled rows are rounded up. Padding
tokens are one more sequence, which has only the spare page; padding tiles have no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollmill.inference.embedded.cache import KVCache
from rollmill.inference.embedded.kernels.paged_triton import Plan, TritonAttention, tile_positions
from rollmill.inference.embedded.outputs import fp32_logits, narrow_routes, sampled_rows
from rollmill.inference.embedded.pages import token_bytes
from rollmill.inference.embedded.scheduler import Work
from rollmill.models.config import ModelConfig
from rollmill.models.counts import active_parameters
from rollmill.models.decoder import Decoder
from rollmill.models.device import recording

MOST_ROWS, MOST_GRAPHS = 128, 32  # of a recorded step: sequences and sampled rows; and the most such steps
RECORDED_RUN = 3  # of a shape; many shapes never return
_LAUNCH_SECONDS, _OPERATIONS = 2e-3, 4e14  # of a layer's launches from Python, while other threads run; per second


class Shape(NamedTuple):
    """What a recorded step has room for."""

    tokens: int
    sequences: int
    rows: int  # after which tokens are drawn: one per sequence, and one per guess


def make_plan(cache: KVCache, work: Sequence[Work]) -> Plan:
    """The plan for any work: every context is cut into tiles."""
    tokens, size = sum(item.count for item in work), tile_positions(cache.group)
    tiles = sum(-(-item.count // size) for item in work)
    pages = max(-(-(item.start + item.count) // cache.block_size) for item in work)
    layout = _layout(tokens, tiles, len(work), pages)
    host, parts = buffer(layout)
    _fill(parts, work, size, cache.spare)
    return Plan(*cut(host.to(cache.device, non_blocking=True), layout))


def most_tokens(model: ModelConfig) -> int:
    """Of a step that is worth recording: the device is not busy for as long as launching it takes."""
    most = model.layers * _LAUNCH_SECONDS * _OPERATIONS / (2 * active_parameters(model))
    return min(16384, int(most))


def shape_of(work: Sequence[Work], most: int) -> Shape | None:
    """Of the recorded step that has room for `work`. None if it has more than `most` tokens, or too many sequences."""
    tokens, sequences, guesses = sum(item.count for item in work), len(work), sum(len(item.drafts) for item in work)
    if tokens > most or sequences + guesses > MOST_ROWS:
        return None
    return rounded(tokens, sequences, guesses)


def rounded(tokens: int, sequences: int, guesses: int = 0) -> Shape:
    """Few shapes, so that they return soon: tokens are a power of two or three quarters of it; sequences and rows 1,
    16, or MOST_ROWS. There are as many rows as sequences, unless tokens are guessed: then always 16 sequences."""
    power = max(32, 1 << (tokens - 1).bit_length())
    held, rows = (
        next(size for size in (1, 16, MOST_ROWS) if count <= size)
        for count in (max(sequences, 2) if guesses else sequences, sequences + guesses)
    )
    return Shape(power * 3 // 4 if tokens <= power * 3 // 4 else power, held, rows)


def drafted_shapes(positions: int) -> set[Shape]:
    """Of all steps with guesses and without prompts that have up to `positions` positions."""
    return {rounded(count, 1, count - 1) for count in range(2, positions + 1)}


class Prefill:
    """Steps that `shape` has room for, in memory that does not move."""

    def __init__(self, model: Decoder, cache: KVCache, shape: Shape, pages: int) -> None:
        self._model, self._spare, self._size = model, cache.spare, tile_positions(cache.group)
        pages = max(pages, -(-self._size // cache.block_size))  # a tile of padding has that many
        tiles = shape.tokens // self._size + shape.sequences + 1
        layout = [*_layout(shape.tokens, tiles, shape.sequences + 1, pages), (shape.rows,)]
        self._host, self._parts = buffer(layout)
        self._device = torch.empty(self._host.shape, dtype=torch.int32, device=cache.device)
        *plan, self._rows_M = cut(self._device, layout)
        self._plan = Plan(*plan)
        self._attend = TritonAttention(cache, self._plan, self._size, model.exact)
        self._copied: Any = torch.cuda.Event() if cache.device.type == "cuda" else None
        self._graph: Any = None
        self._output: tuple[Tensor, Tensor | None] | None = None
        self._runs = 0

    def run(self, work: Sequence[Work], pool: Any) -> tuple[Tensor, Tensor | None]:
        """(FP32 logits of the sampled rows, routes of all positions). The next run overwrites them."""
        if self._copied is not None:
            self._copied.synchronize()  # the last plan may still be on its way
        *plan, rows_M = self._parts
        _fill(plan, work, self._size, self._spare)
        rows = sampled_rows(work)
        rows_M[:] = 0
        rows_M[: len(rows)] = rows
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        logits_MV, routes = self._step(pool)
        tokens = sum(item.count for item in work)
        return logits_MV[: len(rows)], None if routes is None else routes[:tokens]

    def _step(self, pool: Any) -> tuple[Tensor, Tensor | None]:
        self._runs += 1
        if pool is None or self._runs < RECORDED_RUN:
            return self._forward()
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with recording(graph, pool):
                self._output = self._forward()
            self._graph = graph
        assert self._output is not None
        self._graph.replay()
        return self._output

    def _forward(self) -> tuple[Tensor, Tensor | None]:
        output = self._model(self._plan.tokens_N, self._plan.positions_N, self._attend)
        logits_MV = fp32_logits(self._model, output.hidden.index_select(0, self._rows_M))
        return logits_MV, narrow_routes(output.routes, self._model.config)


def _fill(parts: Sequence[np.ndarray], work: Sequence[Work], size: int, spare: int) -> None:
    """Writes the plan of `work`, with tiles of `size` positions; what is left of the parts is padding."""
    tokens_N, positions_N, sequences_N, tiles_T4, tables_SP = parts
    total = sum(item.count for item in work)
    padding = [(0, len(tokens_N) - total, len(tables_SP) - 1)] if len(tokens_N) > total else []
    spans = [(item.start, item.count, row) for row, item in enumerate(work)] + padding
    starts, counts, sequences = np.array(spans).T
    firsts, span = np.cumsum(counts) - counts, np.repeat(np.arange(len(spans)), counts)
    tokens_N[:total] = np.frombuffer(b"".join(token_bytes(item.tokens) for item in work), np.int32)
    positions_N[:] = np.arange(len(tokens_N)) + (starts - firsts)[span]
    tokens_N[total:] = positions_N[total:] = 0
    sequences_N[:] = sequences[span]
    each = -(-counts // size)  # tiles
    of = np.repeat(np.arange(len(spans)), each)
    offset = (np.arange(len(of)) - (np.cumsum(each) - each)[of]) * size
    lengths = np.minimum(size, counts[of] - offset)
    own = np.stack([firsts[of] + offset, lengths, np.where(of < len(work), starts[of] + offset, 0), sequences[of]], 1)
    # the tile that walks over the most keys begins first: alone at the end, it would keep all others waiting
    tiles_T4[: len(own)], tiles_T4[len(own) :] = own[np.argsort(-own[:, 2], kind="stable")], 0
    tables_SP[:] = spare
    for number, item in enumerate(work):
        blocks = item.generation.blocks[: tables_SP.shape[1]]
        tables_SP[number, : len(blocks)] = blocks


def _layout(tokens: int, tiles: int, sequences: int, pages: int) -> list[tuple[int, ...]]:
    """The shapes of a plan's tensors."""
    return [(tokens,), (tokens,), (tokens,), (tiles, 4), (sequences, pages)]


def buffer(layout: Sequence[tuple[int, ...]]) -> tuple[Tensor, list[np.ndarray]]:
    """Pinned host memory, and its parts as arrays."""
    size = sum(room(shape) for shape in layout)
    host = torch.empty(size, dtype=torch.int32, pin_memory=torch.cuda.is_available())
    return host, [part.numpy() for part in cut(host, layout)]


def cut(whole: Tensor, layout: Sequence[tuple[int, ...]]) -> list[Tensor]:
    parts = whole.split([room(shape) for shape in layout])
    return [part[: math.prod(shape)].view(shape) for part, shape in zip(parts, layout, strict=True)]


def room(shape: tuple[int, ...]) -> int:
    """Rounded up to 16 bytes: kernels are compiled again for addresses that are not multiples of 16."""
    return -(-math.prod(shape) // 4) * 4
