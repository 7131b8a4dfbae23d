"""A streamed reply: sampled tokens become deltas, deltas become the events of the request's dialect."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from aiohttp import web

from rollmill.chat.format import ChatFormat, ContentStream
from rollmill.chat.tokenizer import Tokenizer
from rollmill.errors import GatewayError
from rollmill.gateway.wire.answer import call_id
from rollmill.gateway.wire.dialect import Delta, Dialect, Identity, ModelRequest, NewCall, Reply, TokenLogprob

_BUFFERED = 32 << 10  # bytes that a transport takes without waiting for the client
Best = Sequence[Sequence[tuple[int, float]]]  # (token, log-prob) of the most likely tokens, per sampled token


class _EventResponse(web.StreamResponse):
    """Sends its headers together with the first events: one write to the socket less."""

    _send_headers_immediately = False


class EventStream:
    """Server-sent events. The stream starts with the first tokens or the first heartbeat, so earlier errors keep their
    own status."""

    def __init__(
        self,
        http: web.Request,
        request: ModelRequest,
        dialect: Dialect,
        format: ChatFormat,
        tokenizer: Tokenizer,
        identity: Identity,
        reader_wait_s: float,
    ) -> None:
        self._http = http
        self._reader_wait_s = reader_wait_s
        self._request = request
        self._tokenizer = tokenizer
        self._contents = [_content_stream(request, format, tokenizer) for _ in range(request.count)]
        self._writing = asyncio.Lock()  # several answers and heartbeats share the stream
        self._spoke = asyncio.get_running_loop().time()  # when something was last sent
        self._timer: asyncio.TimerHandle | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        # what was sent of each answer; a list of pieces would take ten times the memory
        self._sent = [io.StringIO() for _ in range(request.count)]
        self._reasoned = [io.StringIO() for _ in range(request.count)]
        self.identity = identity
        self._writer = dialect.stream(request, self.identity)
        self.response = _EventResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        self.begun = False
        self._held = b""  # events that are sent with the end
        self.prompt_tokens = 0  # set before the first push

    @contextlib.asynccontextmanager
    async def beating(self, every_s: float) -> AsyncIterator[None]:
        """In the block a heartbeat is sent whenever nothing else was for `every_s`."""
        self._look(every_s)  # no task: most answers end before
        try:
            yield
        finally:
            assert self._timer is not None
            self._timer.cancel()
            self._timer = None  # it would keep the request until the garbage is looked for
            if self._heartbeat is not None:
                await self._heartbeat

    def _look(self, every_s: float) -> None:
        loop = asyncio.get_running_loop()
        left = self._spoke + every_s - loop.time()
        if left <= 0 and (self._heartbeat is None or self._heartbeat.done()):
            self._heartbeat = loop.create_task(self._beat())
        self._timer = loop.call_later(left if left > 0 else every_s, self._look, every_s)

    async def _beat(self) -> None:
        with contextlib.suppress(ConnectionResetError):  # who writes next notices it too
            await self._write(b"", beat=True)

    async def push(
        self, index: int, tokens: Sequence[int], logprobs: Sequence[float], best: Best = (), *, last: bool = False
    ) -> None:
        """New tokens of answer `index`. Raises ConnectionResetError if the client has disconnected.

        The `last` ones of a stream that has one answer are sent with its end, which is one write to the socket less.
        `finish` sends all text that is missing: they are looked at here only if their ids or log-probs are told too.
        """
        last = last and self._request.count == 1
        if not tokens or (last and self._request.prompt is None and not self._request.logprobs):
            return
        told = token_logprobs(self._tokenizer, tokens, logprobs, best) if self._request.logprobs else ()
        content = self._contents[index]
        text, reasoning = content.push(tokens), content.reasoning
        if text:
            self._sent[index].write(text)
        if reasoning:
            self._reasoned[index].write(reasoning)
        calls = [NewCall(call_id(self.prompt_tokens, call.number), *call) for call in content.calls]
        data = self._writer.delta(index, Delta(text, reasoning, tokens, told, calls))
        if last:
            self._held = data
        else:
            await self._write(data)

    async def finish(self, reply: Reply) -> bool:
        """Sends the rest of the text and of tool calls, and the end. Returns False if the client had disconnected."""
        if all(answer.finish == "abort" for answer in reply.answers):
            return True  # the client closed the stream: a repeated request gets a new answer
        data = self._held
        for index, answer in enumerate(reply.answers):
            rest = _rest(answer.message["content"], self._sent[index].getvalue())
            reasoning = _rest(answer.message.get("reasoning_content"), self._reasoned[index].getvalue())
            if rest or reasoning:
                data += self._writer.delta(index, Delta(rest, reasoning))
        try:
            await self._write(data + self._writer.finish(reply), last=True)
        except ConnectionResetError:
            return False
        return True

    async def fail(self, error: GatewayError) -> web.StreamResponse:
        with contextlib.suppress(ConnectionResetError):
            await self._write(self._writer.error(error), last=True)
        return self.response

    async def _write(self, data: bytes, *, last: bool = False, beat: bool = False) -> None:
        async with self._writing:
            self._spoke = asyncio.get_running_loop().time()
            if not self.begun:
                self.begun = True
                await self.response.prepare(self._http)
                data = self._writer.start(self.prompt_tokens) + data
            data += self._writer.heartbeat() if beat else b""
            if data or last:
                write = self.response.write_eof if last else self.response.write
                await send(self._http, lambda: write(data), len(data), self._reader_wait_s)


async def send(http: web.Request, write: Callable[[], Awaitable[None]], size: int, wait_s: float) -> None:
    """`write` sends `size` bytes of an answer. Raises ConnectionResetError if the client has disconnected, or has read
    nothing for `wait_s` while data waited for it: its connection is closed then."""
    try:
        await _send_in_time(http, write, size, wait_s)
    except ConnectionError as error:  # aiohttp raises a plain one if the connection is reset while a write waits
        raise ConnectionResetError(str(error)) from error


async def _send_in_time(http: web.Request, write: Callable[[], Awaitable[None]], size: int, wait_s: float) -> None:
    transport = http.transport
    if transport is None or (size < _BUFFERED and not transport.get_write_buffer_size()):
        await write()  # nearly always: a timer would cost more than the write
        return
    try:
        async with asyncio.timeout(wait_s):
            await write()
    except TimeoutError:
        transport.abort()
        raise ConnectionResetError(f"the client has read nothing of its answer for {wait_s:g} s") from None


def _rest(whole: str | None, sent: str) -> str:
    """What of the whole text is not sent yet."""
    return whole[len(sent) :] if whole and whole.startswith(sent) else ""


def _content_stream(request: ModelRequest, format: ChatFormat, tokenizer: Tokenizer) -> ContentStream:
    if request.prompt is None:
        return format.content_stream(request.stop)
    ends = [tokenizer.decode([token]) for token in request.sampling.stop_tokens]
    return ContentStream(tokenizer, ends=[*ends, *request.stop])


def token_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[float], best: Best
) -> list[TokenLogprob]:
    """The text of each token alone. A token that is a part of a character has U+FFFD."""
    texts = [tokenizer.decode([token]) for token in tokens]
    others = [[(tokenizer.decode([token]), logprob) for token, logprob in each] for each in best] or [[]] * len(tokens)
    return list(map(TokenLogprob, texts, logprobs, others))
