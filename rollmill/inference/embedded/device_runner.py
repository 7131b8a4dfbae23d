"""A step on CUDA: the host's data is copied once, and nothing waits for the device until tokens are drawn.

    host: tokens, positions, pages ──one copy──► plan ─► decoder, paged attention ─► logits, routes ─► sampler
                                                  ▲                                                      │
                                                  └────── burst: the drawn tokens are the next step's ───┘

Decode steps (one new position per sequence) have few shapes, because the number of sequences is rounded up to a power
of two, and so have small steps with prompts or guesses (`plans`). A decode step is recorded as a CUDA graph the second
time, another step the third time, and replayed from then on: launching a thousand kernels from Python takes several
times as long as running them. Padding rows use the spare page, which no sequence owns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollmill.inference.embedded.cache import KVCache
from rollmill.inference.embedded.decode_pass import decode_pass, fits
from rollmill.inference.embedded.generation import Generation
from rollmill.inference.embedded.kernels.paged_triton import Plan, TritonAttention, tile_positions
from rollmill.inference.embedded.kernels.sampler_triton import Steps, draw_and_move
from rollmill.inference.embedded.outputs import BurstOutput, StepOutput, fp32_logits, narrow_routes, sampled_rows
from rollmill.inference.embedded.plans import (
    MOST_GRAPHS,
    MOST_ROWS,
    RECORDED_RUN,
    Prefill,
    Shape,
    buffer,
    cut,
    drafted_shapes,
    make_plan,
    most_tokens,
    room,
    rounded,
    shape_of,
)
from rollmill.inference.embedded.sampler import Draw, sample
from rollmill.inference.embedded.scheduler import Work
from rollmill.models.decoder import Decoder
from rollmill.models.device import recording
from rollmill.types import Sampling

LONGEST_BURST = 16  # steps


class DeviceRunner:
    def __init__(self, model: Decoder, cache: KVCache, longest: int) -> None:
        """`longest` is the number of positions of the longest possible context."""
        model.attend_latents()
        self.model, self._cache, self.graphs = model, cache, model.recordable
        self.joined = True  # whether decode steps have a pass of their own (`decode_pass`)
        self._pages, self._most_tokens = -(-longest // cache.block_size), most_tokens(model.config)
        self._decodes: dict[int, _Decode] = {}  # by the number of sequences there is room for
        self._last: _Decode | None = None  # of the last burst
        self._prefills: dict[Shape, Prefill] = {}
        self._pool: Any = None  # memory shared by all graphs: only the output of the last run is read

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> StepOutput:
        if all(item.count == 1 and item.completes for item in work):
            decode = self._decode(len(work))
            decode.start([item.generation for item in work], [item.start for item in work])
            decode.step(self._graph_pool())
            assert decode.output is not None
            logits_MV, routes = decode.output
            return StepOutput(list(work), None if routes is None else routes[: len(work)], logits_MV[: len(work)])
        logits_MV, routes = self._prefill(work)
        return StepOutput(list(work), routes, logits_MV)

    def _prefill(self, work: Sequence[Work]) -> tuple[Tensor, Tensor | None]:
        """(FP32 logits of the sampled rows, routes)."""
        shape = shape_of(work, self._most_tokens)
        if shape is not None and (shape in self._prefills or len(self._prefills) < MOST_GRAPHS):
            return self._prefill_of(shape).run(work, self._graph_pool())
        plan, tile = make_plan(self._cache, work), tile_positions(self._cache.group)
        rows_M = _copied(sampled_rows(work), self._cache.device)
        output = self.model(plan.tokens_N, plan.positions_N, TritonAttention(self._cache, plan, tile, self.model.exact))
        logits_MV = fp32_logits(self.model, output.hidden.index_select(0, rows_M))
        return logits_MV, narrow_routes(output.routes, self.model.config)

    def _prefill_of(self, shape: Shape) -> Prefill:
        if shape not in self._prefills:
            self._prefills[shape] = Prefill(self.model, self._cache, shape, self._pages)
        return self._prefills[shape]

    @torch.inference_mode()
    def launch(
        self, rows: Sequence[Generation | None], starts: Sequence[int] | None, steps: int
    ) -> Callable[[], BurstOutput]:
        if starts is not None:
            self._last = self._decode(len(rows))
            self._last.start(rows, starts)
        else:
            assert self._last is not None
            self._last.go_on(rows)
        self._last.begin()
        for _ in range(steps):
            self._last.step(self._graph_pool())
        return self._last.fetch(len(rows), steps)

    @torch.inference_mode()
    def warm_up(self, rows: int, tokens: int, guessed: int) -> None:
        for power in range((rows - 1).bit_length() + 1):
            self.launch([None] * (1 << power), [0] * (1 << power), 2)()
        counts = (tokens, tokens * 3 // 4, tokens // 2, tokens // 4)
        shapes = {rounded(count, MOST_ROWS) for count in counts if 0 < count <= self._most_tokens}
        for shape in shapes | drafted_shapes(min(guessed, self._most_tokens)):
            prefill = self._prefill_of(shape)
            for _ in range(RECORDED_RUN):
                prefill.run([], self._graph_pool())
        for count in (2, 16) if guessed else ():  # the sampler is compiled for multiples of 16, and for other numbers
            logits_MV = torch.zeros(count, self.model.config.vocab_size, device=self._cache.device)
            sample(logits_MV, [Draw(Sampling(), 0, 1)] * count)

    def _graph_pool(self) -> Any:
        """None if steps are not recorded."""
        if self.graphs and self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def _decode(self, rows: int) -> _Decode:
        size = 1 << (rows - 1).bit_length()
        if size not in self._decodes:
            self._decodes[size] = _Decode(self.model, self._cache, size, self._pages, self.joined)
        return self._decodes[size]


def _copied(rows: list[int], device: torch.device) -> Tensor:
    """int64, from pinned memory: so the copy waits for nothing that was launched before."""
    host = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


class _Host:
    """The host's copy of what a burst is given. There are two of them: one may still be read by the device."""

    def __init__(self, layout: Sequence[tuple[int, ...]], spare: int) -> None:
        self.buffer, parts = buffer(layout)
        self.step, self.tokens_B, self.positions_B, self.tiles_B4, sequences_B, self.tables_BP, self.lasts_B = parts[:7]
        self.temperatures_B, self.seeds_B = parts[7].view(np.float32), parts[8].view(np.int64)
        size = len(sequences_B)
        sequences_B[:] = np.arange(size)
        self.tiles_B4[:] = np.stack([np.arange(size), np.ones(size), np.zeros(size), np.arange(size)], 1)
        for part in (self.step, self.tokens_B, self.positions_B, self.lasts_B, self.temperatures_B, self.seeds_B):
            part[:] = 0
        self.tables_BP[:] = spare
        self._spare = spare
        # per row of the table: the list of pages and how many are written (a generation's list only grows)
        self._written: list[tuple[list[int] | None, int]] = [(None, 0)] * size

    def fill(self, rows: Sequence[Generation | None]) -> None:
        """Writes pages and sampling of all rows. A row of None writes to the spare page and stays at position 0."""
        for row, one in enumerate(rows):
            held, count = self._written[row]
            blocks = None if one is None else one.blocks
            if held is blocks and (blocks is None or count == len(blocks)):
                continue
            if held is not blocks:
                count = 0
                self.tables_BP[row] = self._spare
                self.lasts_B[row] = 0 if one is None else one.limit - 1
                self.temperatures_B[row] = 0.0 if one is None else one.request.sampling.temperature
                self.seeds_B[row] = 0 if one is None else np.uint64(one.seed).astype(np.int64)
            if blocks is not None:
                self.tables_BP[row, count : len(blocks)] = blocks[count:]
            self._written[row] = blocks, 0 if blocks is None else len(blocks)
        for row in range(len(rows), len(self._written)):
            if self._written[row][0] is not None:
                self.tables_BP[row], self.lasts_B[row], self._written[row] = self._spare, 0, (None, 0)


class _Output(NamedTuple):
    logits_MV: Tensor
    routes: Tensor | None


class _Decode:
    """Steps of up to `size` sequences with one new position each, in memory that does not move."""

    def __init__(self, model: Decoder, cache: KVCache, size: int, pages: int, joined: bool = True) -> None:
        self._model, device = model, model.embedding.device
        # what a step changes comes first: a burst that goes on after another one is given only the rest
        layout = [(2,), (size,), (size,), (size, 4), (size,), (size, pages), (size,), (size,), (2 * size,)]
        self._hosts = [_Host(layout, cache.spare) for _ in range(2)]
        self._device = torch.empty(self._hosts[0].buffer.shape, dtype=torch.int32, device=device)
        self._state = sum(room(shape) for shape in layout[:4])
        step, tokens_B, positions_B, tiles_B4, sequences_B, tables_BP, lasts_B, temperatures_B, seeds_B = cut(
            self._device, layout
        )
        self._plan = Plan(tokens_B, positions_B, sequences_B, tiles_B4, tables_BP)
        self._attend = TritonAttention(cache, self._plan, 1, model.exact)
        self._cache, self._joined = cache, joined and fits(model)
        pinned = torch.cuda.is_available()
        drawn = (2, LONGEST_BURST, size)  # tokens, and the bits of log-probs
        self._drawn = torch.empty(drawn, dtype=torch.int32, device=device)
        self._fetched = [torch.empty(drawn, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._steps = Steps(
            seeds_B.view(torch.int64), temperatures_B.view(torch.float32), tokens_B, positions_B, lasts_B, tiles_B4,
            step.view(torch.int64), self._drawn[0], self._drawn[1].view(torch.float32),
        )  # fmt: skip
        self._routes: Tensor | None = None  # [K, B, moe layers, k]
        self._fetched_routes: list[Tensor] = []
        self._turn, self._runs = 0, 0
        self._begun: torch.cuda.Event | None = None
        self._graph: Any = None
        self.output: _Output | None = None  # of the last step

    def start(self, rows: Sequence[Generation | None], starts: Sequence[int]) -> None:
        """The next steps compute the position `starts` of each row, and go on from there."""
        host = self._next_host(rows)
        host.tokens_B[: len(rows)] = [
            0 if one is None else one.tokens[start] for one, start in zip(rows, starts, strict=True)
        ]
        host.positions_B[: len(rows)] = starts
        host.tokens_B[len(rows) :] = host.positions_B[len(rows) :] = 0
        host.tiles_B4[:, 2] = host.positions_B
        self._device.copy_(host.buffer, non_blocking=True)

    def go_on(self, rows: Sequence[Generation | None]) -> None:
        """The next steps go on where the last one ended."""
        host = self._next_host(rows)
        self._device[self._state :].copy_(host.buffer[self._state :], non_blocking=True)
        self._steps.step.zero_()

    def _next_host(self, rows: Sequence[Generation | None]) -> _Host:
        self._turn ^= 1
        self._hosts[self._turn].fill(rows)
        return self._hosts[self._turn]

    def step(self, pool: Any) -> None:
        """Runs one step. It overwrites the output of the step before."""
        self._runs += 1
        if self._graph is not None:
            self._graph.replay()
        elif pool is None or self._runs == 1:
            self.output = self._forward()
        else:
            graph = torch.cuda.CUDAGraph()
            with recording(graph, pool):
                self.output = self._forward()
            self._graph = graph
            graph.replay()

    def _forward(self) -> _Output:
        if self._joined:
            output = decode_pass(self._model, self._cache, self._plan)
        else:
            output = self._model(self._plan.tokens_N, self._plan.positions_N, self._attend)
        logits_MV = fp32_logits(self._model, output.hidden)
        routes = narrow_routes(output.routes, self._model.config)
        if routes is not None:
            self._keep_routes(routes)
        draw_and_move(logits_MV, self._steps)
        return _Output(logits_MV, routes)

    def _keep_routes(self, routes: Tensor) -> None:
        if self._routes is None:
            shape = (LONGEST_BURST, *routes.shape)
            self._routes = torch.empty(shape, dtype=routes.dtype, device=routes.device)
            pinned = routes.is_cuda
            self._fetched_routes = [torch.empty(shape, dtype=routes.dtype, pin_memory=pinned) for _ in range(2)]
        self._routes.index_copy_(0, self._steps.step, routes.unsqueeze(0))

    def begin(self) -> None:
        """A burst begins: its time is measured from here."""
        self._begun = self._event()

    def _event(self) -> torch.cuda.Event | None:
        if not self._device.is_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def fetch(self, rows: int, steps: int) -> Callable[[], BurstOutput]:
        """Copies the draws of the last `steps` steps to the host. The result waits for the copy."""
        drawn = self._fetched[self._turn]
        drawn.copy_(self._drawn, non_blocking=True)
        routes: Tensor | None = None
        if self._routes is not None:
            routes = self._fetched_routes[self._turn][:steps]
            routes.copy_(self._routes[:steps], non_blocking=True)
        begun, ended = self._begun, self._event()

        def wait() -> BurstOutput:
            seconds = 0.0
            if begun is not None and ended is not None:
                ended.synchronize()
                seconds = begun.elapsed_time(ended) / 1000
            tokens_KB, logprobs_KB = drawn[0, :steps, :rows].numpy(), drawn[1, :steps, :rows].numpy()
            own = None if routes is None else routes[:, :rows].numpy()
            return BurstOutput(
                tokens_KB,
                logprobs_KB.view(np.float32),
                own if own is None or own.dtype == np.uint8 else own.view(np.uint16),
                seconds,
            )

        return wait
