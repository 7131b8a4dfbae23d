"""vLLM as an Engine. Its server is another process (`process`); this class decides what it works on.

    waiting ── start ──► a leg: one stream from the server, under one policy ── finish ──► done
       ▲                        │
       └────── interrupted ─────┘    by new weights, by a pause, or by production that needs the place

The server names its weights only at the end of a stream (`client` checks it), so no leg outlives its policy: before
weights change, the server stops and every leg is closed. Later a leg goes on from the tokens that arrived. Tokens on
their way are lost, whatever they are, and drawn again. The context is computed again, so every token attends to keys
and values of its own policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import Future
from typing import Any

from rollmill.errors import EngineError, WeightsError
from rollmill.histogram import Histogram
from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.activity import Activity
from rollmill.inference.engine import (
    Capabilities,
    Engine,
    EngineBusy,
    EngineUnavailable,
    GenerateChunk,
    GenerateRequest,
    WeightSwitch,
    check_request,
)
from rollmill.inference.vllm.generation import Generation
from rollmill.inference.vllm.handover import Handover
from rollmill.inference.vllm.vllm_client import Client
from rollmill.models.config import ModelConfig
from rollmill.types import FinishReason, PolicyRef, same_line
from rollmill.weights.reading.line_follower import Update


class VllmEngine(Engine):
    """An async context manager. Until the first `apply`, requests wait. All methods run in the event loop's thread."""

    capabilities = Capabilities("vllm", routes=False, grammars=False, seeds_by_position=False, keeps_cache=False)

    def __init__(
        self,
        server: Client,
        model: ModelConfig,
        config: EngineConfig,
        *,
        name: str = "engine",
        region: str = "home",
        ended: Future[None] | None = None,
    ) -> None:
        """`ended`: done when the server process has ended, with the error."""
        self.name, self.region = name, region
        self.ended = ended or Future()
        self._server, self._model, self._config = server, model, config
        self._limit = min(model.max_context, config.cache_tokens)
        self._handover = Handover(server.directory)
        self._activity = Activity(name, region)
        self._policy: PolicyRef | None = None
        self._paused = self._draining = False
        self._closed = False  # while weights change, no leg starts
        self._changing = asyncio.Lock()
        self._waiting: dict[int, Generation] = {}
        self._running: dict[int, Generation] = {}
        self._legs: dict[int, asyncio.Task[None]] = {}
        self._requests = self._preemptions = 0

    async def __aenter__(self) -> VllmEngine:
        await self._server.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        await self._interrupt_all()
        for one in list(self._waiting.values()):
            self._forget(one)
            one.deliver(EngineUnavailable("the engine is shutting down"))
        await self._server.close()

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncGenerator[GenerateChunk, None]:
        check_request(request, self._model.vocab_size)
        if request.sampling.grammar is not None:
            raise EngineError("this engine has no grammars", hint="ask without a format of the output")
        if len(request.tokens) >= self._limit:
            yield GenerateChunk([], [], [], [], finish="length")  # no room for a token: that is data, not an error
            return
        chunks: asyncio.Queue[GenerateChunk | Exception] = asyncio.Queue()
        generation = self._add(request, stream, chunks)
        finish = None
        try:
            while finish is None:
                chunk = await chunks.get()
                if isinstance(chunk, Exception):
                    raise chunk
                finish = chunk.finish
                yield chunk
        finally:
            if self._forget(generation):  # the client went away
                self._activity.finished("abort")
                self._fill()

    async def apply(self, update: Update) -> WeightSwitch:
        """The server's workers read all weights from a file, which is written beside decoding."""
        policy = update.policy
        async with self._changing:
            async with self._handover.written(update) as path:
                await self._server.ready()
                started = time.monotonic()
                running = await self._stop()
                self._policy = None  # until all weights are there, the parameters are of no version
                try:
                    await self._server.load(path, _label(policy))
                except EngineError as error:
                    raise WeightsError(f"{policy.line}@{policy.number} was not loaded: {error.message}") from error
            self._policy = policy
            self._refuse_other_lines(policy)
            await self._go_on()
            seconds = time.monotonic() - started
            self._activity.applied(seconds)
            return WeightSwitch(seconds, running)

    async def pause(self) -> None:
        """Once this returns, no token is computed. Requests are kept."""
        async with self._changing:
            await self._stop()
            self._paused = True

    async def drain(self) -> None:
        self._draining = True

    async def resume(self) -> None:
        async with self._changing:
            self._paused = self._draining = False
            await self._go_on()

    def health(self) -> dict[str, Any]:
        return {
            "engine": self.name,
            "region": self.region,
            "policy": None if self._policy is None else vars(self._policy),
            "running": len(self._running),
            "waiting": len(self._waiting),
            "paused": self._paused,
            "draining": self._draining,
            "capabilities": vars(self.capabilities),
        }

    def metrics(self) -> dict[str, float]:
        return {
            **{name: value for name, value in self._activity.counters.items() if not name.startswith("draft")},
            "preemptions_total": self._preemptions,
            "running": len(self._running),
            "waiting": len(self._waiting),
            "version": -1 if self._policy is None else self._policy.number,
            "paused": int(self._paused),
            "draining": int(self._draining),
            "tokens_per_second": self._activity.tokens_per_second,
        }

    @property
    def histograms(self) -> Mapping[str, Histogram]:
        return self._activity.histograms

    # -- who runs and who waits

    def _add(
        self, request: GenerateRequest, stream: bool, chunks: asyncio.Queue[GenerateChunk | Exception]
    ) -> Generation:
        if self._draining:
            raise EngineUnavailable("the engine takes no new requests: it drains", hint="ask another engine")
        waiting = sum(one.request.traffic == request.traffic for one in self._waiting.values())
        if waiting >= self._config.max_waiting:
            self._activity.counters["refused_total"] += 1
            raise EngineBusy(waiting)
        if self._policy is not None:
            _check_line(request, self._policy)
        self._requests += 1
        limit = min(len(request.tokens) + request.sampling.max_tokens, self._limit)
        one = Generation(self._requests, request, stream, limit, chunks.put_nowait, self._model.vocab_size)
        self._waiting[one.number] = one
        self._fill()
        return one

    def _fill(self) -> None:
        """Starts the requests that may run now: production before rollouts, then first come, first served. In a full
        batch production takes the place of the newest rollout, which waits again."""
        while (one := self._next()) is not None:
            if len(self._running) >= self._config.max_batch:
                newest = max((number for number, each in self._running.items() if each.is_rollout), default=None)
                if one.is_rollout or newest is None:
                    return
                self._interrupt(self._running[newest])
                self._preemptions += 1
            self._start(one)

    def _next(self) -> Generation | None:
        policy = self._policy
        if policy is None or self._closed or self._paused:
            return None
        allowed = [one for one in self._waiting.values() if policy.number >= one.request.min_version]
        return min(allowed, key=lambda one: (one.is_rollout, one.number), default=None)

    def _start(self, one: Generation) -> None:
        assert self._policy is not None
        self._running[one.number] = self._waiting.pop(one.number)
        one.start()
        self._legs[one.number] = asyncio.create_task(self._leg(one, self._policy))

    def _interrupt(self, one: Generation) -> asyncio.Task[None]:
        """Ends its leg; it waits again."""
        leg = self._legs.pop(one.number)
        leg.cancel()
        self._waiting[one.number] = self._running.pop(one.number)
        one.requeue()
        return leg

    def _forget(self, one: Generation) -> bool:
        """Whether it was there."""
        leg = self._legs.pop(one.number, None)
        if leg is not None and leg is not asyncio.current_task():
            leg.cancel()
        return (self._running.pop(one.number, None) or self._waiting.pop(one.number, None)) is not None

    def _refuse_other_lines(self, policy: PolicyRef) -> None:
        for one in list(self._waiting.values()):
            try:
                _check_line(one.request, policy)
            except EngineUnavailable as error:
                self._forget(one)
                one.deliver(error)

    # -- legs

    async def _leg(self, one: Generation, policy: PolicyRef) -> None:
        try:
            async with contextlib.aclosing(self._server.generate(one, _label(policy))) as pieces:
                async for piece in pieces:
                    before = one.first_token_at
                    for sampled in piece.sampled:
                        one.add(sampled, policy)
                    if before is None and one.first_token_at is not None:
                        self._activity.first_token(one.first_token_at - one.arrived_at)
                    count, now = len(piece.sampled), time.time()
                    self._activity.step(now, count, count, len(self._running), len(self._waiting))
                    if piece.finish is not None:
                        return self._finish(one, piece.finish)
                    if one.stream and time.monotonic() - one.sent_at >= self._config.stream_seconds:
                        one.deliver(one.chunk())
            if not self._closed:
                raise EngineUnavailable("the vLLM server ended an answer early", hint="its log says why")
        except Exception as error:
            if not self._closed:  # otherwise it is interrupted, and goes on later
                self._forget(one)
                known = isinstance(error, EngineError)
                one.deliver(error if known else EngineUnavailable(f"the engine broke: {error!r}"))
                self._fill()

    def _finish(self, one: Generation, finish: FinishReason) -> None:
        self._forget(one)
        self._activity.finished(finish)
        one.deliver(one.chunk(finish))
        self._fill()
        if not self._running:
            self._activity.rest()

    async def _stop(self) -> int:
        """Stops the server and closes every leg. Returns how many there were. Whatever has arrived by now was sampled
        before the server stopped. If the server refuses to stop, all legs start again: its weights are as before."""
        await self._server.ready()
        self._closed = True
        running = len(self._running)
        try:
            await self._server.pause()
        except EngineError:
            await self._interrupt_all()  # it may have ended some of them
            if not self._paused:
                with contextlib.suppress(EngineError):  # it may have stopped all the same
                    await self._server.resume()
                self._closed = False
                self._fill()
            raise
        await self._interrupt_all()
        return running

    async def _interrupt_all(self) -> None:
        legs = [self._interrupt(one) for one in list(self._running.values())]
        await asyncio.gather(*legs, return_exceptions=True)

    async def _go_on(self) -> None:
        if not self._paused:
            await self._server.resume()
            self._closed = False
            self._fill()


def _label(policy: PolicyRef) -> str:
    """How the server names these weights."""
    return f"{policy.line}@{policy.number} {policy.digest}"


def _check_line(request: GenerateRequest, policy: PolicyRef) -> None:
    if request.line and not same_line(request.line, policy.line):
        raise EngineUnavailable(f"the engine serves line {policy.line}, not {request.line}")
