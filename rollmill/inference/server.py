"""The engine's contract over HTTP (see `rollmill.inference.engine`), and the engine process."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import signal
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from rollmill.errors import EngineError, RollmillError
from rollmill.histogram import TEXT_TYPE, exposition
from rollmill.inference.embedded.kind import Embedded
from rollmill.inference.engine import METRICS, Engine, EngineBusy, EngineContext, EngineKind, EngineUnavailable
from rollmill.inference.engine_wire import chunk_to_json, request_from_json
from rollmill.inference.follower import EngineFollower, PinnedSource, UpdateSource
from rollmill.inference.joining import Joining, keep_registered
from rollmill.inference.lent_engine import Guests
from rollmill.types import Version
from rollmill.weights.reading.line_follower import LineFollower
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.regions.mirror import Mirror

LARGEST_REQUEST = 64 * 2**20
SHUTDOWN_SECONDS = 2.0
BACKLOG = 2048  # connections that may wait to be accepted: a gateway may open thousands at once
OPEN = ("/health", "/metrics")  # need no token: gateways poll the first, monitors the second


def make_app(
    engine: Engine,
    follower: EngineFollower | None = None,
    token: str | None = None,
    serves: dict[str, Any] | None = None,
) -> web.Application:
    """`follower` keeps the engine's weights up to date. With a `token`, every path not in `OPEN` asks for it. `serves`
    is what the engine declares in its health."""
    handlers = _Handlers(engine, follower, serves)
    app = web.Application(client_max_size=LARGEST_REQUEST, middlewares=[_guard(token)] if token else [])
    app.router.add_post("/generate", handlers.generate)
    app.router.add_get("/health", handlers.health)
    app.router.add_get("/metrics", handlers.metrics)
    app.router.add_post("/pause", handlers.pause)
    app.router.add_post("/resume", handlers.resume)
    app.router.add_post("/drain", handlers.drain)
    app.router.add_post("/hint", handlers.hint)
    app.router.add_post("/lend", handlers.lend)
    app.router.add_post("/recall", handlers.recall)
    return app


def _guard(token: str) -> Any:
    """A middleware that answers 401 to a request without the engine token."""
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if request.path in OPEN or hmac.compare_digest(given, expected):
            response: web.StreamResponse = await handler(request)
            return response
        error = "the engine token is wrong" if given else "the engine token is missing"
        hint = "send `Authorization: Bearer TOKEN`; TOKEN is `engine_token` in the run's run.json"
        return web.json_response({"error": error, "hint": hint}, status=401)

    return guard


class _Handlers:
    def __init__(self, engine: Engine, follower: EngineFollower | None, serves: dict[str, Any] | None) -> None:
        self._engine, self._follower, self._serves = engine, follower, serves
        self._guests = follower.guests if follower else Guests()

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """Sample tokens. The status waits for the first chunk, so a request that cannot be served gets a plain error.

        Needs: the engine token.
        Takes: a GenerateRequest as JSON, see `rollmill/inference/engine.py`.
        Returns: newline-delimited JSON, one GenerateChunk per line; the last has `finish`. 503: another engine may
        serve it. 429 with Retry-After: too many requests wait.
        """
        response: web.StreamResponse | None = None
        try:
            request, stream = request_from_json(await http.read())
            with self._guests.answering(request.traffic):
                async with contextlib.aclosing(self._engine.generate(request, stream=stream)) as chunks:
                    async for chunk in chunks:
                        if response is None:
                            response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
                            await response.prepare(http)
                        await response.write(chunk_to_json(chunk) + b"\n")
        except ConnectionResetError:
            pass  # the client has gone
        except EngineError as error:
            if response is None:
                return _refusal(error)
            # no line with `finish` was sent, so the reader knows that the stream broke off
            if http.transport is not None:
                http.transport.close()
        assert response is not None, "an engine sends at least the chunk with `finish`"
        return response

    async def health(self, http: web.Request) -> web.Response:
        """Say what the engine serves and how busy it is.

        Needs: nothing.
        Returns: {"engine", "region", "policy", "running", "waiting", "paused", "draining", "problem", "lent",
        "loan", "serves"}: `lent` is a line or null, `loan` is leaving, lent, returning or null.
        """
        return web.json_response(self._health())

    async def metrics(self, http: web.Request) -> web.Response:
        """Show counters and gauges.

        Needs: nothing.
        Returns: Prometheus text; docs/reference/metrics.md lists the names.
        """
        health = self._engine.health()
        labels, values = ("engine", "region"), (health["engine"], health["region"])
        loans = {"lent": int(self._guests.loan is not None), "loans_total": self._guests.loans}
        families: list[Metric] = []
        for name, value in {**self._engine.metrics(), **loans}.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(f"rollmill_engine_{name}", METRICS.get(name, name), labels=labels)
            family.add_metric(values, value)
            families.append(family)
        for name, each in {**self._engine.histograms, "return_seconds": self._guests.returns}.items():
            histogram = HistogramMetricFamily(f"rollmill_engine_{name}", METRICS.get(name, name), labels=labels)
            histogram.add_metric(values, each.cumulative(), each.sum)
            families.append(histogram)
        return web.Response(body=exposition(families), headers={"Content-Type": TEXT_TYPE})

    async def pause(self, http: web.Request) -> web.Response:
        """Stop decoding; requests wait.

        Needs: the engine token.
        Returns: as /health.
        """
        await self._engine.pause()
        return web.json_response(self._health())

    async def drain(self, http: web.Request) -> web.Response:
        """Finish what runs and waits, and take nothing new: new requests get 503. Once `running` and `waiting` are 0,
        the engine may be stopped. /resume ends it.

        Needs: the engine token.
        Returns: as /health.
        """
        await self._engine.drain()
        return web.json_response(self._health())

    async def resume(self, http: web.Request) -> web.Response:
        """Go on decoding, and take requests again.

        Needs: the engine token.
        Returns: as /health.
        """
        await self._engine.resume()
        return web.json_response(self._health())

    async def hint(self, http: web.Request) -> web.Response:
        """Look for new weights now. The body is ignored: the store says what there is.

        Needs: the engine token.
        Returns: as /health.
        """
        if self._follower is not None:
            self._follower.hint()
        return web.json_response(self._health())

    async def lend(self, http: web.Request) -> web.Response:
        """Serve another line as soon as no request is answered, and keep the own weights in memory. Asking again
        prolongs the loan.

        Needs: the engine token.
        Takes: {"line", "seconds", "notice_s"}: the line to serve; after `seconds` the engine returns by itself (not
        set: never); for `notice_s` it serves as before, so that gateways learn that it is lent (0 if not set).
        Returns: as /health; 400 if it cannot.
        """
        body = await http.read()
        line = _field(body, "line")
        seconds, notice_s = _seconds(body, "seconds", math.inf), _seconds(body, "notice_s", 0.0)
        return await self._order(lambda follower: follower.lend(line, seconds, notice_s))

    async def recall(self, http: web.Request) -> web.Response:
        """Serve the own line again. Rollouts that run are broken off: another engine goes on with them.

        Needs: the engine token.
        Returns: as /health, when it does; 400 if it cannot.
        """
        return await self._order(lambda follower: follower.recall())

    async def _order(self, order: Callable[[EngineFollower], Awaitable[None]]) -> web.Response:
        try:
            if self._follower is None:
                raise EngineError("nothing keeps this engine's weights up to date")
            await order(self._follower)
        except RollmillError as error:
            return _refusal(error)
        return web.json_response(self._health())

    def _health(self) -> dict[str, Any]:
        loan, problem = self._guests.loan, self._follower.problem if self._follower else None
        lent = {"lent": loan.line, "loan": loan.state} if loan else {"lent": None, "loan": None}
        return {**self._engine.health(), "problem": problem, **lent, "serves": self._serves}


def _field(body: bytes, name: str) -> str:
    """One text field of a small JSON object. Raises HTTPBadRequest without it."""
    try:
        value = json.loads(body)[name]
    except (ValueError, LookupError, TypeError, RecursionError):
        value = None
    if not isinstance(value, str):
        raise web.HTTPBadRequest(text=json.dumps({"error": f"a JSON object with a text {name!r} is needed"}))
    return value


def _seconds(body: bytes, name: str, otherwise: float) -> float:
    """A number of seconds in a JSON object. Raises HTTPBadRequest if it is none."""
    value = json.loads(body).get(name, otherwise)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise web.HTTPBadRequest(text=json.dumps({"error": f"{name!r} must be a number of seconds"}))
    return float(value)


def _refusal(error: RollmillError) -> web.Response:
    body = {"error": error.message, "hint": error.hint}
    if isinstance(error, EngineBusy):
        return web.json_response(body, status=429, headers={"Retry-After": str(error.retry_seconds)})
    return web.json_response(body, status=503 if isinstance(error, EngineUnavailable) else 400)


def serve_engine(
    context: EngineContext,
    store: WeightStore,
    *,
    line: str,
    port: int,
    host: str = "127.0.0.1",
    mirror: Mirror | None = None,
    pinned: int | None = None,
    channel: str | None = None,
    token: str | None = None,
    kind: EngineKind | None = None,
    joining: Joining | None = None,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve an engine until SIGTERM or SIGINT. It follows `line` or `channel`, or stays at version `pinned` of `line`.

    With a `token`, requests must carry it as a bearer token. Without a `kind` it is the embedded engine. With
    `joining` it registers at a gateway. With `tls` it answers HTTPS.
    """
    source: UpdateSource
    about = {"engine": context.name, "region": context.region}
    if pinned is not None:
        what, name = "version", f"{line}@{pinned}"
        source = PinnedSource(store, Version(line, pinned), context.form, mirror, holder=context.name, about=about)
    else:
        what, name = ("line", line) if channel is None else ("channel", channel)
        source = LineFollower(store, line, context.form, mirror, holder=context.name, about=about)
        if channel is not None:
            source.follow_channel(channel)
    longest = min(context.model.max_context, context.settings.cache_tokens)
    serves = {"kind": what, "name": name, "context": longest}

    async def serve() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with (kind or Embedded()).open(context) as engine:
            follower = EngineFollower(engine, source, context.settings.poll_seconds)
            async with serving(make_app(engine, follower, token, serves), host, port, tls) as runner:
                works: list[Awaitable[Any]] = [stop.wait(), follower.run(), asyncio.wrap_future(engine.ended)]
                if joining is not None:
                    url = f"http{'s' if tls else ''}://{host}:{runner.addresses[0][1]}"
                    works.append(keep_registered(joining, context.name, url, region=context.region, form=context.form))
                await _until_one_ends(works)

    asyncio.run(serve())


async def _until_one_ends(works: Sequence[Awaitable[Any]]) -> None:
    """Cancels the others. Raises the error of the one that ended, which stopped the engine."""
    tasks = [asyncio.ensure_future(work) for work in works]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)  # the follower returns its leases
    for task in done:
        task.result()


@contextlib.asynccontextmanager
async def serving(
    app: web.Application, host: str, port: int, tls: ssl.SSLContext | None = None
) -> AsyncIterator[web.AppRunner]:
    """A listening server. A client that goes away cancels its handler, which frees the request's pages."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=BACKLOG, ssl_context=tls).start()
        yield runner
    finally:
        await runner.cleanup()
