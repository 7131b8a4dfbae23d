"""The stub engine of `benchmarks.gateway`, in a process of its own.

    python -m benchmarks.gateway_stub PORT ANSWER_FILE

It computes nothing and parses no JSON, because it shares the cores with what is measured. It speaks the engine's
protocol for our gateway (POST /generate, GET /health) and OpenAI chat completions for others. The file holds the token
ids of the answer as a JSON list. `seed` in a request is the pause per token in milliseconds; such an answer is as long
as the request allows.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

KEY, ADMIN = "benchmark-key", "benchmark-admin"
TOKENS, PIECES = 64, 8  # of an answer; a stream has 8 pieces
BACKLOG = 2048
_POLICY = {"line": "main", "number": 0, "form": "bf16", "digest": "stub"}
_HEALTH = {"engine": "stub", "region": "home", "policy": _POLICY, "running": 0, "waiting": 0, "paused": False}
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_STREAM = re.compile(rb'"stream": ?true')
_SEED = re.compile(rb'"seed": ?(\d+)')
_MOST = re.compile(rb'"max_tokens": ?(\d+)')
_CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_END = b"0\r\n\r\n"


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


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), Answers(json.loads(Path(sys.argv[2]).read_text()))))
