"""A step on CUDA: the host's data is copied once, and nothing waits for the device until tokens are drawn.

    host: tokens, positions, pages ──one copy──► plan ─► decoder, paged attention ─► logits, routes ─► sampler

Decode steps (one new position per sequence) have few shapes, because the number of sequences is rounded up to a power
of two. Such a step is recorded as a CUDA graph the second time and replayed from then on: launching a thousand kernels
from Python takes several times as long as running them. Padding rows use the spare page, which no sequence owns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollmill.inference.embedded.cache import KVCache
from rollmill.inference.embedded.paged_triton import Plan, TritonAttention, tile_positions
from rollmill.inference.embedded.runner import StepOutput, fp32_logits, narrow_routes, sampled_rows
from rollmill.inference.embedded.sampler import needs_host, sample_uncut, uniform
from rollmill.inference.embedded.scheduler import Work
from rollmill.models.decoder import Decoder
from rollmill.models.device import uncollected


class DeviceRunner:
    def __init__(self, model: Decoder, cache: KVCache, longest: int) -> None:
        """`longest` is the number of positions of the longest possible context."""
        self.model = model
        self._cache, self.graphs = cache, model.recordable
        self._pages = -(-longest // cache.block_size)
        self._decodes: dict[int, _Decode] = {}  # by the number of sequences there is room for
        self._pool: Any = None  # memory shared by all graphs: only the output of the last run is read

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> StepOutput:
        if all(item.count == 1 and item.completes for item in work):
            return self._decode(list(work))
        plan = _plan(self._cache, work)
        output = self.model(
            plan.tokens_N, plan.positions_N, TritonAttention(self._cache, plan, self._tile, self.model.exact)
        )
        rows_M = np.array(sampled_rows(work), dtype=np.int64)
        hidden_MW = output.hidden.index_select(0, torch.from_numpy(rows_M).to(output.hidden.device, non_blocking=True))
        return StepOutput(
            list(work), narrow_routes(output.routes, self.model.config), fp32_logits(self.model, hidden_MW)
        )

    @property
    def _tile(self) -> int:
        return tile_positions(self._cache.group)

    def _decode(self, work: list[Work]) -> StepOutput:
        room = 1 << (len(work) - 1).bit_length()
        if room not in self._decodes:
            self._decodes[room] = _Decode(self.model, self._cache, room, self._pages)
        decode = self._decodes[room]
        decode.fill(work)
        if self.graphs and decode.runs == 1:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            decode.record(self._pool)
        logits_MV, routes, drawn_M2 = decode.run()
        drawn = None if any(needs_host(item.generation.request.sampling) for item in work) else drawn_M2[: len(work)]
        return StepOutput(work, None if routes is None else routes[: len(work)], logits_MV[: len(work)], drawn)


class _Output(NamedTuple):
    logits_MV: Tensor
    routes: Tensor | None
    drawn_M2: Tensor


class _Decode:
    """Steps of up to `room` sequences with one new position each, in memory that does not move."""

    def __init__(self, model: Decoder, cache: KVCache, room: int, pages: int) -> None:
        self._model, self._spare = model, cache.spare
        device = model.embedding.device
        layout = _layout(room, room, room, pages)
        self._host, host = _buffer(layout)
        self._tokens_B, self._positions_B, sequences_B, self._tiles_B4, self._tables_BP = host
        sequences_B[:] = np.arange(room)
        self._tiles_B4[:] = np.stack([np.arange(room), np.ones(room), np.zeros(room), np.arange(room)], 1)
        self._tables_BP[:] = self._spare
        self._device = torch.empty(self._host.shape, dtype=torch.int32, device=device)
        self._sampling_2B = torch.zeros((2, room), dtype=torch.float64, pin_memory=torch.cuda.is_available())
        self._device_sampling_2B = torch.empty((2, room), dtype=torch.float64, device=device)
        self._plan = Plan(*_cut(self._device, layout))
        self._attend = TritonAttention(cache, self._plan, 1, model.exact)
        # per row of the table: the list of pages and how many are written (a generation's list only grows)
        self._written: list[tuple[list[int], int]] = [([], 0)] * room
        self._graph: Any = None
        self._output: _Output | None = None
        self.runs = 0

    def fill(self, work: Sequence[Work]) -> None:
        """Writes the host's data. The last step's copy has ended, because its tokens were waited for."""
        for row, item in enumerate(work):
            blocks = item.generation.blocks
            held, count = self._written[row]
            if held is not blocks:
                count = 0
            self._tables_BP[row, count : len(blocks)] = blocks[count:]
            self._written[row] = blocks, len(blocks)
        self._tokens_B[: len(work)] = [item.generation.tokens[item.start] for item in work]
        self._positions_B[: len(work)] = [item.start for item in work]
        filling = slice(len(work), None)
        self._tables_BP[filling, 0], self._tokens_B[filling], self._positions_B[filling] = self._spare, 0, 0
        self._written[filling] = [([], 0)] * (len(self._written) - len(work))
        self._tiles_B4[:, 2] = self._positions_B
        draws = [item.draw for item in work]
        sampling_2B = self._sampling_2B.numpy()
        sampling_2B[0, : len(work)] = [draw.sampling.temperature for draw in draws]
        sampling_2B[1, : len(work)] = uniform([draw.seed for draw in draws], [draw.position for draw in draws])

    def record(self, pool: Any) -> None:
        graph = torch.cuda.CUDAGraph()
        # other threads may prepare weights meanwhile; that is not recorded
        with uncollected(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._output = self._forward()
        self._graph = graph

    def run(self) -> _Output:
        """Runs the step. The next step overwrites the output."""
        self.runs += 1
        self._device.copy_(self._host, non_blocking=True)
        self._device_sampling_2B.copy_(self._sampling_2B, non_blocking=True)
        if self._graph is None:
            return self._forward()
        assert self._output is not None
        self._graph.replay()
        return self._output

    def _forward(self) -> _Output:
        output = self._model(self._plan.tokens_N, self._plan.positions_N, self._attend)
        logits_MV = fp32_logits(self._model, output.hidden)
        drawn_M2 = sample_uncut(logits_MV, *self._device_sampling_2B)
        return _Output(logits_MV, narrow_routes(output.routes, self._model.config), drawn_M2)


def _plan(cache: KVCache, work: Sequence[Work]) -> Plan:
    """The plan for any work: every context is cut into tiles."""
    tokens = sum(item.count for item in work)
    size = tile_positions(cache.group)
    tiles = sum(-(-item.count // size) for item in work)
    pages = max(-(-(item.start + item.count) // cache.block_size) for item in work)
    layout = _layout(tokens, tiles, len(work), pages)
    host, (tokens_N, positions_N, sequences_N, tiles_T4, tables_SP) = _buffer(layout)
    tables_SP[:] = cache.spare
    first = tile = 0
    for row, item in enumerate(work):
        end, blocks = item.start + item.count, item.generation.blocks[:pages]
        tokens_N[first : first + item.count] = item.tokens
        positions_N[first : first + item.count] = np.arange(item.start, end)
        sequences_N[first : first + item.count] = row
        tables_SP[row, : len(blocks)] = blocks
        for offset in range(0, item.count, size):
            tiles_T4[tile] = first + offset, min(size, item.count - offset), item.start + offset, row
            tile += 1
        first += item.count
    return Plan(*_cut(host.to(cache.device, non_blocking=True), layout))


def _layout(tokens: int, tiles: int, sequences: int, pages: int) -> list[tuple[int, ...]]:
    """The shapes of a plan's tensors."""
    return [(tokens,), (tokens,), (tokens,), (tiles, 4), (sequences, pages)]


def _buffer(layout: Sequence[tuple[int, ...]]) -> tuple[Tensor, list[np.ndarray]]:
    """Pinned host memory, and its parts as arrays."""
    size = sum(_room(shape) for shape in layout)
    host = torch.empty(size, dtype=torch.int32, pin_memory=torch.cuda.is_available())
    return host, [part.numpy() for part in _cut(host, layout)]


def _cut(buffer: Tensor, layout: Sequence[tuple[int, ...]]) -> list[Tensor]:
    parts = buffer.split([_room(shape) for shape in layout])
    return [part[: math.prod(shape)].view(shape) for part, shape in zip(parts, layout, strict=True)]


def _room(shape: tuple[int, ...]) -> int:
    """Rounded up to 16 bytes: kernels are compiled again for addresses that are not multiples of 16."""
    return -(-math.prod(shape) // 4) * 4
