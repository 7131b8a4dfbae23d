"""The gateway: the only access to the engines. Clients speak OpenAI or Anthropic; every token is recorded exactly.

    POST   /v1/chat/completions     a session's key, or a key for production        see answering.py
    POST   /v1/responses, /v1/completions, /v1/messages                             see routes/chat_completions.py
    GET    /v1/models
    POST   /v1/feedback             key for feedback: append what a user says    see routes/feedback.py
    POST   /sessions                key for rollouts: open a session for a trajectory, get its key
    POST   /sessions/ID/seal        key for rollouts: store the record, finish the trajectory
    GET    /sessions/ID             key for reading: how long its requests have waited for an engine
    DELETE /sessions/ID             key for rollouts: forget the session
    PUT    /engines/NAME            key of engines: register, and renew the lease; DELETE ends it   routing/fleet.py
    GET    /health, /metrics        no key; 503 while no engine is alive

A production client names its conversation in the path, /s/SESSION/v1/…, or in the header `x-rollmill-session`, which
every answer carries. See sessions/identity.py. Keys and message contents are never logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from rollmill.errors import GatewayError, StorageError
from rollmill.gateway.access.access import given_key
from rollmill.gateway.access.account import current_account
from rollmill.gateway.access.keys import unknown_key
from rollmill.gateway.garbage_policy import collect_all
from rollmill.gateway.gateway_parts import GatewayInputs, GatewayParts
from rollmill.gateway.openapi import document
from rollmill.gateway.routes.chat_completions import ModelRoutes, dialect_name, dialect_of
from rollmill.gateway.routes.feedback import FeedbackRoutes
from rollmill.gateway.routes.responses import ResponseRoutes
from rollmill.gateway.routes.session_routes import SessionRoutes
from rollmill.gateway.routing.fleet import FleetRoutes
from rollmill.gateway.routing.traffic_splits import follow
from rollmill.gateway.sessions.identity import add_session_paths, path_without_session
from rollmill.gateway.watching.observer import Observer
from rollmill.gateway.watching.tracing import Tracer
from rollmill.gateway.workers import Workers
from rollmill.histogram import TEXT_TYPE

log = logging.getLogger(__name__)
_RETRY_AFTER_S = 1
_FOLLOW_S = 1.0


def make_app(given: GatewayInputs, workers: Workers | None = None) -> web.Application:
    """The gateway as a web application. `workers`: this is the app of one of several processes."""
    gateway = Gateway(GatewayParts(given, workers or Workers()))
    middlewares = [gateway.observer.watch, gateway.report_errors]
    app = web.Application(client_max_size=given.config.max_body_bytes, middlewares=middlewares)
    gateway.add_to(app)
    add_session_paths(app)
    app.cleanup_ctx.append(gateway.lifetime)
    return app


class Gateway:
    """What concerns all routes: the lifetime of the parts, the one error boundary, health and metrics."""

    def __init__(self, parts: GatewayParts) -> None:
        self._parts = parts
        config, fleet = parts.config, parts.given.fleet
        self.observer = Observer(
            parts.metrics,
            lambda path: dialect_name(path_without_session(path)),
            parts.log_dir if config.access_log else None,
            Tracer(config.traces) if config.traces else None,
        )
        self._fleet_routes = FleetRoutes(fleet, parts.access, parts.router) if fleet is not None else None

    def add_to(self, app: web.Application) -> None:
        model = ModelRoutes(self._parts)
        for routes in (
            model,
            ResponseRoutes(self._parts, model),
            FeedbackRoutes(self._parts),
            SessionRoutes(self._parts),
        ):
            routes.add_to(app)
        if self._fleet_routes is not None:
            self._fleet_routes.add_to(app)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.show_metrics)
        app.router.add_get("/openapi.json", self.openapi)

    async def lifetime(self, app: web.Application) -> AsyncIterator[None]:
        parts, splits = self._parts, self._parts.given.splits
        parts.recorder.start()
        self.observer.start()
        if splits is not None:  # before the first request: a candidate must not get more than its share
            parts.router.divide(await asyncio.to_thread(splits.get))
        if self._fleet_routes is not None:
            await self._fleet_routes.look()  # the first request must find what there is
        await parts.router.start()
        collecting = collect_all(lambda: not parts.answering.running, lambda: parts.recorder.living_bytes)
        forever = parts.sealer.sweep(), parts.early.run(), self._keep_following(), collecting
        sweeps = [asyncio.create_task(each) for each in forever]
        if splits is not None:
            sweeps.append(asyncio.create_task(follow(splits, parts.router.divide)))
        if self._fleet_routes is not None:
            sweeps.append(asyncio.create_task(self._fleet_routes.run()))
        async with parts.access.running(), parts.workers.running():
            yield
        for sweep in sweeps:
            sweep.cancel()
        await asyncio.gather(*sweeps, return_exceptions=True)
        await parts.answering.close()
        await parts.router.close()
        parts.recorder.close()
        await asyncio.to_thread(self.observer.close)

    async def health(self, request: web.Request) -> web.Response:
        """Report the state of the gateway and its engines.

        Needs: nothing.
        Returns: {"status", "problems", "engines", "sessions"}; status 503 while no engine is alive.
        """
        alive = any(engine.alive for engine in self._parts.router.engines)
        answers, silent = await self._parts.workers.ask_those_alive(request, 200, 503)
        others = [json.loads(answer) for answer in answers]
        problems = [
            problem for problem in (self._parts.recorder.problem, self._parts.sealer.problem, *silent) if problem
        ]
        problems += [problem for other in others for problem in other["problems"]]
        body = {
            "status": ("degraded" if problems else "ok") if alive else "no engine",
            "problems": problems,
            "engines": [engine.describe() for engine in self._parts.router.engines],
            "sessions": len(self._parts.registry) + sum(other["sessions"] for other in others),
        }
        return web.json_response(body, status=200 if alive else 503)

    async def show_metrics(self, request: web.Request) -> web.Response:
        """Return counters and gauges.

        Needs: nothing.
        Returns: Prometheus text; docs/reference/metrics.md lists the names.
        """
        self._follow()
        engines = [(engine.url, engine.alive, engine.lent is not None) for engine in self._parts.router.engines]
        text = await asyncio.to_thread(self._parts.metrics.render, engines)
        return web.Response(body=text, headers={"Content-Type": TEXT_TYPE})

    def _follow(self) -> None:
        """Brings the metrics of this worker up to date that nobody counts on the way."""
        parts, follow = self._parts, self._parts.metrics.follow
        follow("sessions", len(parts.registry))
        follow("waiting", parts.router.places.waiting)
        follow("log_fsyncs_total", parts.recorder.fsyncs)
        follow("ambiguous_histories_total", parts.registry.ambiguous)
        for engine in parts.router.engines:
            follow("engine_failures_total", engine.failures, url=engine.url)

    async def _keep_following(self) -> None:
        """Runs for ever: another worker may be asked for the metrics of all."""
        while True:
            self._follow()
            await asyncio.sleep(_FOLLOW_S)

    async def openapi(self, request: web.Request) -> web.Response:
        """Describe all routes.

        Needs: nothing.
        Returns: an OpenAPI 3.1 document.
        """
        return web.json_response(document(request.app))

    @web.middleware
    async def report_errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """The only error boundary: every failure becomes an error of the path's dialect, with the right status."""
        try:
            if request.can_read_body and request.method != "GET" and request.match_info.http_exception is None:
                await self._refuse_strangers(request)
                await self._read_body(request)
            return await handler(request)
        except (ConnectionResetError, asyncio.CancelledError):
            raise
        except Exception as error:  # a variable that outlives it would make a cycle: the error knows this frame
            return self._error_response(request, error)

    def _error_response(self, request: web.Request, error: Exception) -> web.Response:
        failure = self._failure(request, error)
        self._parts.metrics.count("errors_total", status=failure.status)
        retry_s = failure.retry_after_s or _RETRY_AFTER_S
        headers = {"Retry-After": str(math.ceil(retry_s))} if failure.status in (429, 503) else None
        dialect = dialect_of(path_without_session(request.path))
        return web.json_response(dialect.error(failure), status=dialect.status(failure), headers=headers)

    async def _refuse_strangers(self, request: web.Request) -> None:
        """Raises 401 without a valid key: memory is for bodies of those who have one. Every route with a body needs
        one; its handler checks the scope."""
        if not self._parts.registry.is_key(given_key(request)) and not await self._parts.access.is_known(request):
            raise unknown_key()

    async def _read_body(self, request: web.Request) -> None:
        """Reads the body, which handlers read again from memory. Raises 408 if it does not arrive in time."""
        if request.content.is_eof():  # most bodies arrive with their headers
            await request.read()
            return
        try:
            current_account().key = None  # it may be revoked meanwhile: the handler looks again
            async with asyncio.timeout(self._parts.config.body_wait_s):
                await request.read()
        except TimeoutError:
            raise GatewayError(
                f"the request body did not arrive within {self._parts.config.body_wait_s:g} s", status=408
            ) from None

    def _failure(self, request: web.Request, error: Exception) -> GatewayError:
        if isinstance(error, GatewayError):
            return error
        if isinstance(error, web.HTTPRequestEntityTooLarge):
            limit = self._parts.config.max_body_bytes
            return GatewayError(
                f"the request body is larger than {limit} bytes", status=413, hint="gateway.max_body_bytes"
            )
        if isinstance(error, web.HTTPException):
            return GatewayError(f"{request.method} {request.path}: {error.reason}", status=error.status)
        if isinstance(error, StorageError):
            log.error("%s %s: %s", request.method, request.path, error)
            return GatewayError(error.message, status=503, hint=error.hint)
        log.error("%s %s failed", request.method, request.path, exc_info=error)
        return GatewayError("internal error", status=500, hint="the gateway's log has the details")
