"""The model as an agent program in a machine sees it: an endpoint on the machine's loopback address.

    program ──(http://127.0.0.1:PORT/v1)──► proxy, in this process ──(model URL, session key)──► gateway

The proxy serves one episode. It forwards requests to the model and nothing else, always with the key of the episode's
session, so a program reaches no other route, session or host. It sets the sampling of each request: the agent stays as
it is, and the run decides what it trains on.

Whatever a program sends is bounded: connections at once and per second, requests per episode, bytes per request, one
request at a time. An answer is read from the gateway whole before the program gets it, so that a slow reader holds
nothing up there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web

from rollmill.backoff import Backoff
from rollmill.environments.harnesses.model import RETRY_STATUS, UNREACHABLE, answer_timeout, broke_off, sampling_fields
from rollmill.types import Sampling

# path of a request for an answer → the field that limits the tokens of the answer
_ANSWERS = {"/chat/completions": "max_tokens", "/messages": "max_tokens", "/responses": "max_output_tokens"}
_MAX_CONNECTIONS = 32
_BETWEEN_CONNECTIONS_S = 0.01
_quiet = logging.getLogger(f"{__name__}.requests")
_quiet.disabled = True  # a program may send any nonsense: that is no line in our log


class ModelProxy:
    """`turns` answers went to the program. `ended` is set when it must be stopped: see `problem`, `flooded`."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str,
        api_key: str,
        sampling: Sampling,
        *,
        model: str,
        deadline_s: float,
        max_requests: int,
        max_bytes: int,
    ) -> None:
        self._session = session
        self._base_url = base_url.rstrip("/")
        self._api_key = api_key
        self._sampling = sampling
        self._model = model
        self._deadline_s = deadline_s
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._one = asyncio.Lock()  # the gateway answers one request of a session at a time
        self._used = 0  # requests and connections so far
        self.turns = 0
        self.problem: str | None = None  # the model cannot be reached, and the program is not the cause
        self.flooded = False
        self.ended = asyncio.Event()

    @contextlib.asynccontextmanager
    async def serve(self, listener: socket.socket) -> AsyncIterator[None]:
        """Answer what arrives at `listener`; closes it in the end."""
        app = web.Application(client_max_size=self._max_bytes, middlewares=[self._admit])
        for path in _ANSWERS:
            app.router.add_post(f"/v1{path}", self._complete)
        app.router.add_post("/v1/messages/count_tokens", self._count)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_quiet,
            handler_cancellation=True,  # a program that hangs up stops waiting: the gateway keeps the answer for it
            auto_decompress=False,  # a small body could become a large one
            shutdown_timeout=0.1,
        )
        await runner.setup()
        assert runner.server is not None
        listener.setblocking(False)
        accepting = asyncio.create_task(self._accept(listener, runner.server))
        try:
            yield
        finally:
            accepting.cancel()
            await asyncio.wait([accepting])
            listener.close()
            await runner.cleanup()

    async def _accept(self, listener: socket.socket, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        while not self.flooded:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # too many open files in this process, for example
                await asyncio.sleep(1.0)
                continue
            self._use()
            if len(server.connections) < _MAX_CONNECTIONS:
                await loop.connect_accepted_socket(server, connection)
            else:
                connection.close()
            await asyncio.sleep(_BETWEEN_CONNECTIONS_S)  # a flood of connections must cost this process little
        listener.close()

    def _use(self) -> None:
        self._used += 1
        if self._used > 2 * self._max_requests:
            self.flooded = True
            self.ended.set()

    @web.middleware
    async def _admit(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self._use()
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        key = bearer or request.headers.get("x-api-key", "")  # Anthropic's clients send the second
        if not hmac.compare_digest(key.encode(errors="replace"), self._api_key.encode()):
            return _refusal(401, "the key is not that of this episode: it is in OPENAI_API_KEY and ANTHROPIC_API_KEY")
        if self.flooded:
            return _refusal(429, "too many requests")
        return await handler(request)

    async def _models(self, request: web.Request) -> web.Response:
        """List the one model.

        Needs: the key of the episode.
        Returns: an OpenAI list of models.
        """
        return web.json_response(
            {"object": "list", "data": [{"id": self._model, "object": "model", "owned_by": "you"}]}
        )

    async def _complete(self, request: web.Request) -> web.Response:
        """Forward a request to the model.

        Needs: the key of the episode.
        Takes: an OpenAI chat completion or response, or an Anthropic message; the run replaces its model and sampling.
        Returns: the model's answer, whole, also if it is a stream; 503 if it cannot be reached.
        """
        async with self._one:
            if self.turns >= self._max_requests:
                self.flooded = True
                self.ended.set()
                return _refusal(429, f"this episode has had its {self._max_requests} answers")
            try:
                body = json.loads(await request.read())
            except (ValueError, RecursionError):
                body = None
            if not isinstance(body, dict):
                return _refusal(400, "the request is not a JSON object")
            path = request.path.removeprefix("/v1")
            return await self._forward(path, json.dumps(self._sampled(body, _ANSWERS[path])).encode())

    async def _count(self, request: web.Request) -> web.Response:
        """Forward a conversation whose tokens are counted. It is not a turn."""
        async with self._one:
            try:
                body = json.loads(await request.read())
                data = json.dumps({**body, "model": self._model}).encode()
            except (ValueError, TypeError, RecursionError):
                return _refusal(400, "the request is not a JSON object")
            return await self._forward("/messages/count_tokens", data, turns=0)

    def _sampled(self, body: dict[str, Any], limit: str) -> dict[str, Any]:
        """The request with the model and the sampling of the run. The program may ask for a shorter answer."""
        fields = sampling_fields(self._sampling, self.turns + 1)
        wishes = [body.pop("max_completion_tokens", None), body.get(limit), fields.pop("max_tokens")]
        shortest = min(wish for wish in wishes if type(wish) is int and wish > 0)
        return body | fields | {limit: shortest, "model": self._model}

    async def _forward(self, path: str, data: bytes, turns: int = 1) -> web.Response:
        """Retries while the gateway restarts. When it stays away, `problem` says so and the episode ends."""
        backoff = Backoff(0.05, 2.0, patience=self._deadline_s, jitter=0.5)
        while True:
            self.problem = None  # while the model is being asked, the time is the program's
            began = time.monotonic()
            try:
                answer = await self._ask(path, data, backoff.left())
                if answer.status not in (*RETRY_STATUS, 401):
                    self.turns += turns if answer.status == 200 else 0
                    return answer
                self.problem = f"{self._base_url} answered {answer.status}: {answer.text or ''}"[:500]
                if answer.status == 401:  # the session has ended: the program can do nothing about it
                    break
            except UNREACHABLE as error:
                self.problem = f"{self._base_url} cannot be reached: {error!r}"
                if broke_off(error):
                    backoff.excuse(time.monotonic() - began)
            pause = backoff.failed()
            if pause > backoff.left():
                break
            await asyncio.sleep(pause)
        self.ended.set()
        return _refusal(503, "the model cannot be reached")

    async def _ask(self, path: str, data: bytes, left_s: float) -> web.Response:
        headers = {"Authorization": f"Bearer {self._api_key}", "Content-Type": "application/json"}
        url = f"{self._base_url}{path}"
        async with self._session.post(url, data=data, headers=headers, timeout=answer_timeout(left_s)) as response:
            return web.Response(
                status=response.status, body=await response.read(), headers={"Content-Type": response.content_type}
            )


def _refusal(status: int, message: str) -> web.Response:
    """An error that clients of OpenAI and of Anthropic can read."""
    error = {"message": message, "type": "invalid_request_error"}
    return web.json_response({"type": "error", "error": error}, status=status)
