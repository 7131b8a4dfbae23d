"""The other end of package_process.py. It runs in interpreters without Rollmill: the standard library alone.

    python -P program.py PATH      PATH is a Python file with `opened`

`opened(order)` is an asynchronous context with a function that makes the answer to a request. Answers are made side by
side. `await request["call"](what)` asks Rollmill for something meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import runpy
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

LONGEST = 1 << 25  # bytes of one answer
_ORDER = 1 << 26  # bytes of one request

Answer = Callable[[dict[str, Any]], Awaitable[Any]]
Open = Callable[[dict[str, Any]], AbstractAsyncContextManager[Answer]]


def serve(opened: Open) -> None:
    """Read an order and then requests from standard input, until it ends. What is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        try:
            line = json.dumps(message, allow_nan=False).encode()
            if len(line) > LONGEST:
                raise ValueError(f"it has {len(line)} bytes")
        except (TypeError, ValueError) as error:
            line = json.dumps({"id": message["id"], "error": f"its answer cannot be used: {error}"}).encode()
        answers.write(line + b"\n")
        answers.flush()

    try:
        asyncio.run(_serve(opened, say))
    except BaseException as error:
        say({"id": None, "error": describe(error)})
        raise


async def _serve(opened: Open, say: Callable[[dict[str, Any]], None]) -> None:
    lines = _lines()
    running: dict[int, asyncio.Task[None]] = {}
    calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
    numbers = itertools.count()

    async def call(request: int, what: Any) -> Any:
        number = next(numbers)
        waiting = calls[number] = asyncio.get_running_loop().create_future()
        try:
            say({"id": request, "call": number, "what": what})
            said = await waiting
        finally:
            del calls[number]
        if "error" in said:
            raise RuntimeError(said["error"])
        return said["is"]

    async with opened(await anext(lines)) as answer:

        async def reply(request: dict[str, Any]) -> None:
            try:
                said = {"is": await answer({**request, "call": functools.partial(call, request["id"])})}
            except asyncio.CancelledError:
                said = {"error": "cancelled"}
            except Exception as error:
                said = {"error": describe(error)}
            say({"id": request["id"], **said})
            del running[request["id"]]

        async for request in lines:
            if "reply" in request:
                waiting = calls.get(request["reply"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(request)
            elif "cancel" not in request:
                running[request["id"]] = asyncio.create_task(reply(request))
            elif request["cancel"] in running:
                running[request["cancel"]].cancel()
        os.killpg(0, signal.SIGKILL)  # nobody waits any more: also for programs that an environment has started


async def _lines() -> AsyncIterator[dict[str, Any]]:
    reader = asyncio.StreamReader(limit=_ORDER)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


if __name__ == "__main__":
    serve(runpy.run_path(sys.argv[1])["opened"])
