"""A stand-in for an engine: it implements the engine's HTTP contract, but its tokens come from a script, not a model.

Log-probs, routes and versions are computed from positions, so that tests can tell where each number came from.
test_real_engine.py uses the real engine.
"""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

LAYERS, TOP_K = 2, 2


def route_row(position: int, engine: int = 0) -> np.ndarray:
    return np.full((LAYERS, TOP_K), (position + 100 * engine) % 256, np.uint8)


@dataclass
class StandIn:
    """Returns `answers` one after the other, then the last one again. An answer longer than `max_tokens` is cut."""

    answers: list[list[int]]
    name: str = "stand-in"
    number: int = 0  # version
    line: str = "main"
    serves: dict[str, Any] | None = None  # what it declares
    gate: asyncio.Event | None = None  # answers wait for it
    switch_after: int | None = None  # tokens of each answer after which the version increases by one
    switch_line: str | None = None  # the line it switches to then
    die_after: int | None = None  # tokens after which the connection breaks, once
    token_delay_s: float = 0.0
    hold_after: int | None = None  # tokens of each answer after which it waits for `release`
    release: asyncio.Event = field(default_factory=asyncio.Event)
    context_limit: int | None = None  # a context of this many tokens gets an answer without a token
    timing: dict[str, float] = field(default_factory=dict)  # what it reports about each answer
    refuse: tuple[int, str] | None = None  # (status, message) for every request
    token: str | None = None  # the token a request must have
    alive: bool = True
    health_body: Any = None  # replaces the real one
    requests: list[dict[str, Any]] = field(default_factory=list)
    tag: int = 0  # makes the routes of two engines differ
    cached: dict[str, int] = field(default_factory=dict)  # session -> positions computed
    cancelled: int = 0

    async def asked(self, times: int = 1) -> None:
        """Returns when it has received `times` requests."""
        while len(self.requests) < times:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", self.generate)
        app.router.add_get("/health", self.health)
        return app

    def policy(self) -> dict[str, Any]:
        return {"line": self.line, "number": self.number, "form": "bf16", "digest": f"digest-{self.number}"}

    async def health(self, request: web.Request) -> web.Response:
        if not self.alive:
            return web.Response(status=500)
        body = {
            "engine": self.name,
            "region": "home",
            "policy": self.policy(),
            "running": 0,
            "waiting": 0,
            "paused": False,
            "serves": self.serves,
        }
        return web.json_response(body if self.health_body is None else self.health_body)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.requests.append(body)
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "the engine token is wrong"}, status=401)
        if self.refuse is not None:
            return web.json_response({"error": self.refuse[1]}, status=self.refuse[0])
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        answer = answer[: body["sampling"]["max_tokens"]]
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        try:
            if self.gate is not None:
                await self.gate.wait()
            await self._write(request, response, body, answer)
        except (ConnectionResetError, asyncio.CancelledError):
            self.cancelled += 1
            raise
        return response

    async def _write(self, request: web.Request, response: web.StreamResponse, body: Any, answer: list[int]) -> None:
        context, pieces = body["tokens"], [[token] for token in answer] if body["stream"] else [answer]
        if self.context_limit is not None and len(context) >= self.context_limit:
            await response.write(b'{"tokens": [], "logprobs": [], "policy": [], "policies": [], "finish": "length"}\n')
            return
        oldest, done = self.policy(), 0
        for index, piece in enumerate(pieces):
            chunk = self._chunk(body["session"], len(context), piece, done)
            if body["top_logprobs"]:
                pairs = zip(piece, chunk["logprobs"], strict=True)
                chunk["top_logprobs"] = [[(token, value), (token + 1, value - 1)] for token, value in pairs]
            done += len(piece)
            if self.die_after is not None and done >= self.die_after:
                self.die_after = None
                assert request.transport is not None
                request.transport.abort()
                return
            await asyncio.sleep(self.token_delay_s)
            if self.hold_after is not None and done > self.hold_after:
                await self.release.wait()
            if index == len(pieces) - 1:
                stopped = answer and answer[-1] in body["sampling"]["stop_tokens"]
                chunk |= {"finish": "stop" if stopped else "length", "oldest_kv_policy": oldest, "cached_tokens": 1}
                chunk["timing"] = self.timing
            await response.write(json.dumps(chunk).encode() + b"\n")

    def _chunk(self, session: str, context: int, piece: list[int], done: int) -> dict[str, Any]:
        policies, policy = [self.policy()], []
        for index in range(len(piece)):
            if self.switch_after is not None and done + index == self.switch_after:
                self.number += 1
                self.line = self.switch_line or self.line
                policies.append(self.policy())
            policy.append(len(policies) - 1)
        first, last = self.cached.get(session, 0), context + done + len(piece) - 1
        if first >= last:  # a repeated answer: the cache does not fit
            first = 0
        self.cached[session] = last
        rows = np.stack([route_row(position, self.tag) for position in range(first, last)])
        return {
            "tokens": piece,
            "logprobs": [-(context + done + index) / 1000 for index in range(len(piece))],
            "policy": policy,
            "policies": policies,
            "routes_start": first,
            "routes": {"shape": rows.shape, "dtype": "uint8", "data": base64.b64encode(rows.tobytes()).decode()},
            "finish": None,
            "oldest_kv_policy": None,
            "cached_tokens": 0,
            "timing": {},
        }
