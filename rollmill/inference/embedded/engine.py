"""The embedded engine, as the event loop sees it. The model runs in the thread of `decode_loop`."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from rollmill.errors import EngineError, WeightsError
from rollmill.histogram import Histogram
from rollmill.inference.config import EXACT_KV, EngineConfig
from rollmill.inference.embedded.activity import Activity
from rollmill.inference.embedded.decode_loop import DecodeLoop, Outbox
from rollmill.inference.embedded.generation import Generation
from rollmill.inference.embedded.grammar import Grammars, GrammarState
from rollmill.inference.engine import (
    Capabilities,
    Engine,
    EngineUnavailable,
    GenerateChunk,
    GenerateRequest,
    WeightSwitch,
    check_request,
)
from rollmill.models.config import ModelConfig
from rollmill.models.device import Device, choose_device, is_full
from rollmill.types import PolicyRef
from rollmill.weights.reading.line_follower import Update

T = TypeVar("T")
GATHERED = 64  # requests that reach the decode loop together at most: checking as many takes milliseconds


class EmbeddedEngine(Engine):
    """An async context manager. Until the first `apply`, requests wait."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        *,
        name: str = "engine",
        region: str = "home",
        device: Device = "cpu",
        form: str = "bf16",
        exact: bool = False,
        tokenizer: Path | None = None,
    ) -> None:
        """`exact`: tokens and log-probs have the same bits in every batch, those of a trainer that computes exactly
        (models.kernels.exact). `tokenizer`: the tokenizer.json of the model. Without it, requests with a grammar are
        refused."""
        if exact and config.fp8_kv:
            raise EngineError(EXACT_KV, hint="turn one of them off")
        self.name, self.region = name, region
        self.capabilities = Capabilities(
            "embedded",
            routes=True,
            grammars=tokenizer is not None,
            seeds_by_position=True,
            keeps_cache=not config.recompute_kv,
        )
        self._vocab_size = model.vocab_size
        self._grammars = Grammars(tokenizer, model.vocab_size) if tokenizer is not None else None
        self._context_limit = min(model.max_context, config.cache_tokens)
        self._activity = Activity(name, region)
        where = choose_device(device)
        self._decoding = DecodeLoop(model, config, self._activity, self._send, device=where, form=form, exact=exact)
        self.ended = self._decoding.ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._requests = 0
        self._checked: list[int] = []  # the context that was checked last
        self._arrived: list[Generation] = []  # in this turn of the event loop
        self._applying = asyncio.Lock()

    async def __aenter__(self) -> EmbeddedEngine:
        self._loop = asyncio.get_running_loop()
        self._decoding.thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(EngineUnavailable):
            self._post(self._decoding.close)
        await asyncio.to_thread(self._decoding.thread.join)

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncGenerator[GenerateChunk, None]:
        if not check_request(request, self._vocab_size, self._checked):
            self._checked = list(request.tokens)  # a copy: the caller's may change
        if len(request.tokens) >= self._context_limit:
            yield GenerateChunk([], [], [], [], finish="length")  # no room for a token: that is data, not an error
            return
        chunks = _Chunks()
        grammar = await self._grammar(request) if request.sampling.grammar is not None else None
        generation = self._generation(request, stream, chunks)
        generation.grammar = grammar
        finish = None
        try:
            self._arrive(generation)
            while finish is None:
                chunk = await chunks.get()
                if isinstance(chunk, Exception):
                    raise chunk
                finish = chunk.finish
                yield chunk
        finally:
            if finish is None:  # the client went away
                with contextlib.suppress(EngineUnavailable):
                    self._post(lambda: self._decoding.abort(generation))

    async def apply(self, update: Update) -> WeightSwitch:
        async with self._applying:
            with _refused_without_memory(update.policy):
                ready = await asyncio.to_thread(self._decoding.prepare, update)
                return await asyncio.wrap_future(self._post(lambda: self._decoding.apply(update, ready)))

    async def pause(self) -> None:
        await asyncio.wrap_future(self._post(lambda: self._decoding.set_paused(True)))

    async def drain(self) -> None:
        await asyncio.wrap_future(self._post(self._decoding.drain))

    async def resume(self) -> None:
        await asyncio.wrap_future(self._post(lambda: self._decoding.set_paused(False)))

    def health(self) -> dict[str, Any]:
        policy, scheduler = self._decoding.policy, self._decoding.scheduler
        return {
            "engine": self.name,
            "region": self.region,
            "policy": None if policy is None else vars(policy),
            "running": len(scheduler.running),
            "waiting": scheduler.waiting,
            "paused": self._decoding.paused,
            "draining": self._decoding.draining,
            "capabilities": vars(self.capabilities),
        }

    def metrics(self) -> dict[str, float]:
        policy, scheduler = self._decoding.policy, self._decoding.scheduler
        return {
            **self._activity.counters,
            "preemptions_total": scheduler.preemptions,
            "running": len(scheduler.running),
            "waiting": scheduler.waiting,
            "cache_blocks": scheduler.pages.size,
            "cache_blocks_free": scheduler.pages.available,
            "cache_blocks_idle": scheduler.pages.idle,
            "prefix_hits_total": scheduler.prefixes.hits,
            "prefix_hit_tokens_total": scheduler.prefixes.hit_tokens,
            "version": -1 if policy is None else policy.number,
            "paused": int(self._decoding.paused),
            "draining": int(self._decoding.draining),
            "tokens_per_second": self._activity.tokens_per_second,
        }

    @property
    def histograms(self) -> Mapping[str, Histogram]:
        return self._activity.histograms

    async def _grammar(self, request: GenerateRequest) -> GrammarState:
        grammar, ends = request.sampling.grammar, request.sampling.stop_tokens
        if self._grammars is None or grammar is None or not ends:
            raise EngineError(
                "a grammar needs an engine with a tokenizer, and a stop token",
                hint="ask without a format of the output",
            )
        await self._grammars.check(grammar)
        answered = request.tokens[len(request.tokens) - request.answered :]
        return await asyncio.to_thread(self._grammars.start, grammar, ends[0], answered)

    def _generation(self, request: GenerateRequest, stream: bool, chunks: _Chunks) -> Generation:
        self._requests += 1
        limit = min(len(request.tokens) + request.sampling.max_tokens, self._context_limit)
        seed = request.sampling.seed
        seed = secrets.randbits(64) if seed is None else seed % 2**64
        return Generation(self._requests, request, stream, limit, chunks.put, seed)

    def _arrive(self, generation: Generation) -> None:
        """Requests of one turn of the event loop reach the decode loop together, so that a group on one prompt takes
        one step: alone, the first one would be computed before the others are there."""
        self._arrived.append(generation)
        if len(self._arrived) == 1:
            asyncio.get_running_loop().call_soon(self._hand_over)
        elif len(self._arrived) == GATHERED:
            self._hand_over()

    def _hand_over(self) -> None:
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        try:
            self._decoding.post_requests(arrived)
        except EngineUnavailable as error:
            for generation in arrived:
                generation.deliver(error)

    def _post(self, command: Callable[[], T]) -> Future[T]:
        """Runs a command in the decode loop, after the requests that came before it."""
        self._hand_over()
        return self._decoding.post(command)

    def _send(self, outbox: Outbox) -> None:
        """Called in the decode loop's thread. One call for all: waking the event loop is slow."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_deliver, outbox)


class _Chunks:
    """The chunks of one request, for the one task that reads them. Much less than asyncio.Queue does: with a thousand
    requests at once its work is seen."""

    def __init__(self) -> None:
        self._held: deque[GenerateChunk | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, chunk: GenerateChunk | Exception) -> None:
        """In the event loop's thread."""
        self._held.append(chunk)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> GenerateChunk | Exception:
        while not self._held:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._held.popleft()


def _deliver(outbox: Outbox) -> None:
    for generation, chunk in outbox:
        generation.deliver(chunk)


@contextlib.contextmanager
def _refused_without_memory(policy: PolicyRef) -> Iterator[None]:
    """Turns a full device into a WeightsError, which the follower retries. A device shared with a trainer may be full
    for a moment."""
    try:
        yield
    except RuntimeError as error:
        if not is_full(error):
            raise
        what = ". ".join(str(error).split(". ")[:2])  # the rest is about torch's settings
        raise WeightsError(
            f"{policy.line}@{policy.number} was not loaded: {what}",
            hint="it is tried again; lower the engine's cache_tokens, or give it a device of its own",
        ) from error
