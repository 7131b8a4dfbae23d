"""A client that sends back what was streamed to it continues its conversation, whatever the tokenizer."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollmill.chat.format import assistant_message
from rollmill.chat.formats.choice import format_of
from rollmill.chat.formats.compact import SPECIAL_TOKENS
from rollmill.chat.tokenizer import Tokenizer
from rollmill.gateway.workers import relay as relay_answer
from tests.chat.conftest import HERMES_TOKENS, TOOLS
from tests.chat.test_streaming import KINDS
from tests.gateway.conftest import LIVE, QUICK, USER, Answers, Door, Mill, until
from tests.gateway.stand_in import StandIn
from tests.gateway.test_fuzz import post


@pytest.mark.parametrize("special", [SPECIAL_TOKENS, HERMES_TOKENS], ids=["compact", "hermes"])
@pytest.mark.parametrize("kind", KINDS)
async def test_the_second_turn_does_not_branch(mill: Mill, kind: str, special: tuple[str, ...]) -> None:
    mill.tokenizer = Tokenizer(KINDS[kind](special))
    mill.format = format_of(mill.tokenizer)  # type: ignore[assignment]
    said = ["All tests pass now, 你好 as they should.", " \n", "Done."]
    script = [mill.format.render_answer(assistant_message(text, []), TOOLS) for text in said]
    door = await mill.gateway(await mill.engine(StandIn(list(script))))
    mill.plan("a")
    key = await door.open("a", run="run", task_id="t", group_id="g")
    messages: list[Any] = [USER]
    for tokens in script:
        content = await stream_content(door, key, messages)
        assert content == mill.format.parse(tokens, TOOLS)["content"]
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]
    (segment,) = (await door.seal("a")).segments
    assert len(segment.spans) == len(said)


class Endless(StandIn):
    """Its first answer does not end by itself."""

    async def _write(self, request: web.Request, response: web.StreamResponse, body: Any, answer: list[int]) -> None:
        if len(self.requests) > 1:
            return await super()._write(request, response, body, answer)
        piece = [*answer[:-1]] * 500
        facts = {"logprobs": [-1.0] * len(piece), "policy": [0] * len(piece), "policies": [self.policy()]}
        line = json.dumps({"tokens": piece, **facts}).encode() + b"\n"
        while True:
            await response.write(line)


@contextlib.asynccontextmanager
async def passing_on(url: str, reader_wait_s: float) -> AsyncIterator[str]:
    """A server that passes on what is at `url`, by the code of workers."""

    async def relay(http: web.Request) -> web.StreamResponse:
        headers = {"Authorization": http.headers["Authorization"]}
        async with client.post(url + http.path, data=await http.read(), headers=headers) as response:
            return await relay_answer(http, response, web.StreamResponse(), reader_wait_s)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", relay)
    async with aiohttp.ClientSession() as client, TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


def send_little(url: str) -> None:
    """The system buffers little of what the server at `url`, in this process, sends over later connections."""
    port = int(url.rpartition(":")[2])
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it is no socket of this kind
            found = socket.socket(fileno=int(name))
            try:
                if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and found.getsockname()[1] == port:
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            finally:
                found.detach()  # it is the server's


@pytest.mark.parametrize("workers", [False, True], ids=["", "forwarded"])
async def test_a_client_that_does_not_read_its_stream_loses_its_place(
    mill: Mill, answers: Answers, workers: bool
) -> None:
    engine = Endless([answers.text("a long answer")])
    config = QUICK.model_copy(update={"reader_wait_s": 0.3, "engine_requests": 1, "engine_wait_s": 120.0})
    door = await mill.gateway(await mill.engine(engine), config=config)
    url = door.url
    if workers:  # the client's connection is at a worker that only passes on what this gateway answers
        url = await mill.stack.enter_async_context(passing_on(door.url, config.reader_wait_s))
    for each in (url, door.url):
        send_little(each)
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(post(json.dumps({"messages": [USER], "stream": True}).encode()))
        await engine.asked(1)
        assert (await door.ask(LIVE, [{"role": "user", "content": "hello"}]))[0] == 200  # it had waited for the place

        async def is_counted() -> bool:
            return 'answers_cut_short_total{traffic="production"} 1' in await door.metrics()

        await until(is_counted)  # its place is free a moment before


async def stream_content(door: Door, key: str, messages: list[Any]) -> str:
    body = {"model": "rollmill", "messages": messages, "tools": TOOLS, "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    async with door.http.post(f"{door.url}/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        lines = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"] for line in lines]
    return "".join(choice[0]["delta"].get("content") or "" for choice in choices if choice)
