"""Requests and engines that misbehave: no 500, and nothing stays open."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import HealthCheck, Phase, given, settings

from rollmill.gateway.config import EngineEndpoint
from tests.gateway.conftest import QUICK, USER, Answers, Door, Mill, until
from tests.gateway.serve import ADMIN, LIVE
from tests.gateway.stand_in import StandIn
from tests.gateway.test_openai_engine import Server, backend
from tests.later import Later

schemathesis = Later("schemathesis")

FEW = settings(
    max_examples=8,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
KEPT = 4  # connections that may be kept for the next request; the tests send more requests than that
CHAT = "/v1/chat/completions"


@contextlib.asynccontextmanager
async def nothing_stays_open(door: Door, answered: int = 0) -> AsyncIterator[None]:
    """Tasks, files, sockets and sessions are as before, but for one session per request that was answered."""
    await door.admin("POST", "/sessions/nobody/seal", {})  # opens the database, which stays open

    async def settled() -> tuple[int, int]:
        await door.sessions()  # the client's own connection is open
        return len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))

    before, sessions = await settled(), await door.sessions()
    yield

    async def as_before() -> bool:
        now = await settled()
        fewer = now[0] <= before[0] + KEPT and now[1] <= before[1] + 2 * KEPT
        return fewer and await door.sessions() <= sessions + answered

    await until(as_before)


async def send(door: Door, data: bytes, *, close: bool = False) -> int | None:
    """Sends raw bytes. Returns the status of the answer; None if the connection ends without one."""
    host, _, port = door.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        await writer.drain()
        if close:
            return None
        line = await asyncio.wait_for(reader.readline(), 60)
        return int(line.split()[1]) if line else None
    except ConnectionError:
        return None
    finally:
        writer.close()


def post(body: bytes, path: str = CHAT, length: int | None = None, key: str = LIVE) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


async def fuzz(door: Door, *keys: str, **options: Any) -> dict[str, set[int]]:
    """Sends requests made from the OpenAPI document, with each key. Returns the statuses of each operation; none of
    them is 500 or more."""
    async with door.http.get(f"{door.url}/openapi.json") as response:
        schema = schemathesis.openapi.from_dict(await response.json())
    seen: dict[str, set[int]] = {}

    def fuzz_one(operation: Any, key: str) -> None:
        @FEW
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            headers = {"Authorization": f"Bearer {key}"}
            answer = case.call(base_url=door.url, headers=headers, timeout=60, **options)
            seen.setdefault(f"{case.method} {case.path}", set()).add(answer.status_code)
            assert answer.status_code < 500, (case, answer.text)

        check()

    for found in schema.get_all_operations():
        for key in keys:
            await asyncio.to_thread(fuzz_one, found.ok(), key)
    assert 200 in seen[f"POST {CHAT}"] | seen["POST /v1/messages"], seen
    assert 200 in seen["POST /v1/responses"], seen
    return seen


@pytest.mark.slow
async def test_requests_made_from_the_openapi_document_get_no_500(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("x")])))
    await fuzz(door, LIVE, ADMIN)


MALFORMED = [
    post(b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}'),
    post(b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    post(b"[" * 100_000),
    post(b'{"messages": [], "model": "' + b"x" * 100_000 + b'"}'),
    post(b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1e999}'),
    post(b'{"messages": [{"role": "user", "content": "a"}], "seed": ' + b"9" * 5000 + b"}"),
    post(b"{}", path="/sessions/%00/seal", key=ADMIN),
    post(b"{}", path="/sessions/" + "a" * 5000 + "/seal", key=ADMIN),
    post(b"{}", key="\x7f" * 1000),
    post(b"{}", path="/s/%2e%2e%2f/v1/chat/completions"),
    post(b"x" * 2048, path=CHAT),
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
]


async def test_malformed_huge_slow_and_truncated_requests_get_no_500_and_leak_nothing(
    mill: Mill, answers: Answers
) -> None:
    config = QUICK.model_copy(update={"body_wait_s": 0.1, "max_body_bytes": 1 << 20})
    door = await mill.gateway(await mill.engine(StandIn([answers.text("x")])), config=config)
    async with nothing_stays_open(door, answered=1):  # a lone surrogate is replaced
        statuses = [await send(door, data) for data in MALFORMED]
        assert statuses.count(200) == 1
        assert [status for status in statuses if status is not None and status not in range(200, 500)] == [], statuses
        assert await send(door, post(b"x" * (2 << 20))) in (413, None)
        assert await send(door, post(b"{", length=100)) == 408
        for data in (
            post(b"{", length=100),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
            b"POST /v1/chat",
            b"GET /health HTTP/1.1\r\nHost",
        ):
            await send(door, data, close=True)


async def test_clients_that_leave_in_the_middle_of_an_answer_leak_nothing(mill: Mill, answers: Answers) -> None:
    engine = StandIn([answers.text("one two three four")], token_delay_s=0.01)
    door = await mill.gateway(await mill.engine(engine))
    await door.ask(LIVE, [USER])
    body = json.dumps({"messages": [USER], "stream": True, "max_tokens": 50}).encode()
    async with nothing_stays_open(door, answered=8):
        before = len(engine.requests)
        await asyncio.gather(*[send(door, post(body)) for _ in range(8)])
        await engine.asked(before + 8)


JUNK = [
    b"",
    b"\n\n",
    b"{",
    b"null\n",
    b'{"tokens": "x"}\n',
    b'{"tokens": [1], "logprobs": [], "policy": [], "policies": []}\n',
    b'{"tokens": [-1], "logprobs": [0], "policy": [0], "policies": []}\n',
    b'{"tokens": [1], "logprobs": [NaN], "policy": [0], "policies": [{}]}\n',
    b"\xff\xfe\n",
    b"[" * 50_000 + b"\n",
    b"data: {}\n\n",
]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_answers_junk_counts_as_failed(mill: Mill, answers: Answers, stream: bool) -> None:
    junk = iter(JUNK * 100)

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=next(junk))

    engine = StandIn([answers.text("x")])
    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_get("/health", engine.health)
    server = await mill.stack.enter_async_context(TestServer(app))
    config = QUICK.model_copy(update={"engine_wait_s": 0.05})
    door = await mill.gateway(EngineEndpoint(str(server.make_url("")), "home"), config=config)
    async with nothing_stays_open(door):
        for _ in JUNK:
            status, body = await door.ask(LIVE, [USER], stream=stream)
            assert status == 503 and "every engine failed" in body["error"]["message"]


JUNK_CHOICES = [
    b'{"choices": [{"text": 1}]}',
    b'{"choices": [{"text": "x", "token_ids": [-1]}]}',
    b'{"choices": [{"text": "x", "token_ids": [99999999999]}]}',
    b'{"choices": [{"text": "\\ud800"}]}',
    b'{"choices": [{"text": "x", "logprobs": {"token_logprobs": "x"}}]}',
]


class JunkEvents(Server):
    """Sends `streams[0]` as its answer. All but the last are malformed."""

    def __init__(self, good: list[int]) -> None:
        super().__init__("")
        choice = {"text": "fine", "token_ids": good, "finish_reason": "stop"}
        events = [*JUNK, *JUNK_CHOICES, json.dumps({"choices": [choice]}).encode()]
        *junk, last = (b"data: " + event + b"\r\n\r\n" for event in events)
        self.streams = [*junk, b"", b"data: [DONE]\n\n", b"event: x\nid: 1\n\n", last[:-10], last]

    async def complete(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        return web.Response(body=self.streams[0], content_type="text/event-stream")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_backend_that_streams_junk_counts_as_failed(mill: Mill, answers: Answers, stream: bool) -> None:
    server = JunkEvents(answers.text("fine"))
    config = QUICK.model_copy(update={"engine_wait_s": 0.02})
    door = await mill.gateway(await backend(mill, server), config=config, follows=False)
    body: dict[str, Any] = {"messages": [USER], "max_tokens": 100, "stream": stream}
    async with nothing_stays_open(door, answered=1):
        while len(server.streams) > 1:
            await until(door.all_engines_up)
            server.requests.clear()
            status, told = await door.ask(LIVE, **body)
            assert (status, told["error"]["type"]) == (503, "server_error"), (server.streams[0][:80], told)
            assert server.requests and server.requests[0]["stream"] is True
            server.streams.pop(0)
        await until(door.all_engines_up)
        headers = {"Authorization": f"Bearer {LIVE}"}
        async with door.http.post(door.url + CHAT, json=body, headers=headers) as response:
            assert response.status == 200 and "fine" in await response.text()
