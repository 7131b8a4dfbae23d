"""The load generator of `benchmarks.gateway` for many slow streams, in a process of its own.

    python -m benchmarks.gateway_streams PORT COUNT TOKENS PAUSE_MS

Opens COUNT streams, 200 per second, each with its own connection and conversation. Each gets TOKENS tokens with
PAUSE_MS milliseconds between two. Every few seconds it prints how many streams are open, ended and failed. The last
line has the figures: the tokens of the streams that ended well, what went wrong with the others, and the milliseconds
between two arrivals. Lines are JSON objects. It reads bytes and parses no JSON, so that it needs little of the cores
that it shares with the gateway.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from array import array
from collections import Counter

from benchmarks.gateway_stub import KEY

_PER_SECOND = 200
_PROGRESS_S = 5.0
_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


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


def main() -> None:
    totals = asyncio.run(hold(*map(int, sys.argv[1:5])))
    gaps = sorted(totals.gaps)
    found = {
        "ended": totals.ended,
        "tokens": totals.tokens,
        "between_p50_ms": gaps[len(gaps) // 2] if gaps else None,
        "between_p99_ms": gaps[len(gaps) * 99 // 100] if gaps else None,
        "between_longest_ms": gaps[-1] if gaps else None,
        "faults": dict(totals.faults),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
