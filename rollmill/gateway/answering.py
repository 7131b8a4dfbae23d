"""One request to the model: plan the request in its session, sample, write the answer to disk, then send it.

    plan ─► engine ─► record (fsync) ─► reply

The order is the promise: an answer that a client has fully received is in the log. A rollout waits for the disk, and
gets an error if the write fails, because tokens that are not recorded cannot be trained on. A production user always
gets the answer, after `record_wait_s` at the latest; the session is then marked as incomplete and is never trained on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from aiohttp import web

from rollmill.chat.first_call import FirstCall
from rollmill.chat.format import ChatFormat
from rollmill.chat.tokenizer import Tokenizer
from rollmill.errors import GatewayError, StorageError
from rollmill.gateway.config import GatewayConfig
from rollmill.gateway.recording.entries import encode_incomplete, encode_open, encode_response, encode_turn
from rollmill.gateway.recording.recorder import Recorder
from rollmill.gateway.routing.answer_builder import AnswerBuilder
from rollmill.gateway.routing.router import Router
from rollmill.gateway.sessions.causes import declares_outcome, read_declared
from rollmill.gateway.sessions.flights import AnswerCut, Asked, Flight
from rollmill.gateway.sessions.identity import HEADER
from rollmill.gateway.sessions.registry import Registry
from rollmill.gateway.sessions.segments import OpenSegment, Turn
from rollmill.gateway.sessions.sessions import Plan, Session
from rollmill.gateway.watching.metrics import Metrics
from rollmill.gateway.wire.answer import Answer
from rollmill.gateway.wire.answer_grammars import check_one_call, grammar_of
from rollmill.gateway.wire.dialect import Dialect, Identity, ModelRequest, Reply, Stored, TokenLogprob
from rollmill.gateway.wire.streams import EventStream, send, token_logprobs
from rollmill.gateway.workers import Workers, is_from_worker
from rollmill.inference.engine import GenerateRequest
from rollmill.types import TrafficClass

_LOOK_S = 0.25  # how often an answer with a grammar is looked at until its first token


@dataclass
class Ask:
    """A request to the model, the HTTP request it came in, and the dialect of both."""

    request: ModelRequest
    dialect: Dialect
    http: web.Request

    @property
    def asked(self) -> Asked:
        return Asked(self.request.messages, self.request.tools, self.request.sampling.grammar)

    def is_abandoned(self) -> bool:
        """Whether the client has disconnected."""
        return self.http.transport is None or self.http.transport.is_closing()


class Recorded(NamedTuple):
    """A recorded answer, its segment, and the number of tokens before it."""

    segment: OpenSegment
    answer: Answer
    prompt_tokens: int

    def shown(self, traffic: TrafficClass) -> Answer:
        """The answer for its client. In production its cached tokens are those that this conversation had sent before:
        those of others would tell whether somebody sent the same beginning."""
        turn = self.segment.turns[self.segment.number_of(self.answer)]
        own = min(self.answer.cached_tokens, self.prompt_tokens - len(turn.prompt))
        return self.answer if traffic == "rollout" else replace(self.answer, cached_tokens=own)


@dataclass(eq=False, repr=False)
class Answering:
    config: GatewayConfig
    format: ChatFormat
    tokenizer: Tokenizer
    router: Router
    recorder: Recorder
    registry: Registry
    metrics: Metrics
    workers: Workers
    running: set[asyncio.Task[Any]] = field(init=False, default_factory=set)  # of requests that are being answered

    async def answer(self, session: Session, ask: Ask) -> web.StreamResponse:
        """If the client disconnects, the answer is still recorded, and returned when the request is repeated: the
        server does not cancel what runs for it (`handler_cancellation` of aiohttp is off)."""
        task = asyncio.current_task()
        assert task is not None
        self.running.add(task)
        try:
            return await self._answer(session, ask)
        finally:
            self.running.discard(task)

    async def close(self) -> None:
        for work in list(self.running):
            work.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)

    async def _answer(self, session: Session, ask: Ask) -> web.StreamResponse:
        try:
            ask.request = self._constrained(ask.request)
        except GatewayError:
            self._remove_if_empty(session)
            raise
        await session.wait_for_abandoned(ask.asked)
        if self.registry.is_open(session) and not session.ending:
            with contextlib.suppress(_Ended):
                return await self._answer_in(session, ask)
        if session.facts.traffic == "rollout":
            raise _ended()
        return await self._answer(self.registry.successor(session), ask)

    async def _answer_in(self, session: Session, ask: Ask) -> web.StreamResponse:
        request = ask.request
        stream = None
        if request.stream:
            identity = Identity(session=session.facts.trajectory)
            wait_s = self.config.reader_wait_s
            stream = EventStream(ask.http, request, ask.dialect, self.format, self.tokenizer, identity, wait_s)
            stream.response.headers[HEADER] = self._name(session)
        segment = session.undelivered(ask.asked) if request.count == 1 else None
        if segment is not None and (segment.turns[-1].answer.top_logprobs or not request.top_logprobs):
            return await self._repeat(session, segment, ask, stream)
        try:
            beating = stream.beating(self.config.heartbeat_s) if stream else contextlib.nullcontext()
            async with beating:
                recorded = await self._new_answers(session, ask, stream)
        except GatewayError as error:
            if stream is None or not stream.begun:
                raise
            return await stream.fail(error)
        finally:
            self._remove_if_empty(session)
        return await self._reply(session, recorded, ask, stream)

    def _remove_if_empty(self, session: Session) -> None:
        """Forgets a production conversation without any answer."""
        if not session.segments and not session.logged and not session.flights:
            self.registry.remove(session)

    async def _repeat(
        self, session: Session, segment: OpenSegment, ask: Ask, stream: EventStream | None
    ) -> web.StreamResponse:
        """Gives the last answer of the segment again: it may not have arrived."""
        self.metrics.count("answers_repeated_total")
        answer = segment.turns[-1].answer
        recorded = Recorded(segment, answer, segment.length - len(answer.tokens))
        if stream is not None:
            stream.prompt_tokens = recorded.prompt_tokens
            with contextlib.suppress(ConnectionResetError):  # `_reply` notices it too
                await stream.push(0, answer.tokens, answer.logprobs, answer.top_logprobs)
        return await self._reply(session, [recorded], ask, stream)

    def _constrained(self, request: ModelRequest) -> ModelRequest:
        """The request with the grammar that it needs."""
        check_one_call(request, self.format)
        grammar = grammar_of(request, self.format)
        return request if grammar is None else replace(request, sampling=replace(request.sampling, grammar=grammar))

    async def _new_answers(self, session: Session, ask: Ask, stream: EventStream | None) -> list[Recorded]:
        """Several answers to one request are sampled side by side. Each is a branch of its own."""
        if ask.request.count == 1:
            return [await self._new_answer(session, ask, stream, 0)]
        work = [self._new_answer(session, ask, stream, index) for index in range(ask.request.count)]
        done = await asyncio.gather(*work, return_exceptions=True)
        for each in done:
            if isinstance(each, BaseException):
                raise each
        return [each for each in done if isinstance(each, Recorded)]

    async def _new_answer(self, session: Session, ask: Ask, stream: EventStream | None, index: int) -> Recorded:
        request, facts = _numbered(ask.request, index), session.facts
        outcome = declares_outcome(ask.http.headers)
        bare = GenerateRequest(facts.trajectory, [], request.sampling, facts.traffic, facts.min_version, facts.line)
        self.router.refuse_at_overload(request.model, bare)
        plan = await self._plan(session, request, ask)
        if stream is not None:
            stream.prompt_tokens = len(plan.tokens)
        with session.flight(plan, ask.asked, ask.is_abandoned) as flight:
            answer, failure = await self._sample(session, plan, flight, request, stream, index)
            for span in answer.spans:
                span.outcome = outcome
            async with session.lock:
                turn = session.place(plan, answer)
                await self._record(session, turn)
                opens = turn.segment not in session.segments
                segment = self.registry.append(session, turn)
        self.metrics.count("sampled_tokens_total", len(answer.tokens), traffic=facts.traffic)
        self.metrics.count("prompt_tokens_total", len(plan.prompt), traffic=facts.traffic)
        if opens:
            self.metrics.count("segments_total", cause=turn.cause)
        if session.ending and answer.finish == "abort":
            raise _ended()
        if failure is not None:
            raise failure
        return Recorded(segment, answer, len(plan.tokens))

    async def _plan(self, session: Session, request: ModelRequest, ask: Ask) -> Plan:
        prompt, declared = request.prompt, read_declared(ask.http.headers)
        if isinstance(prompt, list):
            return session.plan_tokens(prompt, self.tokenizer.decode)

        def plan() -> Plan:
            return session.plan(request.messages, request.tools, self.format, declared)

        if not request.is_large:
            return plan()
        async with session.lock:  # no answer is appended while a thread reads the session
            planned = await asyncio.to_thread(plan)
        if not self.registry.is_open(session) or session.ending:
            raise _Ended
        if ask.is_abandoned():  # it was not in flight yet: a request that repeats it does not wait for its answer
            raise ConnectionResetError("the client disconnected while its request was planned")
        return planned

    async def _sample(
        self,
        session: Session,
        plan: Plan,
        flight: Flight,
        request: ModelRequest,
        stream: EventStream | None,
        index: int,
    ) -> tuple[Answer, GatewayError | None]:
        """The answer, and why it is not complete if no engine could go on with it."""
        failure: GatewayError | None = None
        facts, sampling = session.facts, request.sampling
        ask = GenerateRequest(plan.cache, plan.tokens, sampling, facts.traffic, facts.min_version, facts.line)
        ask.top_logprobs = request.top_logprobs
        one_call = request.one_call and bool(plan.tools) and self.format.call_mark is not None
        callable = [*plan.tools, *request.deferred]
        first_call = FirstCall(self.format, self.tokenizer, callable) if one_call else None
        builder = AnswerBuilder(ask, self.tokenizer, request.stop, first_call)
        piecemeal = request.stream or bool(request.stop) or one_call or sampling.max_tokens > self.config.stream_above
        piecemeal = piecemeal or sampling.grammar is not None  # so that its first token is seen
        watch = asyncio.create_task(_cut_unheard(flight, builder)) if sampling.grammar is not None else None
        wait = session.waits.begin()
        target = self.router.target(request.model, facts.trajectory, facts.traffic)
        chunks = self.router.generate(
            ask, prefer=session.engine, stream=piecemeal, target=target, lost=wait.lost, encoded=plan.encoded
        )
        try:
            with flight.sampling():
                async for engine, arrived in chunks:
                    start = len(builder.tokens)
                    for chunk in arrived:
                        wait.hear(chunk)
                        builder.add(engine, chunk)
                        if builder.finish is not None:
                            break
                    session.engine = engine.url
                    if stream is not None:
                        fresh = (builder.tokens[start:], builder.logprobs[start:], builder.top_logprobs[start:])
                        await stream.push(index, *fresh, last=builder.finish is not None)
                    if builder.finish is not None:
                        break
        except (ConnectionResetError, AnswerCut) as error:  # nobody waits for the rest; the tokens so far are kept
            if isinstance(error, AnswerCut) and not builder.tokens:
                raise _ended() from None
            builder.abort()
            self.metrics.count("answers_cut_short_total", traffic=facts.traffic)
        except GatewayError as error:
            if not builder.tokens:
                raise
            failure = error  # the client may have tokens already: they are recorded first
            builder.abort()
            self.metrics.count("answers_cut_short_total", traffic=facts.traffic)
        finally:
            if watch is not None:
                watch.cancel()
            wait.end()
            await chunks.aclose()
        if not builder.tokens and builder.finish == "length":
            raise _too_long(len(plan.tokens))
        return builder.build(None if request.prompt is not None else self.format, callable), failure

    async def _record(self, session: Session, turn: Turn) -> None:
        """Write the turn to disk. A rollout waits for the disk, production for at most `record_wait_s`."""
        if session.unrecorded is not None or not session.stored:
            return
        facts = session.facts
        production = facts.traffic == "production"
        if session.closed:  # deleted while the answer was sampled: nothing may follow in the log
            if production:
                session.unrecorded = "the session was deleted"
                return
            raise _ended()
        data = encode_turn(facts.trajectory, turn)
        try:
            await self.recorder.append(
                facts.trajectory,
                data if session.logged else encode_open(facts) + data,
                wait_s=self.config.record_wait_s if production else None,
            )
            session.logged = True
        except StorageError as error:
            self.metrics.count("recording_failures_total", traffic=facts.traffic)
            if not production:
                raise GatewayError(
                    f"the answer could not be recorded: {error.message}", status=503, hint=error.hint
                ) from None
            session.unrecorded = error.message
            # a session that is replayed after a crash must not count as complete
            self.recorder.append_later(facts.trajectory, encode_incomplete(facts, error.message))
            session.logged = True

    async def _reply(
        self, session: Session, recorded: Sequence[Recorded], ask: Ask, stream: EventStream | None
    ) -> web.StreamResponse:
        for segment, _, _ in recorded:
            segment.delivered = True  # unless sending fails
        identity = Identity(session=session.facts.trajectory) if stream is None else stream.identity
        reply = self._make_reply(session, recorded, ask.request, identity)
        stored = ask.dialect.kept(reply)
        if stored is not None:
            await self._keep(session, stored, recorded[0])
        if stream is not None:
            arrived = await stream.finish(reply)
        else:
            arrived = not ask.is_abandoned()
        for segment, answer, _ in recorded:
            segment.delivered = arrived
            if arrived and is_from_worker(ask.http):
                segment.carried_by(ask.http.transport)
            answer.top_logprobs = [] if arrived else answer.top_logprobs  # only needed to repeat it
        if stream is not None:
            return stream.response
        headers = {HEADER: self._name(session)}
        body = ask.dialect.reply(reply)
        response = web.Response(body=body, content_type="application/json", headers=headers)
        with contextlib.suppress(ConnectionResetError):  # sent here: the server would do it a little later
            await response.prepare(ask.http)
            await send(ask.http, response.write_eof, len(body), self.config.reader_wait_s)
        return response

    def _name(self, session: Session) -> str:
        """What a client sends to continue this session. If another gateway has the client's name for it, the id of the
        trajectory: feedback by the name would reach another trajectory there."""
        return session.name if self.workers.has_name(session.name) else session.facts.trajectory

    async def _keep(self, session: Session, stored: Stored, recorded: Recorded) -> None:
        """Stores a response. It survives a restart if its turn is in the log; the answer is sent in any case."""
        self.registry.responses.add(stored)
        if session.ending:
            return
        async with session.lock:
            if session.closed or session.unrecorded is not None or not session.logged:
                return
            number = recorded.segment.number_of(recorded.answer)
            with contextlib.suppress(StorageError):
                data = encode_response(stored, recorded.segment.id, number)
                await self.recorder.append(stored.trajectory, data, wait_s=self.config.record_wait_s)

    def _make_reply(
        self, session: Session, recorded: Sequence[Recorded], request: ModelRequest, identity: Identity
    ) -> Reply:
        answers = [each.shown(session.facts.traffic) for each in recorded]
        policies = {policy: None for answer in answers for policy in answer.policies}  # each once, in their order
        about = {
            "trajectory": session.facts.trajectory,
            "segment": recorded[0].segment.id,
            "segments": [each.segment.id for each in recorded],
            "answers": [f"{each.segment.id}/{each.segment.number_of(each.answer)}" for each in recorded],
            "policies": [vars(policy) for policy in policies],
        }
        if request.dropped:
            about["dropped_tools"] = list(request.dropped)
        return Reply(
            request,
            identity,
            answers=answers,
            prompt_tokens=recorded[0].prompt_tokens,
            about=about,
            logprobs=[self._logprobs(answer) for answer in answers] if request.logprobs else [],
        )

    def _logprobs(self, answer: Answer) -> list[TokenLogprob]:
        return token_logprobs(self.tokenizer, answer.tokens, answer.logprobs, answer.top_logprobs)


class _Ended(Exception):
    """The session was sealed or given up while a request was planned."""


def _numbered(request: ModelRequest, index: int) -> ModelRequest:
    """The request for answer `index`: with a seed, each answer has another one."""
    seed = request.sampling.seed
    if seed is None or index == 0:
        return request
    return replace(request, sampling=replace(request.sampling, seed=(seed + index) % (1 << 63)))


async def _cut_unheard(flight: Flight, builder: AnswerBuilder) -> None:
    """Cuts an answer whose client has disconnected before its first token: its grammar is still being checked, and the
    check ends with the request."""
    while not builder.tokens:
        if flight.is_abandoned():
            flight.cut()
            return
        await asyncio.sleep(_LOOK_S)


def _ended() -> GatewayError:
    return GatewayError("this session has ended", status=401, hint="open a new session")


def _too_long(tokens: int) -> GatewayError:
    """An engine answers a context that fills its limit with no token at all."""
    return GatewayError(
        f"This model's maximum context length is exceeded: the prompt has {tokens} tokens",
        hint="send a shorter conversation",
        code="context_length_exceeded",
    )
