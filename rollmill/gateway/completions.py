"""One chat completion: plan the request in its session, sample, write the answer to disk, then send it.

    plan ─► engine ─► record (fsync) ─► reply

The order is the promise: an answer that a client has fully received is in the log. A rollout waits for the disk, and
gets an error if the write fails, because tokens that are not recorded cannot be trained on. A production user always
gets the answer, after `record_wait_s` at the latest; the session is then marked as incomplete and is never trained on.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from rollmill.chat.format import ChatFormat, ContentStream
from rollmill.chat.tokenizer import Tokenizer
from rollmill.errors import GatewayError, StorageError
from rollmill.gateway.answers import AnswerBuilder
from rollmill.gateway.config import GatewayConfig
from rollmill.gateway.dialects import openai_chat
from rollmill.gateway.dialects.openai_chat import ChatRequest
from rollmill.gateway.entries import encode_incomplete, encode_open, encode_turn
from rollmill.gateway.metrics import Metrics
from rollmill.gateway.recorder import Recorder
from rollmill.gateway.registry import Registry
from rollmill.gateway.router import Router
from rollmill.gateway.segments import Answer, OpenSegment, Turn
from rollmill.gateway.sessions import Plan, Session
from rollmill.inference.engine import GenerateRequest


class Completions:
    def __init__(
        self,
        config: GatewayConfig,
        format: ChatFormat,
        tokenizer: Tokenizer,
        router: Router,
        recorder: Recorder,
        registry: Registry,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._format = format
        self._tokenizer = tokenizer
        self._router = router
        self._recorder = recorder
        self._registry = registry
        self._metrics = metrics
        self._running: set[asyncio.Task[web.StreamResponse]] = set()

    async def answer(self, session: Session, chat: ChatRequest, request: web.Request) -> web.StreamResponse:
        """If the client disconnects, the answer is still recorded, and returned when the request is repeated."""
        work = asyncio.create_task(self._answer(session, chat, request))
        self._running.add(work)
        work.add_done_callback(self._done)
        return await asyncio.shield(work)

    async def close(self) -> None:
        for work in list(self._running):
            work.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _done(self, work: asyncio.Task[web.StreamResponse]) -> None:
        self._running.discard(work)
        if not work.cancelled():
            work.exception()  # the caller that waited has it; if nobody waits, it is not needed

    async def _answer(self, session: Session, chat: ChatRequest, request: web.Request) -> web.StreamResponse:
        async with session.lock:
            if self._registry.is_open(session):
                return await self._answer_in(session, chat, request)
        if session.facts.traffic == "rollout":
            raise GatewayError("this session is sealed", status=401, hint="open a new session")
        return await self._answer(self._registry.successor(session), chat, request)

    async def _answer_in(self, session: Session, chat: ChatRequest, request: web.Request) -> web.StreamResponse:
        """Answer in a session. The caller holds its lock."""
        stream = _EventStream(request, chat, self._format.content_stream(chat.stop)) if chat.stream else None
        segment = session.undelivered(chat.messages, chat.tools)
        if segment is not None:
            self._metrics.count("answers_repeated_total")
            return await self._reply(session, segment, chat, stream, request)
        try:
            segment = await self._new_answer(session, chat, stream)
        except GatewayError as error:
            if stream is None or not stream.begun:
                raise
            return await stream.fail(error)
        finally:
            if not session.segments and not session.logged:  # a production conversation without any answer
                self._registry.remove(session)
        return await self._reply(session, segment, chat, stream, request)

    async def _new_answer(self, session: Session, chat: ChatRequest, stream: _EventStream | None) -> OpenSegment:
        plan = session.plan(chat.messages, chat.tools, self._format)
        answer = await self._sample(session, plan, chat, stream)
        turn = plan.turn(answer)
        await self._record(session, turn)
        self._registry.append(session, turn)
        traffic = session.facts.traffic
        self._metrics.count("sampled_tokens_total", len(answer.tokens), traffic=traffic)
        self._metrics.count("prompt_tokens_total", len(plan.prompt), traffic=traffic)
        if plan.opens:
            self._metrics.count("segments_total", cause=plan.cause)
        assert session.latest is not None
        return session.latest

    async def _sample(self, session: Session, plan: Plan, chat: ChatRequest, stream: _EventStream | None) -> Answer:
        facts = session.facts
        request = GenerateRequest(plan.segment, plan.context, chat.sampling, facts.traffic, facts.min_version)
        builder = AnswerBuilder(request, self._tokenizer, chat.stop)
        piecemeal = chat.stream or bool(chat.stop) or chat.sampling.max_tokens > self._config.stream_above
        chunks = self._router.generate(request, prefer=session.engine, stream=piecemeal)
        session.wait.begin()
        try:
            async for engine, chunk in chunks:
                session.wait.hear(chunk)
                fresh = builder.add(engine, chunk)
                session.engine = engine.url
                if stream is not None:
                    await stream.push(fresh)
                if builder.finish is not None:
                    break
        except ConnectionResetError:  # the client closed the stream; the tokens sampled so far are the answer
            builder.abort()
            self._metrics.count("answers_cut_short_total", traffic=facts.traffic)
        finally:
            session.wait.end()
            await chunks.aclose()
        return builder.build(self._format, plan.tools)

    async def _record(self, session: Session, turn: Turn) -> None:
        """Write the turn to disk. A rollout waits for the disk, production for at most `record_wait_s`."""
        if session.unrecorded is not None:
            return
        facts = session.facts
        production = facts.traffic == "production"
        if session.sealing:  # deleted while the answer was sampled: nothing may follow in the log
            if production:
                session.unrecorded = "the session was deleted"
                return
            raise GatewayError("this session has ended", status=401, hint="open a new session")
        data = encode_turn(facts.trajectory, turn)
        try:
            await self._recorder.append(
                facts.trajectory,
                data if session.logged else encode_open(facts) + data,
                wait_s=self._config.record_wait_s if production else None,
            )
            session.logged = True
        except StorageError as error:
            self._metrics.count("recording_failures_total", traffic=facts.traffic)
            if not production:
                raise GatewayError(
                    f"the answer could not be recorded: {error.message}", status=503, hint=error.hint
                ) from None
            session.unrecorded = error.message
            # a session that is replayed after a crash must not count as complete
            self._recorder.append_later(facts.trajectory, encode_incomplete(facts, error.message))
            session.logged = True

    async def _reply(
        self,
        session: Session,
        segment: OpenSegment,
        chat: ChatRequest,
        stream: _EventStream | None,
        request: web.Request,
    ) -> web.StreamResponse:
        answer = segment.turns[-1].answer
        prompt_tokens = len(segment.tokens) - len(answer.tokens)
        extra = {
            "trajectory": session.facts.trajectory,
            "segment": segment.id,
            "policies": [vars(policy) for policy in answer.policies],
        }
        if stream is not None:
            segment.delivered = await stream.finish(answer, prompt_tokens, extra)
            return stream.response
        segment.delivered = request.transport is not None and not request.transport.is_closing()
        body = openai_chat.completion(_identity(), chat.model, answer, prompt_tokens, extra)
        return web.Response(body=body, content_type="application/json")


class _EventStream:
    """The answer as server-sent events. It starts with the first tokens, so earlier errors keep their own status."""

    def __init__(self, request: web.Request, chat: ChatRequest, content: ContentStream) -> None:
        self._request = request
        self._chat = chat
        self._content = content
        self._sent = ""
        self._writer = openai_chat.ChunkWriter(_identity(), chat.model)
        self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        self.begun = False

    async def push(self, tokens: Sequence[int]) -> None:
        text = self._content.push(tokens)
        if not self.begun:
            await self._begin()
        if text:
            self._sent += text
            await self.response.write(self._writer.text(text))

    async def finish(self, answer: Answer, prompt_tokens: int, extra: dict[str, Any]) -> bool:
        """Sends the remaining text, the tool calls and the end. Returns False if the client had disconnected."""
        if answer.finish == "abort":
            return True  # the client closed the stream: a repeated request gets a new answer
        content = answer.message["content"] or ""
        rest = content[len(self._sent) :] if content.startswith(self._sent) else ""
        calls = answer.message.get("tool_calls") or []
        data = (self._writer.text(rest) if rest else b"") + (self._writer.calls(calls) if calls else b"")
        try:
            if not self.begun:
                await self._begin()
            include_usage = self._chat.include_usage
            await self.response.write(
                data + self._writer.finish(answer, prompt_tokens, extra, include_usage=include_usage)
            )
            await self.response.write_eof()
        except ConnectionResetError:
            return False
        return True

    async def fail(self, error: GatewayError) -> web.StreamResponse:
        await self.response.write(openai_chat.error_event(error.status, error.message, error.hint))
        await self.response.write_eof()
        return self.response

    async def _begin(self) -> None:
        self.begun = True
        await self.response.prepare(self._request)
        await self.response.write(self._writer.start())


def _identity() -> str:
    return f"chatcmpl-{uuid.uuid4().hex}"
