"""Chooses the engine that answers, and another one when it dies.

Engines come and go (see `fleet`). Each is asked for its health a few times per second. A request goes to the engine
that holds the session's KV cache if that one is fit, else to the least loaded fit one. Fit engines serve what the
request asks for (see `targets`), have a free place (see `places`) and are not paused. When an engine dies before its
first token, the request starts again on another one. When it dies later, the tokens it sampled are kept and another
engine goes on from them. Without a fit engine, a request waits for `engine_wait_s`. All tokens of an answer come from
one line, and from one version if the request names it: an engine that switches away in the middle of an answer counts
as dead for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import aiohttp

from rollmill.backoff import Backoff
from rollmill.errors import EngineError, GatewayError
from rollmill.gateway.access.account import current_account
from rollmill.gateway.config import EngineEndpoint, GatewayConfig
from rollmill.gateway.routing import openai_engine, own_engine
from rollmill.gateway.routing.engine_http import EngineConnections
from rollmill.gateway.routing.engine_places import Places, Priority, overloaded
from rollmill.gateway.routing.engines import EngineState
from rollmill.gateway.routing.targets import DEFAULT, Target, pick, read_target
from rollmill.gateway.routing.traffic_splits import Split
from rollmill.inference.engine import GenerateChunk, GenerateRequest
from rollmill.keepalive import keepalive_connector
from rollmill.types import same_line

log = logging.getLogger(__name__)
_GONE = (aiohttp.ClientError, OSError, TimeoutError, EngineError)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_FIRST_CHECK_S = 1.0  # how long a starting gateway waits for its engines before it listens


class Router:
    def __init__(
        self,
        endpoints: Sequence[EngineEndpoint],
        config: GatewayConfig,
        encode: Callable[[str], list[int]],
        *,
        follows: bool = False,
    ) -> None:
        """`encode` tokenises the text of servers that do not tell token ids. `follows`: engines may join later."""
        self._encode = encode
        self.engines = [EngineState(endpoint) for endpoint in endpoints]
        self._joined: dict[str, EngineState] = {}  # those that `follow` has added, by URL
        self._has_own = follows or any(endpoint.kind == "rollmill" for endpoint in endpoints)
        self.places = Places(config.queue_requests)
        self._config = config
        self.split: Split = config.split
        self._divided_channels: set[str] = set()  # names of a split that changes while the gateway runs
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=config.engine_silence_s)
        self._lines: set[str] = set()  # that engines have served since the start
        self._channels: set[str] = set()
        self._client: aiohttp.ClientSession | None = None  # for health checks and for servers of others
        self._connections: EngineConnections | None = None
        self._polls: dict[str, asyncio.Task[None]] = {}  # by URL
        self._checks: dict[str, asyncio.Task[None]] = {}  # the last health check of each engine, by URL

    async def start(self) -> None:
        self._client = aiohttp.ClientSession(
            connector=keepalive_connector(keepalive_timeout=60),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
        )
        self._connections = EngineConnections(self._config.engine_silence_s)
        # the first request must find what there is
        for engine in self.engines:
            self._polls[engine.url] = asyncio.create_task(self._poll(engine, self._check_now(engine)))
        first = list(self._checks.values())
        if first:
            await asyncio.wait(first, timeout=_FIRST_CHECK_S)

    def follow(self, endpoints: Iterable[EngineEndpoint]) -> None:
        """The engines that are registered now. New ones join; those that are missing get no new request, and what they
        have begun ends as it ends."""
        present = {endpoint.url.rstrip("/"): endpoint for endpoint in endpoints}
        for url in [url for url in self._joined if present.get(url) != self._joined[url].endpoint]:
            engine = self._joined.pop(url)
            self.engines.remove(engine)
            engine.alive, engine.problem = False, "it is not registered any more"
            poll = self._polls.pop(url, None)
            if poll is not None:
                poll.cancel()
            log.info("engine %s has left", url)
        for url, endpoint in present.items():
            if url not in self._joined:
                engine = self._joined[url] = EngineState(endpoint)
                self.engines.append(engine)
                if self._client is not None:
                    self._polls[url] = asyncio.create_task(self._poll(engine, self._check_now(engine)))
                log.info("engine %s has joined", url)

    async def close(self) -> None:
        tasks = [*self._polls.values(), *self._checks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        if self._connections is not None:
            self._connections.close()

    def names(self) -> list[str]:
        """The names of models that a request may ask for: see `targets`. The first is the default."""
        versions = {f"{e.policy.line}@{e.policy.number}" for e in self.engines if e.policy is not None}
        return [DEFAULT, *sorted({*self.split, *self._lines, *self._channels, *versions} - {DEFAULT})]

    def served(self, name: str) -> str:
        """The name that is served for the one that a client asks for: itself, or the one that it is an alias of."""
        if not self._config.aliases or name in self.names():
            return name
        fits = (served for alias, served in self._config.aliases.items() if fnmatchcase(name, alias))
        return next(fits, name)

    def window(self) -> int | None:
        """The tokens of context that every engine has; None if none of them tells."""
        return min((engine.context for engine in self.engines if engine.context is not None), default=None)

    def target(self, name: str, session: str, traffic: str) -> Target:
        """What a request of this session asks for with this name of a model. `split` divides production only: rollouts
        need the engines of their run."""
        account, name = current_account(), self.served(name)
        account.model, account.session = name or DEFAULT, session
        split = self.split.get(name or DEFAULT) if traffic == "production" else None
        return self._divided(split, session) if split else read_target(name, self._channels)

    def refuse_at_overload(self, name: str, request: GenerateRequest) -> None:
        """Raises 429 for a request that would get it from `generate`. It has no tokens yet: tokenising it would take
        time from those that are served. `name`: of the model."""
        if self.places.is_full(_priority(request.traffic)):
            current_account().traffic = request.traffic
            target = _within(self.target(name, request.session, request.traffic), request.line)
            if self._choose(None, None, target, request) is None:
                raise overloaded(self.places.waiting)

    def divide(self, split: Split) -> None:
        """Divide production anew: `split` lies over that of the configuration. Its names are channels, also before an
        engine has followed them."""
        self.split = {**self._config.split, **split}
        self._divided_channels = {name for weights in split.values() for name in weights}

    def _divided(self, split: Mapping[str, float], session: str) -> Target:
        """The target that the session gets. If no engine serves it, the one with the largest weight: a canary whose
        engine is down costs no answer, and a canary never gets the sessions of others."""
        channels = self._channels | self._divided_channels
        targets = {name: read_target(name, channels) for name in split}
        first, main = pick(split, session), max(split, key=lambda name: split[name])
        served = any(
            engine.alive and targets[first].is_served_by(engine) and not engine.lent for engine in self.engines
        )
        return targets[first if served else main]

    async def generate(
        self,
        request: GenerateRequest,
        *,
        prefer: str | None,
        stream: bool,
        target: Target | None = None,
        lost: Callable[[], None] = lambda: None,
        encoded: bytes | None = None,
    ) -> AsyncGenerator[tuple[EngineState, list[GenerateChunk]], None]:
        """Yields the chunks of one answer with their engine, those that arrived together in one list. The last has a
        `finish` other than "abort". Calls `lost` when an engine fails. `encoded` is the JSON of the request's tokens,
        if somebody has it. Raises 400 if `target` is not of the line that the request itself names."""
        target = _within(target or Target(), request.line)
        sampled: list[int] = []
        failed: EngineState | None = None
        patience = _Patience(self._config.engine_wait_s)
        account = current_account()
        account.prompt_tokens += len(request.tokens)
        account.traffic = request.traffic
        while True:
            queued = time.perf_counter()
            engine = await self._take(prefer, failed, target, request, bool(sampled), patience)
            account.queue_s += time.perf_counter() - queued
            try:
                line = target.line or (engine.policy.line if engine.policy else "")
                rest = GenerateRequest(**{**vars(_rest(request, sampled)), "line": line})
                encoded = None if sampled else encoded
                async with contextlib.aclosing(self._ask(engine, rest, stream, encoded)) as arriving:
                    async for arrived in arriving:
                        chunks, left = _before_other(arrived, line, target.number)
                        tokens = [token for chunk in chunks for token in chunk.tokens]
                        if tokens:
                            sampled += tokens
                            account.hear(len(tokens))
                            target = Target(line, target.number, target.channel)
                        yield engine, chunks
                        if chunks[-1].finish not in (None, "abort"):
                            return
                        if left:
                            wanted = line if target.number is None else f"{line}@{target.number}"
                            raise EngineError(f"the engine left {wanted} in the middle of the answer")
                        if tokens:
                            patience.reset()
                raise EngineError("the engine gave up the request")
            except _GONE as error:
                self._lost(engine, error)
                lost()
                prefer, failed = None, engine
            finally:
                self.places.leave(engine)
            ended = _ended(request, sampled)
            if ended is not None:
                yield engine, [ended]
                return
            await patience.pause()

    def _ask(
        self, engine: EngineState, request: GenerateRequest, stream: bool, encoded: bytes | None
    ) -> AsyncGenerator[list[GenerateChunk], None]:
        """Yields the chunks that have arrived since the last time."""
        assert self._client is not None and self._connections is not None, "the router is not started"
        if engine.endpoint.kind == "openai":
            return openai_engine.ask(self._client, engine.endpoint, request, self._timeout, self._encode, stream)
        return own_engine.ask(self._connections, engine.endpoint, request, stream, encoded)

    async def _take(
        self,
        prefer: str | None,
        failed: EngineState | None,
        target: Target,
        request: GenerateRequest,
        begun: bool,
        patience: _Patience,
    ) -> EngineState:
        """Waits for a place at a fit engine."""
        priority: Priority = 0 if begun else _priority(request.traffic)
        # all that decides whether an engine fits; plain values, because it is hashed often
        key = (failed and failed.url, target.line, target.number, target.channel, request.min_version, request.traffic)
        try:
            return await self.places.take(
                lambda: self._choose(prefer, failed, target, request), priority, patience.left(), key
            )
        except TimeoutError:
            if self._able(target, request):
                raise overloaded(self.places.waiting) from None
            raise patience.exhausted("no engine is available") from None

    def _choose(
        self, prefer: str | None, failed: EngineState | None, target: Target, request: GenerateRequest
    ) -> EngineState | None:
        """The best engine with a free place; None if there is none."""
        alive, min_version = self._able(target, request), request.min_version
        if target == Target() and self._has_own:  # other people's servers answer only who asks for them
            alive = [engine for engine in alive if engine.endpoint.kind == "rollmill"]
        alive = [engine for engine in alive if engine is not failed] or alive
        # an engine that is paused or behind keeps a request until it can serve it
        fit = [engine for engine in alive if not engine.paused and _is_at(engine, min_version)] or alive
        free = [engine for engine in fit if engine.in_flight < self._config.engine_requests]
        held = [engine for engine in free if engine.url == prefer]
        return held[0] if held else min(free, key=lambda engine: engine.load, default=None)

    def _able(self, target: Target, request: GenerateRequest) -> list[EngineState]:
        """The engines that serve what is asked for, busy or not."""
        able = [engine for engine in self.engines if engine.alive and engine.takes(request.traffic)]
        return [engine for engine in able if target.is_served_by(engine)]

    def _lost(self, engine: EngineState, error: BaseException) -> None:
        engine.failures += 1
        engine.problem = f"{type(error).__name__}: {error}"[:200]
        if isinstance(error, aiohttp.ClientConnectionError | OSError):
            self._check_now(engine)  # it decides: one connection of thousands may fail at an engine that is well
        log.warning("engine %s failed during an answer: %s", engine.url, engine.problem)

    async def _poll(self, engine: EngineState, check: asyncio.Task[None]) -> None:
        await check
        while True:
            await asyncio.sleep(self._config.health_interval_s)
            await self._check_now(engine)

    def _check_now(self, engine: EngineState) -> asyncio.Task[None]:
        """The health check of this engine that is running, or a new one."""
        check = self._checks.get(engine.url)
        if check is None or check.done():
            check = self._checks[engine.url] = asyncio.create_task(self._check(engine))
        return check

    async def _check(self, engine: EngineState) -> None:
        was_alive, before, problem = engine.alive, engine.serving, engine.problem
        try:
            engine.see(await self._ask_health(engine))
        except (*_GONE, ValueError, KeyError, TypeError) as error:
            engine.alive, engine.problem = False, f"{type(error).__name__}: {error}"[:200]
        if engine.policy is not None:
            self._lines.add(engine.policy.line)
        if engine.channel is not None:
            self._channels.add(engine.channel)
        if engine.alive != was_alive or (not engine.alive and engine.problem != problem):
            log.info("engine %s is %s", engine.url, "up" if engine.alive else f"down: {engine.problem}")
        if engine.alive and (not was_alive or engine.serving != before):
            self.places.fill()

    async def _ask_health(self, engine: EngineState) -> dict[str, Any]:
        assert self._client is not None
        ask = openai_engine.ask_health if engine.endpoint.kind == "openai" else own_engine.ask_health
        return await ask(self._client, engine.endpoint)


class _Patience(Backoff):
    """How long one request keeps trying without progress."""

    def __init__(self, seconds: float) -> None:
        super().__init__(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, patience=seconds)
        self._seconds = seconds

    async def pause(self) -> None:
        """Pause between two attempts, so that an engine that fails at once is not called in a tight loop."""
        if self.left() <= 0:
            raise self.exhausted("every engine failed")
        await asyncio.sleep(min(self.failed(), self.left()))

    def exhausted(self, what: str) -> GatewayError:
        return GatewayError(
            f"{what}; waited {self._seconds:g} s",
            status=503,
            hint="try again; GET /health shows the state of the engines",
        )


def _priority(traffic: str) -> Priority:
    return 1 if traffic == "production" else 2


def _within(target: Target, line: str) -> Target:
    """The target within the line of the session; "" is any line."""
    if line and target.line and not same_line(target.line, line):
        raise GatewayError(
            f"this session is of the line {line}, and the request asks for the line {target.line}",
            hint=f"ask for the model {DEFAULT}",
        )
    return replace(target, line=line) if line and target.number is None else target


def _is_at(engine: EngineState, min_version: int) -> bool:
    return engine.policy is not None and engine.policy.number >= min_version


def _before_other(chunks: Sequence[GenerateChunk], line: str, number: int | None) -> tuple[list[GenerateChunk], bool]:
    """The chunks of the answer, and whether a token of another line, or of another version than `number`, follows."""
    own: list[GenerateChunk] = []
    for chunk in chunks:
        own.append(_of_target(chunk, line, number))
        if own[-1] is not chunk:
            return own, True
        if chunk.finish not in (None, "abort"):
            break
    return own, False


def _of_target(chunk: GenerateChunk, line: str, number: int | None) -> GenerateChunk:
    """The chunk, or what comes before its first token of another line, or of another version than `number`."""
    if all(policy.line == line and number in (None, policy.number) for policy in chunk.policies):
        return chunk  # nearly always
    foreign = {
        index
        for index, policy in enumerate(chunk.policies)
        if not same_line(policy.line, line) or number not in (None, policy.number)
    }
    if foreign.isdisjoint(chunk.policy):
        return chunk
    own = next(position for position, index in enumerate(chunk.policy) if index in foreign)
    policies = [policy for index, policy in enumerate(chunk.policies) if index not in foreign]
    return replace(
        chunk,
        tokens=chunk.tokens[:own],
        logprobs=chunk.logprobs[:own],
        kept=chunk.kept[:own],
        policy=[policies.index(chunk.policies[index]) for index in chunk.policy[:own]],
        policies=policies,
        top_logprobs=chunk.top_logprobs[:own],
        routes=None if chunk.routes is None else chunk.routes[: len(chunk.routes) - len(chunk.tokens) + own],
        finish=None,
        oldest_kv_policy=None,
    )


def _rest(request: GenerateRequest, sampled: list[int]) -> GenerateRequest:
    """The rest of a request after `sampled` tokens are done."""
    if not sampled:
        return request
    # the same seed: engines draw by (seed, position), so the answer continues as it would have
    rest = replace(request.sampling, max_tokens=request.sampling.max_tokens - len(sampled))
    return replace(request, tokens=[*request.tokens, *sampled], sampling=rest, answered=request.answered + len(sampled))


def _ended(request: GenerateRequest, sampled: list[int]) -> GenerateChunk | None:
    """The final chunk of an answer whose engine died after the last token, before it said that it was the last."""
    if sampled and sampled[-1] in request.sampling.stop_tokens:
        return GenerateChunk([], [], [], [], finish="stop")
    if len(sampled) >= request.sampling.max_tokens:
        return GenerateChunk([], [], [], [], finish="length")
    return None
