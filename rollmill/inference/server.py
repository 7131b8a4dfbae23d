"""The engine's contract over HTTP (see `rollmill.inference.engine`), and the engine process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from rollmill.errors import EngineError
from rollmill.inference.config import EngineConfig
from rollmill.inference.engine import Engine, EngineUnavailable
from rollmill.inference.follower import EngineFollower, Pinned, UpdateSource
from rollmill.inference.wire import chunk_to_json, request_from_json
from rollmill.models.config import ModelConfig
from rollmill.types import Version
from rollmill.weights.follower import Follower
from rollmill.weights.store import WeightStore
from rollmill.weights.transfer import Mirror

LARGEST_REQUEST = 64 * 2**20
SHUTDOWN_SECONDS = 2.0


def make_app(engine: Engine, problem: Callable[[], str | None] = lambda: None) -> web.Application:
    """`problem` says why the engine is not at the newest weights; `/health` passes it on."""
    handlers = _Handlers(engine, problem)
    app = web.Application(client_max_size=LARGEST_REQUEST)
    app.router.add_post("/generate", handlers.generate)
    app.router.add_get("/health", handlers.health)
    app.router.add_get("/metrics", handlers.metrics)
    app.router.add_post("/pause", handlers.pause)
    app.router.add_post("/resume", handlers.resume)
    return app


class _Handlers:
    def __init__(self, engine: Engine, problem: Callable[[], str | None]) -> None:
        self._engine, self._problem = engine, problem

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """The status waits for the first chunk, so that a request that cannot be served gets a plain error."""
        response: web.StreamResponse | None = None
        try:
            request, stream = request_from_json(await http.read())
            async with contextlib.aclosing(self._engine.generate(request, stream=stream)) as chunks:
                async for chunk in chunks:
                    if response is None:
                        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
                        await response.prepare(http)
                    await response.write(chunk_to_json(chunk) + b"\n")
        except EngineError as error:
            if response is None:
                return _refusal(error)
            # no line with `finish` was sent: the reader sees that the answer broke off
            if http.transport is not None:
                http.transport.close()
        assert response is not None, "an engine sends at least the chunk with `finish`"
        return response

    async def health(self, http: web.Request) -> web.Response:
        return web.json_response({**self._engine.health(), "problem": self._problem()})

    async def metrics(self, http: web.Request) -> web.Response:
        health = self._engine.health()
        labels = f"engine={json.dumps(health['engine'])},region={json.dumps(health['region'])}"
        lines = []
        for name, value in sorted(self._engine.metrics().items()):
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# TYPE rollmill_engine_{name} {kind}", f"rollmill_engine_{name}{{{labels}}} {value}"]
        return web.Response(text="\n".join(lines) + "\n")

    async def pause(self, http: web.Request) -> web.Response:
        await self._engine.pause()
        return web.json_response(self._engine.health())

    async def resume(self, http: web.Request) -> web.Response:
        await self._engine.resume()
        return web.json_response(self._engine.health())


def _refusal(error: EngineError) -> web.Response:
    status = 503 if isinstance(error, EngineUnavailable) else 400
    return web.json_response({"error": error.message, "hint": error.hint}, status=status)


def serve_engine(
    config: EngineConfig,
    model: ModelConfig,
    store: WeightStore,
    *,
    line: str,
    name: str,
    region: str,
    port: int,
    host: str = "127.0.0.1",
    form: str = "bf16",
    mirror: Mirror | None = None,
    pinned: int | None = None,
) -> None:
    """An embedded engine that follows a line (or stays at version `pinned`) until SIGTERM or SIGINT."""
    source: UpdateSource
    if pinned is None:
        source = Follower(store, line, form, mirror)
    else:
        source = Pinned(store, Version(line, pinned), form, mirror)
    asyncio.run(_serve(config, model, source, name=name, region=region, host=host, port=port))


async def _serve(
    config: EngineConfig, model: ModelConfig, source: UpdateSource, *, name: str, region: str, host: str, port: int
) -> None:
    from rollmill.inference.embedded.engine import EmbeddedEngine  # torch: only the process that serves loads it

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with EmbeddedEngine(model, config, name=name, region=region) as engine:
        follower = EngineFollower(engine, source, config.poll_seconds)
        app = make_app(engine, lambda: follower.problem)
        async with serving(app, host, port):
            tasks = [
                asyncio.ensure_future(work) for work in (stop.wait(), follower.run(), asyncio.wrap_future(engine.ended))
            ]
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            for task in done:
                task.result()  # raises what stopped the engine


@contextlib.asynccontextmanager
async def serving(app: web.Application, host: str, port: int) -> AsyncIterator[web.AppRunner]:
    """A listening server. A client that goes away cancels its handler, which is what frees its pages."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield runner
    finally:
        await runner.cleanup()
