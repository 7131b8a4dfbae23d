"""Our own engines: POST /generate, tokens in, chunks out. See `rollmill.inference.engine`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp

from rollmill.errors import EngineError, GatewayError
from rollmill.gateway.config import EngineEndpoint
from rollmill.gateway.routing.engine_http import EngineConnections
from rollmill.inference.engine import GenerateChunk, GenerateRequest
from rollmill.inference.engine_wire import chunk_from_json, chunks_from_json, request_to_json


async def ask(
    connections: EngineConnections,
    endpoint: EngineEndpoint,
    request: GenerateRequest,
    stream: bool,
    encoded: bytes | None = None,
) -> AsyncGenerator[list[GenerateChunk], None]:
    """Yields the chunks that have arrived since the last time; without `stream` one. `encoded`: JSON of the tokens."""
    url = f"{endpoint.url.rstrip('/')}/generate"
    body = request_to_json(request, stream=stream, tokens=encoded)
    async with connections.post(url, body, endpoint.token, whole=not stream) as answer:
        if answer.status != 200:
            refuse(answer.status, await answer.read(2000))
        if not stream:
            yield [chunk_from_json(await answer.read())]
            return
        pending: list[bytes] = []  # the beginning of a line: a chunk with a long prompt's routes is large
        while piece := await answer.read_some():
            head, newline, tail = piece.rpartition(b"\n")
            if not newline:
                pending.append(piece)
                continue
            lines = [line for line in b"".join([*pending, head]).split(b"\n") if line]
            pending = [tail] if tail else []
            if not lines:
                continue
            chunks = chunks_from_json(lines)
            if chunks[-1].finish is not None:
                answer.finish()
            yield chunks


async def ask_health(client: aiohttp.ClientSession, endpoint: EngineEndpoint) -> dict[str, Any]:
    url = f"{endpoint.url.rstrip('/')}/health"
    async with client.get(url, timeout=aiohttp.ClientTimeout(total=5)) as response:
        if response.status != 200:
            raise EngineError(f"health answered {response.status}")
        tree: dict[str, Any] = json.loads(await response.read())
        return tree


def refuse(status: int, body: bytes) -> None:
    """Raises for a failed request. A 400 is wrong on every engine; anything else may work on another one.

    401 is not the client's fault: this gateway holds the wrong token for that engine.
    """
    text = body[:2000].decode(errors="replace")
    if 400 <= status < 500 and status not in (401, 408, 429):
        try:
            error = json.loads(text).get("error", text)
            text = error if isinstance(error, str) else str(error.get("message", error))
        except (ValueError, AttributeError):
            pass
        raise GatewayError(f"the engine refused the request: {text[:500]}", status=400)
    raise EngineError(f"answered {status}: {text[:200]}")
