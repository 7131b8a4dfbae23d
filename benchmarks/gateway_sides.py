"""The two sides of `benchmarks.gateway`, each in a process of its own:

    python -m benchmarks.gateway_sides engine PORT ANSWER_FILE
    python -m benchmarks.gateway_sides rate DIRECTORY PORT PID SECONDS STREAM
    python -m benchmarks.gateway_sides latency DIRECTORY PORT STUB_PORT RATE SECONDS STREAM
    python -m benchmarks.gateway_sides streams PORT COUNT TOKENS PAUSE_MS

`engine`: the stub behind the gateway. It speaks the engine's protocol for ours (POST /generate, GET /health) and OpenAI
chat completions for others. The file holds the token ids of the answer as a JSON list. `seed` in a request is the pause
per token in milliseconds; such an answer is as long as the request allows.
`rate`: users who never pause; prints requests per second, and the CPU milliseconds of process PID per request.
`latency`: RATE requests per second, whatever the answers take, in short turns at the server and at the stub behind it;
prints percentiles of both.
`streams`: opens COUNT streams, 200 per second, each with its own connection and conversation, of TOKENS tokens with
PAUSE_MS milliseconds between two. Every few seconds it prints how many are open, ended and failed, at last the tokens
of those that ended well, what went wrong with the others, and the milliseconds between two arrivals.

Lines are JSON objects. Nothing here parses JSON, because it shares the cores with what is measured. DIRECTORY holds
words.txt: the text that conversations are made of.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
import time
from array import array
from collections import Counter, deque
from pathlib import Path
from typing import Any

KEY, ADMIN = "benchmark-key", "benchmark-admin"
TOKENS, PIECES = 64, 8  # of an answer; a stream has 8 pieces
USERS = 16
TURNS_OF_CONVERSATION = 6
TURNS_OF_LATENCY = 5
PACED_USERS = 24  # of which each asks in its turn
_MESSAGES = 9  # at the start of a conversation
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_SESSION = re.compile(rb"\r\n(x-rollmill-session: *[^\r]+\r\n)", re.IGNORECASE)
_CONTENT = re.compile(rb'"content": ?"((?:[^"\\]|\\.)*)"')
_PER_SECOND = 200
_PROGRESS_S = 5.0
_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
BACKLOG = 2048  # of the stub
_POLICY = {"line": "main", "number": 0, "form": "bf16", "digest": "stub"}
_HEALTH = {"engine": "stub", "region": "home", "policy": _POLICY, "running": 0, "waiting": 0, "paused": False}
_STREAM = re.compile(rb'"stream": ?true')
_SEED = re.compile(rb'"seed": ?(\d+)')
_MOST = re.compile(rb'"max_tokens": ?(\d+)')
_CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_END = b"0\r\n\r\n"


class Conversations:
    """Conversations of about 2,000 tokens, as the JSON of their messages."""

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._random = random.Random(0)

    def new(self) -> bytes:
        """Messages that nobody else has."""
        messages = []
        for index in range(_MESSAGES):
            start = self._random.randrange(len(self._words) // 2)
            words = self._words[start : start + len(self._words) // (2 * _MESSAGES)]
            content = f"{self._random.random()} {' '.join(words)}"
            messages.append({"role": "assistant" if index % 2 else "user", "content": content})
        return json.dumps(messages).encode()[1:-1]


class User(asyncio.Protocol):
    """Sends a request, appends the answer, sends the next, over one connection."""

    def __init__(self, conversations: Conversations, stream: bool) -> None:
        self._conversations, self._stream = conversations, stream
        self._messages, self._turns, self._session = b"", TURNS_OF_CONVERSATION, b""
        self._options = b'],"max_tokens":%d,"stream":%b}' % (TOKENS, b"true" if stream else b"false")
        self._pieces: list[bytes] = []
        self._left: int | None = None  # bytes of a body with a length
        self._answered: asyncio.Future[float] | None = None

    def skip(self, turns: int) -> None:
        """The conversation ends this many turns sooner."""
        self._turns += turns

    async def ask(self) -> float:
        """Returns the seconds until the whole answer is there."""
        if self._turns == TURNS_OF_CONVERSATION:
            self._messages, self._turns, self._session = self._conversations.new(), 0, b""
        self._turns += 1
        body = b'{"model":"rollmill","messages":[' + self._messages + self._options
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n" % KEY.encode()
        head += b"Content-Type: application/json\r\n%bContent-Length: %d\r\n\r\n" % (self._session, len(body))
        self._pieces, self._left, self._answered = [], None, asyncio.get_running_loop().create_future()
        started = time.perf_counter()
        self._transport.write(head + body)
        ended = await self._answered
        self._continue(b"".join(self._pieces))
        return ended - started

    def _continue(self, answer: bytes) -> None:
        found = _SESSION.search(answer)
        self._session = found[1] if found else b""
        text = b"".join(_CONTENT.findall(answer))
        said = b',{"role":"assistant","content":"%b"},{"role":"user","content":"go on"}' % text
        self._messages += said

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._pieces:
            if not data.startswith(b"HTTP/1.1 200"):
                self._end(RuntimeError(f"the server answered {data[:300]!r}"))
                return
            end = data.find(b"\r\n\r\n") + 4
            found = _LENGTH.search(data, 0, end)
            self._left = end + int(found[1]) if found else None
        self._pieces.append(data)
        if self._left is not None:
            self._left -= len(data)
        if self._left == 0 or (self._left is None and data.endswith(b"0\r\n\r\n")):
            whole = not self._stream or b"[DONE]" in b"".join(self._pieces[-3:])
            self._end(now if whole else RuntimeError("the stream broke off"))

    def connection_lost(self, error: Exception | None) -> None:
        self._end(RuntimeError(f"the server closed the connection: {error}"))

    def _end(self, outcome: float | Exception) -> None:
        if self._answered is None or self._answered.done():
            return
        if isinstance(outcome, Exception):
            self._answered.set_exception(outcome)
        else:
            self._answered.set_result(outcome)


async def connect(port: int, conversations: Conversations, stream: bool) -> User:
    loop = asyncio.get_running_loop()
    _, user = await loop.create_connection(lambda: User(conversations, stream), "127.0.0.1", port)
    return user


async def rate(conversations: Conversations, port: int, pid: int, seconds: float, stream: bool) -> dict[str, float]:
    """The second figure does not depend on what else runs on this machine."""
    users = [await connect(port, conversations, stream) for _ in range(USERS)]
    await asyncio.gather(*[user.ask() for user in users])  # warm up
    started, used = time.perf_counter(), cpu_seconds(pid)
    done = 0

    async def work(user: User) -> None:
        nonlocal done
        while time.perf_counter() - started < seconds:
            await user.ask()
            done += 1

    await asyncio.gather(*map(work, users))
    elapsed = time.perf_counter() - started
    return {"requests_per_s": done / elapsed, "cpu_ms_per_request": (cpu_seconds(pid) - used) / done * 1000}


class Paced:
    """Requests to one port at a fixed rate. Users ask in turn, and their conversations are of all ages, so every sixth
    request starts one, also after the server has stood still: a user who is new then would start another one."""

    def __init__(self, port: int, conversations: Conversations, stream: bool) -> None:
        self._port, self._conversations, self._stream = port, conversations, stream
        self._idle: deque[User] = deque()
        self.seconds: list[float] = []

    async def warm_up(self) -> None:
        for number in range(PACED_USERS):
            user = await connect(self._port, self._conversations, self._stream)
            await user.ask()
            user.skip(number % TURNS_OF_CONVERSATION)
            self._idle.append(user)

    async def run(self, rate: float, seconds: float) -> None:
        async with asyncio.TaskGroup() as group:
            started = time.perf_counter()
            for index in range(int(rate * seconds)):
                await asyncio.sleep(max(0.0, started + index / rate - time.perf_counter()))
                group.create_task(self._one())

    async def _one(self) -> None:
        user = self._idle.popleft() if self._idle else await connect(self._port, self._conversations, self._stream)
        self.seconds.append(await user.ask())
        self._idle.append(user)


async def latency(
    conversations: Conversations, port: int, stub: int, rate: float, seconds: float, stream: bool
) -> dict[str, dict[str, float]]:
    direct, through = (Paced(each, conversations, stream) for each in (stub, port))
    for paced in (direct, through):
        await paced.warm_up()
    for _ in range(TURNS_OF_LATENCY):
        await direct.run(rate, seconds / TURNS_OF_LATENCY)
        await through.run(rate, seconds / TURNS_OF_LATENCY)
    return {"direct": percentiles(direct.seconds), "through": percentiles(through.seconds)}


def percentiles(seconds: list[float]) -> dict[str, float]:
    shares = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "longest": 1.0}
    return {name: percentile(seconds, share) * 1000 for name, share in shares.items()}


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def family(pid: int) -> list[int]:
    """A process and its children: the workers of a gateway."""
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def cpu_seconds(pid: int) -> float:
    """Of a process and its children."""
    stats = [Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split() for each in family(pid)]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    """Of a process and its children; memory that they share counts several times."""
    pages = sum(int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in family(pid))
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Totals:
    def __init__(self) -> None:
        self.gaps = array("f")  # milliseconds
        self.opened = 0
        self.ended = 0
        self.tokens = 0  # of streams that ended well, as their usage says
        self.faults: Counter[str] = Counter()


class Stream(asyncio.Protocol):
    """One request and its answer."""

    def __init__(self, request: bytes, totals: Totals) -> None:
        self._request, self._totals = request, totals
        self._tail = b""
        self._heard = 0.0
        self.done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()  # what went wrong

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._totals.opened += 1
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now, totals = time.perf_counter(), self._totals
        if not self._heard and not data.startswith(b"HTTP/1.1 200"):
            self._end(data.partition(b"\r\n")[0].decode(errors="replace"))
            return
        if self._heard:
            totals.gaps.append((now - self._heard) * 1000)
        self._heard = now
        self._tail = (self._tail + data)[-1024:]
        if b"[DONE]" in self._tail:
            found = _TOKENS.search(self._tail)
            totals.tokens += int(found[1]) if found else 0
            self._end(None if found else "no usage")
        elif b'"error"' in data:
            self._end("an error in the stream")

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"the connection was closed: {error}")

    def _end(self, fault: str | None) -> None:
        if self.done.done():
            return
        self.done.set_result(fault)
        if fault is None:
            self._totals.ended += 1
        else:
            self._totals.faults[fault] += 1
        self._transport.close()


def request_bytes(text: str, tokens: int, pause_ms: int) -> bytes:
    messages = [{"role": "user", "content": text}]
    body = {"model": "rollmill", "messages": messages, "max_tokens": tokens, "seed": pause_ms, "stream": True}
    data = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


async def hold(port: int, count: int, tokens: int, pause_ms: int) -> Totals:
    totals = Totals()

    async def one(number: int) -> None:
        await asyncio.sleep(number / _PER_SECOND)
        request = request_bytes(f"stream {number}", tokens, pause_ms)
        try:
            loop = asyncio.get_running_loop()
            _, stream = await loop.create_connection(lambda: Stream(request, totals), "127.0.0.1", port)
            await stream.done
        except OSError as error:
            totals.faults[f"no connection: {error.strerror}"] += 1

    telling = asyncio.create_task(tell(totals))
    await asyncio.gather(*[one(number) for number in range(count)])
    telling.cancel()
    return totals


async def tell(totals: Totals) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_S)
        failed = totals.faults.total()
        open_now = totals.opened - totals.ended - failed
        print(json.dumps({"open": open_now, "ended": totals.ended, "failed": failed}), flush=True)


class Answers:
    """Everything that the stub sends, as bytes."""

    def __init__(self, answer: list[int]) -> None:
        each = TOKENS // PIECES
        pieces = [_chunk(answer[at : at + each], at + each == TOKENS) for at in range(0, TOKENS, each)]
        self.health = _whole(json.dumps(_HEALTH).encode())
        self.generated = _whole(_chunk(answer, True))
        self.pieces = [_framed(piece) for piece in pieces]
        self.single = [_framed(_chunk([token], index == TOKENS - 1)) for index, token in enumerate(answer)]
        head = {"id": "x", "created": 0, "model": "stub"}
        message = {"role": "assistant", "content": "word " * TOKENS}
        usage = {"prompt_tokens": 2000, "completion_tokens": TOKENS, "total_tokens": 2000 + TOKENS}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        self.chat = _whole(
            json.dumps({**head, "object": "chat.completion", "choices": [choice], "usage": usage}).encode()
        )
        self.events = [_framed(_event(head, piece)) for piece in range(PIECES)] + [_framed(b"data: [DONE]\n\n")]


def _chunk(tokens: list[int], last: bool) -> bytes:
    facts: dict[str, Any] = {
        "tokens": tokens,
        "logprobs": [-0.5] * len(tokens),
        "policy": [0] * len(tokens),
        "policies": [_POLICY],
        "finish": "stop" if last else None,
    }
    return json.dumps(facts | ({"oldest_kv_policy": _POLICY} if last else {})).encode() + b"\n"


def _event(head: dict[str, Any], piece: int) -> bytes:
    delta = {"role": "assistant", "content": "word " * (TOKENS // PIECES)}
    choice = {"index": 0, "delta": delta, "finish_reason": "length" if piece == PIECES - 1 else None}
    return b"data: " + json.dumps({**head, "object": "chat.completion.chunk", "choices": [choice]}).encode() + b"\n\n"


def _whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Connection(asyncio.Protocol):
    """Reads one request after the other."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._pending = b""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        data = self._pending + data if self._pending else data
        end = data.find(b"\r\n\r\n") + 4
        found = _LENGTH.search(data, 0, end) if end > 3 else None
        if end <= 3 or (found and len(data) < end + int(found[1])):
            self._pending = data
            return
        self._pending = b""
        self._answer(data, end)

    def _answer(self, data: bytes, end: int) -> None:
        answers, stream = self._answers, _STREAM.search(data, end) is not None
        if data.startswith(b"GET"):
            self._transport.write(answers.health)
        elif not data.startswith(b"POST /generate"):
            self._send(answers.events if stream else [], answers.chat)
        elif found := _SEED.search(data, end):
            limit = _MOST.search(data, end)
            self._transport.write(_CHUNKED)
            self._send_slowly(0, int(limit[1]) if limit else TOKENS, int(found[1]) / 1000, self._loop.time())
        else:
            self._send(answers.pieces if stream else [], answers.generated)

    def _send(self, pieces: list[bytes], whole: bytes) -> None:
        """`pieces`, each with a write of its own as an engine makes them; without any, `whole`."""
        if not pieces:
            self._transport.write(whole)
            return
        self._transport.write(_CHUNKED + pieces[0])
        for piece in pieces[1:-1]:
            self._transport.write(piece)
        self._transport.write(pieces[-1] + _END)

    def _send_slowly(self, number: int, tokens: int, pause_s: float, started: float) -> None:
        """One token per pause."""
        first, *middle, last = self._answers.single
        if number:
            token = last if number == tokens else first if number == 1 else middle[number % len(middle)]
            self._transport.write(token + _END if number == tokens else token)
        if number < tokens:
            due = started + (number + 1) * pause_s
            self._timer = self._loop.call_at(due, self._send_slowly, number + 1, tokens, pause_s, started)


async def serve(port: int, answers: Answers) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(answers), "127.0.0.1", port, backlog=BACKLOG)
    await server.serve_forever()


def streams_figures(totals: Totals) -> dict[str, Any]:
    gaps = sorted(totals.gaps)
    places = {"p50": len(gaps) // 2, "p99": len(gaps) * 99 // 100, "longest": -1}
    between = {f"between_{name}_ms": gaps[place] if gaps else None for name, place in places.items()}
    return {"ended": totals.ended, "tokens": totals.tokens, **between, "faults": dict(totals.faults)}


def main() -> None:
    side, first, *rest = sys.argv[1:]
    if side == "engine":
        asyncio.run(serve(int(first), Answers(json.loads(Path(rest[0]).read_text()))))
    elif side == "streams":
        print(json.dumps(streams_figures(asyncio.run(hold(int(first), *map(int, rest))))))
    else:
        conversations = Conversations((Path(first) / "words.txt").read_text().split(" "))
        port, other, *numbers, stream = rest
        measure = rate if side == "rate" else latency
        found = measure(conversations, int(port), int(other), *map(float, numbers), stream == "True")
        print(json.dumps(asyncio.run(found)))


if __name__ == "__main__":
    main()
