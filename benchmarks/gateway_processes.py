"""The processes of `benchmarks.gateway`: a stub engine, and a gateway in front of it.

    python -m benchmarks.gateway_processes stub PORT DIRECTORY
    python -m benchmarks.gateway_processes gateway PORT STUB_URL DIRECTORY WORKERS

The directory holds tokenizer.json. The stub computes nothing. It speaks the engine's protocol for our gateway and
OpenAI chat completions for others. `seed` in a request is the pause per token in milliseconds; such an answer is as
long as the request allows.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

from aiohttp import web

from rollmill.chat.format import assistant_message
from rollmill.chat.formats.choice import format_of
from rollmill.chat.tokenizer import Tokenizer
from rollmill.cluster.roles.gateway import prepare_process
from rollmill.cluster.workers import BACKLOG, run_workers
from rollmill.gateway.app import make_app
from rollmill.gateway.config import EngineEndpoint, GatewayConfig
from rollmill.gateway.workers import Workers
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.store import TrajectoryStore

TOKENS, PIECES = 64, 8  # of an answer; a stream has 8 pieces
KEY, ADMIN = "benchmark-key", "benchmark-admin"
_POLICY = {"line": "main", "number": 0, "form": "bf16", "digest": "stub"}


ANSWER = web.AppKey("answer", list[int])
SINGLE = web.AppKey("single", list[bytes])  # the chunk of each token of the answer


async def generate(request: web.Request) -> web.StreamResponse:
    body, answer = json.loads(await request.read()), request.app[ANSWER]
    response = web.StreamResponse()
    await response.prepare(request)
    if body["sampling"]["seed"]:
        await _generate_slowly(request, response, body["sampling"]["max_tokens"], body["sampling"]["seed"] / 1000)
        return response
    pieces = PIECES if body["stream"] else 1
    for piece in range(pieces):
        own = answer[piece * TOKENS // pieces : (piece + 1) * TOKENS // pieces]
        await response.write(_chunk(own, piece == pieces - 1))
    return response


async def _generate_slowly(request: web.Request, response: web.StreamResponse, tokens: int, pause_s: float) -> None:
    """One token per pause. The chunks are made before: thousands of streams share a core with the gateway."""
    first, *middle, last = request.app[SINGLE]
    started = time.monotonic()
    for number in range(tokens):
        await asyncio.sleep(started + (number + 1) * pause_s - time.monotonic())
        await response.write(first if not number else last if number == tokens - 1 else middle[number % len(middle)])


def _chunk(tokens: list[int], last: bool) -> bytes:
    facts: dict[str, Any] = {
        "tokens": tokens,
        "logprobs": [-0.5] * len(tokens),
        "policy": [0] * len(tokens),
        "policies": [_POLICY],
        "finish": "stop" if last else None,
    }
    return json.dumps(facts | ({"oldest_kv_policy": _POLICY} if last else {})).encode() + b"\n"


async def health(request: web.Request) -> web.Response:
    return web.json_response(
        {"engine": "stub", "region": "home", "policy": _POLICY, "running": 0, "waiting": 0, "paused": False}
    )


async def chat(request: web.Request) -> web.StreamResponse:
    body = json.loads(await request.read())
    head = {"id": "x", "created": 0, "model": "stub"}
    if not body.get("stream"):
        message = {"role": "assistant", "content": "word " * TOKENS}
        usage = {"prompt_tokens": 2000, "completion_tokens": TOKENS, "total_tokens": 2000 + TOKENS}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece in range(PIECES):
        choice = {"index": 0, "delta": {"role": "assistant", "content": "word " * (TOKENS // PIECES)}}
        choice["finish_reason"] = "length" if piece == PIECES - 1 else None
        chunk = {**head, "object": "chat.completion.chunk", "choices": [choice]}
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


def stub(port: int, directory: Path) -> None:
    form = format_of(Tokenizer.load(directory / "tokenizer.json"))
    whole = form.render_answer(assistant_message("the sum of two numbers is a number " * 20, []), [])
    app = web.Application(client_max_size=1 << 30)
    app[ANSWER] = [*whole[: TOKENS - 1], whole[-1]]
    app[SINGLE] = [_chunk([token], index == TOKENS - 1) for index, token in enumerate(app[ANSWER])]
    app.router.add_post("/generate", generate)
    app.router.add_get("/health", health)
    app.router.add_post("/v1/chat/completions", chat)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None, backlog=BACKLOG)


def gateway(port: int, engine: str, directory: Path, count: int) -> None:
    tokenizer = Tokenizer.load(directory / "tokenizer.json")
    form = format_of(tokenizer)

    def build(workers: Workers) -> web.Application:
        objects = Objects.open(directory / "store")
        trajectories = TrajectoryStore(open_database(f"sqlite:///{directory}/mill.db"), objects)
        config, endpoints = GatewayConfig(engine_requests=4096), [EngineEndpoint(engine, "home")]
        log = directory / "gateway"
        app = make_app(config, form, tokenizer, endpoints, trajectories, objects, log, ADMIN, KEY, workers=workers)
        prepare_process()
        return app

    if count == 1:
        web.run_app(build(Workers()), host="127.0.0.1", port=port, print=None, access_log=None, backlog=BACKLOG)
        return
    with socket.create_server(("127.0.0.1", port), backlog=BACKLOG) as listening:
        run_workers(build, listening, directory / "gateway", count)


if __name__ == "__main__":
    if sys.argv[1] == "stub":
        stub(int(sys.argv[2]), Path(sys.argv[3]))
    else:
        gateway(int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
