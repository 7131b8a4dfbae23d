"""The load generator of `benchmarks.gateway`, in a process of its own.

    python -m benchmarks.gateway_load rate DIRECTORY PORT PID SECONDS STREAM
    python -m benchmarks.gateway_load latency DIRECTORY PORT STUB_PORT RATE SECONDS STREAM

`rate`: users who never pause; prints requests per second, and the CPU milliseconds of process PID per request.
`latency`: RATE requests per second, whatever the answers take, in short turns at the server and at the stub behind it;
prints percentiles of both. The last line is one JSON object. It parses no JSON, because it shares the cores with what
is measured. DIRECTORY holds words.txt: the text that conversations are made of.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
import time
from collections import deque
from pathlib import Path

from benchmarks.gateway_stub import KEY, TOKENS

USERS = 16
TURNS_OF_CONVERSATION = 6
TURNS_OF_LATENCY = 5
PACED_USERS = 24  # of which each asks in its turn
_MESSAGES = 9  # at the start of a conversation
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_SESSION = re.compile(rb"\r\n(x-rollmill-session: *[^\r]+\r\n)", re.IGNORECASE)
_CONTENT = re.compile(rb'"content": ?"((?:[^"\\]|\\.)*)"')


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


def main() -> None:
    kind, directory, *rest = sys.argv[1:]
    conversations = Conversations((Path(directory) / "words.txt").read_text().split(" "))
    if kind == "rate":
        port, pid, seconds, stream = rest
        print(json.dumps(asyncio.run(rate(conversations, int(port), int(pid), float(seconds), stream == "True"))))
    else:
        port, stub, per_s, seconds, stream = rest
        found = latency(conversations, int(port), int(stub), float(per_s), float(seconds), stream == "True")
        print(json.dumps(asyncio.run(found)))


if __name__ == "__main__":
    main()
