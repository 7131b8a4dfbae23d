"""Chooses the engine that answers, and another one when it dies.

Every engine is asked for its health a few times per second. A request goes to the engine that holds the session's KV
cache if that one is fit, else to the least loaded fit one. Fit engines serve the wanted version and are not paused.
When an engine dies before its first token, the request starts again on another one. When it dies later, the tokens it
sampled are kept and another engine goes on from them. With no engine at all, a request waits for `engine_wait_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from rollmill.backoff import Backoff
from rollmill.errors import EngineError, GatewayError
from rollmill.gateway.account import current_account
from rollmill.gateway.config import EngineEndpoint, GatewayConfig
from rollmill.inference.engine import GenerateChunk, GenerateRequest
from rollmill.inference.wire import chunk_from_json, request_to_json
from rollmill.types import PolicyRef

log = logging.getLogger(__name__)
_GONE = (aiohttp.ClientError, OSError, TimeoutError, EngineError)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


@dataclass
class EngineState:
    """An engine as the router last saw it."""

    url: str
    region: str
    token: str | None = field(default=None, repr=False)
    alive: bool = False
    name: str = ""
    policy: PolicyRef | None = None
    paused: bool = False
    queued: int = 0  # running and waiting, by its own count
    in_flight: int = 0  # our requests that it has not finished
    failures: int = 0
    problem: str = field(default="no health check yet")

    @property
    def load(self) -> int:
        return max(self.queued, self.in_flight)

    def serves(self, min_version: int) -> bool:
        return self.policy is not None and self.policy.number >= min_version

    def describe(self) -> dict[str, Any]:
        policy = None if self.policy is None else vars(self.policy)
        return {
            "url": self.url,
            "region": self.region,
            "alive": self.alive,
            "engine": self.name,
            "policy": policy,
            "paused": self.paused,
            "queued": self.queued,
            "problem": None if self.alive else self.problem,
        }


class Router:
    def __init__(self, endpoints: Sequence[EngineEndpoint], config: GatewayConfig) -> None:
        self.engines = [
            EngineState(endpoint.url.rstrip("/"), endpoint.region, endpoint.token) for endpoint in endpoints
        ]
        self._config = config
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=config.engine_silence_s)
        self._changed = asyncio.Condition()
        self._client: aiohttp.ClientSession | None = None
        self._polls: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
        )
        self._polls = [asyncio.create_task(self._poll(engine)) for engine in self.engines]

    async def close(self) -> None:
        for poll in self._polls:
            poll.cancel()
        await asyncio.gather(*self._polls, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    async def generate(
        self, request: GenerateRequest, *, prefer: str | None, stream: bool, lost: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[tuple[EngineState, GenerateChunk], None]:
        """Yields the chunks of one answer, each with its engine. The last has a `finish` other than "abort". Calls
        `lost` when an engine fails."""
        sampled: list[int] = []
        failed: EngineState | None = None
        patience = _Patience(self._config.engine_wait_s)
        account = current_account()
        account.prompt_tokens += len(request.tokens)
        while True:
            engine = await self._choose(prefer, failed, request.min_version, patience)
            try:
                async with contextlib.aclosing(self._ask(engine, _rest(request, sampled), stream)) as chunks:
                    async for chunk in chunks:
                        sampled += chunk.tokens
                        account.hear(len(chunk.tokens))
                        whole = chunk.finish not in (None, "abort")
                        yield engine, chunk
                        if whole:
                            return
                        if chunk.tokens:
                            patience.reset()
                raise EngineError("the engine gave up the request")
            except _GONE as error:
                self._lost(engine, error)
                lost()
                prefer, failed = None, engine
            ended = _ended(request, sampled)
            if ended is not None:
                yield engine, ended
                return
            await patience.pause()

    async def _ask(
        self, engine: EngineState, request: GenerateRequest, stream: bool
    ) -> AsyncGenerator[GenerateChunk, None]:
        assert self._client is not None, "the router is not started"
        engine.in_flight += 1
        try:
            body = request_to_json(request, stream=stream)
            headers = {"Authorization": f"Bearer {engine.token}"} if engine.token else None
            url = f"{engine.url}/generate"
            async with self._client.post(url, data=body, headers=headers, timeout=self._timeout) as response:
                if response.status != 200:
                    await _refuse(response)
                if not stream:
                    yield chunk_from_json(await response.read())
                    return
                # read in pieces: a chunk that carries a long prompt's routes is larger than readline() allows
                pending = b""
                async for piece in response.content.iter_any():
                    *lines, pending = (pending + piece).split(b"\n")
                    for line in filter(None, lines):
                        chunk = chunk_from_json(line)
                        if chunk.finish is not None:
                            await response.read()  # to the end, so that the connection can be reused
                        yield chunk
        finally:
            engine.in_flight -= 1

    async def _choose(
        self, prefer: str | None, failed: EngineState | None, min_version: int, patience: _Patience
    ) -> EngineState:
        while True:
            alive = [engine for engine in self.engines if engine.alive]
            alive = [engine for engine in alive if engine is not failed] or alive
            fit = [engine for engine in alive if not engine.paused and engine.serves(min_version)] or alive
            if fit:
                held = [engine for engine in fit if engine.url == prefer]
                return held[0] if held else min(fit, key=lambda engine: engine.load)
            try:
                async with asyncio.timeout(patience.left()):
                    async with self._changed:
                        await self._changed.wait()
            except TimeoutError:
                raise patience.exhausted("no engine is available") from None

    def _lost(self, engine: EngineState, error: BaseException) -> None:
        engine.failures += 1
        engine.problem = f"{type(error).__name__}: {error}"[:200]
        if isinstance(error, aiohttp.ClientConnectionError):
            engine.alive = False  # until it answers a health check again
        log.warning("engine %s failed during an answer: %s", engine.url, engine.problem)

    async def _poll(self, engine: EngineState) -> None:
        while True:
            was = engine.alive
            try:
                self._see(engine, await self._ask_health(engine))
            except (*_GONE, ValueError, KeyError, TypeError) as error:
                engine.alive, engine.problem = False, f"{type(error).__name__}: {error}"[:200]
            if engine.alive != was:
                log.info("engine %s is %s", engine.url, "up" if engine.alive else f"down: {engine.problem}")
            if engine.alive and not was:
                async with self._changed:
                    self._changed.notify_all()
            await asyncio.sleep(self._config.health_interval_s)

    async def _ask_health(self, engine: EngineState) -> dict[str, Any]:
        assert self._client is not None
        async with self._client.get(f"{engine.url}/health", timeout=aiohttp.ClientTimeout(total=5)) as response:
            if response.status != 200:
                raise EngineError(f"health answered {response.status}")
            tree: dict[str, Any] = json.loads(await response.read())
            return tree

    def _see(self, engine: EngineState, health: dict[str, Any]) -> None:
        policy = health.get("policy")
        engine.name = str(health["engine"])
        engine.policy = PolicyRef(**policy) if policy else None
        engine.paused = bool(health.get("paused"))
        engine.queued = int(health["running"]) + int(health["waiting"])
        engine.alive = engine.policy is not None  # an engine without weights cannot answer


class _Patience:
    """How long one request keeps trying without progress."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.reset()

    def reset(self) -> None:
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, patience=self._seconds)

    def left(self) -> float:
        return self._backoff.left()

    async def pause(self) -> None:
        """Pause between two attempts, so that an engine that fails at once is not called in a tight loop."""
        if self.left() <= 0:
            raise self.exhausted("every engine failed")
        await asyncio.sleep(min(self._backoff.failed(), self.left()))

    def exhausted(self, what: str) -> GatewayError:
        return GatewayError(
            f"{what}; waited {self._seconds:g} s",
            status=503,
            hint="try again; GET /health shows the state of the engines",
        )


def _rest(request: GenerateRequest, sampled: list[int]) -> GenerateRequest:
    """The rest of a request after `sampled` tokens are done."""
    if not sampled:
        return request
    # the same seed: engines draw by (seed, position), so the answer continues as it would have
    rest = replace(request.sampling, max_tokens=request.sampling.max_tokens - len(sampled))
    return replace(request, tokens=request.tokens + sampled, sampling=rest)


def _ended(request: GenerateRequest, sampled: list[int]) -> GenerateChunk | None:
    """The final chunk of an answer whose engine died after the last token, before it said that it was the last."""
    if sampled and sampled[-1] in request.sampling.stop_tokens:
        return GenerateChunk([], [], [], [], finish="stop")
    if len(sampled) >= request.sampling.max_tokens:
        return GenerateChunk([], [], [], [], finish="length")
    return None


async def _refuse(response: aiohttp.ClientResponse) -> None:
    """Raises for a failed request. A 400 is wrong on every engine; anything else may work on another one.

    401 is not the client's fault: this gateway holds the wrong token for that engine.
    """
    text = (await response.content.read(2000)).decode(errors="replace")
    if 400 <= response.status < 500 and response.status not in (401, 408, 429):
        try:
            error = json.loads(text).get("error", text)
            text = error if isinstance(error, str) else str(error.get("message", error))
        except (ValueError, AttributeError):
            pass
        raise GatewayError(f"the engine refused the request: {text[:500]}", status=400)
    raise EngineError(f"answered {response.status}: {text[:200]}")
