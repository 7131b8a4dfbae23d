"""Plays on a server of OpenEnv, by its own client. Run by program.py.

The order is {"url", "server": command or none, "patience_s"}. The requests:

    {"field": true}                    is the server there? The field that its actions need, if it is one
    {"reset": {…}, "session": KEY}     begin an episode; the answer has that field too
    {"step": {…}, "session": KEY}      act in it
    {"close": KEY}
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

_MEGABYTES = 4  # of one message
_START_S = 120.0
_LONG_S = 7 * 86400.0  # the episode's own time limit is shorter


@contextlib.asynccontextmanager
async def opened(order: dict[str, Any]) -> AsyncIterator[Callable[[dict[str, Any]], Awaitable[Any]]]:
    from openenv.core.generic_client import GenericEnvClient
    from websockets.exceptions import ConnectionClosed

    url = await start(order["server"]) if order["server"] else order["url"]
    clients: dict[str, Any] = {}

    async def reset(session: str, arguments: dict[str, Any]) -> Any:
        """A server that is full or restarts is asked again for a while."""
        until = time.monotonic() + order["patience_s"]
        while True:
            client = GenericEnvClient(url, message_timeout_s=_LONG_S, max_message_size_mb=_MEGABYTES)
            clients[session] = client
            try:
                return {**told(await client.reset(**arguments)), "field": await field(url)}
            except (OSError, ConnectionClosed, RuntimeError) as error:
                await close(session)
                is_away = not isinstance(error, RuntimeError) or "(code: CAPACITY_REACHED)" in str(error)
                if not is_away or time.monotonic() > until:
                    raise
                await asyncio.sleep(0.2)

    async def step(session: str, action: dict[str, Any]) -> Any:
        try:
            return told(await clients[session].step(action))
        except RuntimeError as error:
            if "(code: VALIDATION_ERROR)" in str(error):
                return {"invalid": True}
            raise

    async def close(session: str) -> None:
        client = clients.pop(session, None)
        if client is not None:
            await client.close()

    async def answer(request: dict[str, Any]) -> Any:
        if "field" in request:
            return await field(url)
        if "close" in request:
            return await close(request["close"])
        if "reset" in request:
            return await reset(request["session"], request["reset"])
        return await step(request["session"], request["step"])

    yield answer


def told(result: Any) -> dict[str, Any]:
    return {"observation": result.observation, "reward": result.reward, "done": bool(result.done)}


async def field(url: str) -> str | None:
    """The client has no method for it."""
    schema = json.loads(await asyncio.to_thread(fetch, f"{url.rstrip('/')}/schema"))["action"]
    required = schema.get("required", [])
    return required[0] if len(required) == 1 else None


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as response:  # noqa: S310
        return response.read(_MEGABYTES << 20)


async def start(command: list[str]) -> str:
    """The URL of a server that this process starts. It ends with the process group of this process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(*(word.replace("{port}", str(port)) for word in command))
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
    while True:
        try:
            await asyncio.to_thread(fetch, f"{url}/health")
            asyncio.create_task(process.wait()).add_done_callback(lambda ended: os._exit(1))  # the next one starts it
            return url
        except OSError as error:
            if process.returncode is not None:
                raise RuntimeError(f"its server ended with exit code {process.returncode}") from None
            if time.monotonic() > until:
                raise RuntimeError(f"its server does not answer at {url}: {error}") from None
            await asyncio.sleep(0.2)
