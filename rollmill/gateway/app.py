"""The gateway: the only access to the engines. Clients speak OpenAI or Anthropic; every token is recorded exactly.

    POST   /v1/chat/completions     a session's key, or a key for production        see gateway.completions
    POST   /v1/responses, /v1/completions, /v1/messages                             see gateway.model_routes
    GET    /v1/models
    POST   /v1/feedback             key for feedback: append what a user says    see gateway.feedback
    POST   /sessions                key for rollouts: open a session for a trajectory, get its key
    POST   /sessions/ID/seal        key for rollouts: store the record, finish the trajectory
    GET    /sessions/ID             key for reading: how long its requests have waited for an engine
    DELETE /sessions/ID             key for rollouts: forget the session
    PUT    /engines/NAME            key of engines: register, and renew the lease; DELETE ends it    see gateway.fleet
    GET    /health, /metrics        no key; 503 while no engine is alive

A production client names its conversation in the path, /s/SESSION/v1/…, or in the header `x-rollmill-session`, which
every answer carries. See gateway.identity. Keys and message contents are never logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from aiohttp import web

from rollmill.chat.format import ChatFormat
from rollmill.chat.tokenizer import Tokenizer
from rollmill.errors import GatewayError, StorageError
from rollmill.gateway.access.access import Access, given_key
from rollmill.gateway.access.account import current_account
from rollmill.gateway.access.buckets import Buckets
from rollmill.gateway.access.keys import KeyRing, KeyStore, unknown_key
from rollmill.gateway.access.limits import KeyLimits
from rollmill.gateway.answering import Completions
from rollmill.gateway.config import EngineEndpoint, GatewayConfig
from rollmill.gateway.garbage_policy import collect_all
from rollmill.gateway.model_routes import ModelRoutes, dialect_name, dialect_of
from rollmill.gateway.recording.entries import encode_open
from rollmill.gateway.recording.recorder import Recorder
from rollmill.gateway.recording.sealing import Sealer
from rollmill.gateway.routing.fleet import Fleet, FleetRoutes
from rollmill.gateway.routing.router import Router
from rollmill.gateway.routing.traffic_splits import SplitStore, follow
from rollmill.gateway.sessions.early import EarlyFeedback
from rollmill.gateway.sessions.feedback import FeedbackRoutes
from rollmill.gateway.sessions.forgetting import AdminRoutes
from rollmill.gateway.sessions.identity import add_session_paths, path_without_session
from rollmill.gateway.sessions.registry import Registry
from rollmill.gateway.sessions.sessions import Session, SessionFacts, check_id, parse_facts
from rollmill.gateway.watching.metrics import Metrics, added
from rollmill.gateway.watching.observer import Observer
from rollmill.gateway.watching.tracing import Tracer
from rollmill.gateway.wire.body import parse_object
from rollmill.gateway.wire.openapi import document
from rollmill.gateway.workers import Workers, log_directory, share
from rollmill.storage.objects import Objects
from rollmill.strict import short
from rollmill.trajectories.storable import LONGEST_OBJECT_KEY, is_key
from rollmill.trajectories.trajectory_store import TrajectoryStore

log = logging.getLogger(__name__)
_RETRY_AFTER_S = 1


def make_app(
    config: GatewayConfig,
    format: ChatFormat,
    tokenizer: Tokenizer,
    engines: Sequence[EngineEndpoint],
    trajectories: TrajectoryStore,
    objects: Objects,
    log_dir: Path,
    admin_token: str,
    production_key: str | None = None,
    rollout_key: str | None = None,
    keys: KeyStore | None = None,
    splits: SplitStore | None = None,
    fleet: Fleet | None = None,
    workers: Workers | None = None,
    run: str | None = None,
) -> web.Application:
    """The gateway as a web application. Sessions found in `log_dir` continue after a crash.

    `keys`: those that `rollmill keys` made; the admin token, the production key and the rollout key are valid too.
    `splits`: how production is divided, read again while the gateway runs. `fleet`: engines register, and come and go.
    `workers`: this is the app of one of several processes, with a log directory of its own in `log_dir`. `run`: the id
    that production is recorded with.
    """
    workers = workers or Workers()
    workers.reader_wait_s = config.reader_wait_s
    config, log_dir = share(config, workers), log_directory(log_dir, workers.number)
    ring = KeyRing(
        keys,
        admin_token=admin_token,
        production_key=production_key,
        rollout_key=rollout_key,
        engine_token=fleet.token if fleet else None,
        cache_s=config.key_cache_s,
    )
    access = Access(ring, KeyLimits(keys, Buckets(workers.limits)))
    stores = (trajectories, objects, log_dir)
    gateway = Gateway(config, format, tokenizer, engines, *stores, admin_token, access, workers, splits, fleet, run)
    middlewares = [gateway.observer.watch, gateway.report_errors]
    app = web.Application(client_max_size=config.max_body_bytes, middlewares=middlewares)
    gateway.model_routes.add_to(app)
    gateway.feedback_routes.add_to(app)
    gateway.admin_routes.add_to(app)
    if gateway.fleet_routes is not None:
        gateway.fleet_routes.add_to(app)
    app.router.add_post("/sessions", gateway.open_session)
    app.router.add_post("/sessions/{id}/seal", gateway.seal_session)
    app.router.add_get("/sessions/{id}", gateway.show_session)
    app.router.add_delete("/sessions/{id}", gateway.delete_session)
    app.router.add_get("/health", gateway.health)
    app.router.add_get("/metrics", gateway.show_metrics)
    app.router.add_get("/openapi.json", gateway.openapi)
    add_session_paths(app)
    app.cleanup_ctx.append(gateway.lifetime)
    return app


class Gateway:
    def __init__(
        self,
        config: GatewayConfig,
        format: ChatFormat,
        tokenizer: Tokenizer,
        engines: Sequence[EngineEndpoint],
        trajectories: TrajectoryStore,
        objects: Objects,
        log_dir: Path,
        admin_token: str,
        access: Access,
        workers: Workers,
        splits: SplitStore | None = None,
        fleet: Fleet | None = None,
        run: str | None = None,
    ) -> None:
        self._splits = splits
        self._config = config
        self._workers = workers
        self._access = access
        self._metrics = Metrics()
        self.observer = Observer(
            self._metrics,
            lambda path: dialect_name(path_without_session(path)),
            log_dir if config.access_log else None,
            Tracer(config.traces) if config.traces else None,
        )
        self._registry = Registry(admin_token, keep_routes=False, fresh=workers.fresh, run=run)
        self._recorder = Recorder(log_dir, compact_bytes=config.compact_bytes)
        self._registry.replay(self._recorder.replay())
        self._router = Router(engines, config, tokenizer.encode, follows=fleet is not None)
        self.fleet_routes = FleetRoutes(fleet, access, self._router) if fleet is not None else None
        self._sealer = Sealer(config, self._recorder, self._registry, trajectories, objects, self._metrics)
        self._early = EarlyFeedback(
            self._registry, self._sealer, self._recorder, trajectories, self._metrics, self._registry.early
        )
        self.feedback_routes = FeedbackRoutes(access, self._registry, self._sealer, trajectories, self._early, workers)
        self.admin_routes = AdminRoutes(
            access, self._registry, self._sealer, self._recorder, trajectories, admin_token, workers, self._early
        )
        self._completions = Completions(
            config, format, tokenizer, self._router, self._recorder, self._registry, self._metrics, workers
        )
        self.model_routes = ModelRoutes(
            config,
            format.stop_tokens,
            self._completions,
            self._registry,
            self._metrics,
            access,
            self._router.names,
            self._router.served,
            self._router.window,
            workers,
        )

    async def lifetime(self, app: web.Application) -> AsyncIterator[None]:
        self._recorder.start()
        self.observer.start()
        if self._splits is not None:  # before the first request: a candidate must not get more than its share
            self._router.divide(await asyncio.to_thread(self._splits.get))
        if self.fleet_routes is not None:
            await self.fleet_routes.look()  # the first request must find what there is
        await self._router.start()
        collecting = collect_all(lambda: not self._completions.running, lambda: self._recorder.living_bytes)
        sweeps = [asyncio.create_task(each) for each in (self._sealer.sweep(), self._early.run(), collecting)]
        if self._splits is not None:
            sweeps.append(asyncio.create_task(follow(self._splits, self._router.divide)))
        if self.fleet_routes is not None:
            sweeps.append(asyncio.create_task(self.fleet_routes.run()))
        async with self._access.running(), self._workers.running():
            yield
        for sweep in sweeps:
            sweep.cancel()
        await asyncio.gather(*sweeps, return_exceptions=True)
        await self._completions.close()
        await self._router.close()
        self._recorder.close()
        await asyncio.to_thread(self.observer.close)

    async def open_session(self, request: web.Request) -> web.StreamResponse:
        """Open a session whose requests become one trajectory.

        Needs: a key with the scope rollout; for production traffic one with the scope admin.
        Takes: {"trajectory", "traffic": "rollout" or "production"}, and optionally run, task_id, group_id, min_version,
        line (of min_version) and provenance.
        Returns: {"key"}: the API key of this session, the same if it is already open; 409 if it is sealed.
        """
        await self._access.check(request, "rollout")
        facts = parse_facts(parse_object(await request.read()))
        if self._workers.elsewhere(request, facts.trajectory):
            return await self._workers.forward(request, facts.trajectory)
        await self._check_traffic(request, facts)
        sealed = await self._sealer.is_sealed(facts.trajectory)
        session = self._registry.get(facts.trajectory)
        if sealed or (session is not None and session.facts != facts):
            what = "already sealed" if sealed else "open with different fields"
            raise GatewayError(f"{facts.trajectory} is {what}", status=409, hint="use a new id")
        if session is None:
            await self._recorder.append(facts.trajectory, encode_open(facts))
            # the same request, sent twice, may have opened it while this one waited for the disk
            session = self._registry.get(facts.trajectory) or self._registry.add(facts)
            session.logged = True
        return web.json_response({"key": self._registry.key(facts.trajectory)})

    async def seal_session(self, request: web.Request) -> web.StreamResponse:
        """End a session: store its record and finish its trajectory.

        Needs: a key with the scope rollout; for production traffic one with the scope admin.
        Takes: {"submission_key"}: the object with the submission, or null.
        Returns: {"trajectory", "payload_key", "tokens", …}; the same if it is already sealed.
        """
        id = check_id(request.match_info["id"])
        if self._workers.elsewhere(request, id):
            return await self._workers.forward(request, id)
        await self._session_to_end(request)
        submission_key = parse_object(await request.read() or b"{}").get("submission_key")
        if submission_key is not None and not is_key(submission_key, LONGEST_OBJECT_KEY):
            raise GatewayError(f"submission_key must be an object key or null, got {short(submission_key)}")
        return web.json_response(await self._sealer.seal(id, submission_key))

    async def _session_to_end(self, request: web.Request) -> Session | None:
        """The open session that the path names. Raises 403 if the key may not seal or delete it."""
        await self._access.check(request, "rollout")
        session = self._registry.get(check_id(request.match_info["id"]))
        if session is not None:
            await self._check_traffic(request, session.facts)
        return session

    async def _check_traffic(self, request: web.Request, facts: SessionFacts) -> None:
        """Raises 403 for a production session if the key is only for rollouts."""
        if facts.traffic == "production":
            await self._access.check(request, "admin")

    async def show_session(self, request: web.Request) -> web.StreamResponse:
        """Say how long the requests of an open session have waited for an engine, in all.

        Needs: a key with the scope read; for a rollout session also one with the scope rollout.
        Returns: {"waited_seconds"}: a request that is waiting now counts too; 404 if there is no such session.
        """
        id = check_id(request.match_info["id"])
        if self._workers.elsewhere(request, id):
            return await self._workers.forward(request, id)
        session = self._registry.get(id)
        production = session is not None and session.facts.traffic == "production"
        await self._access.check(request, "read", *(() if production else ("rollout",)))
        if session is None:
            raise GatewayError("there is no such open session", status=404, hint="it was sealed or never opened")
        return web.json_response({"waited_seconds": session.waits.seconds()})

    async def delete_session(self, request: web.Request) -> web.StreamResponse:
        """Delete a session and its record.

        Needs: a key with the scope rollout; for production traffic one with the scope admin.
        Returns: {"deleted"}: false if there was no such session.
        """
        id = check_id(request.match_info["id"])
        if self._workers.elsewhere(request, id):
            return await self._workers.forward(request, id)
        session = await self._session_to_end(request)
        deleted = session is not None and await self._sealer.give_up(session, "the session was deleted")
        return web.json_response({"deleted": deleted})

    async def health(self, request: web.Request) -> web.Response:
        """Report the state of the gateway and its engines.

        Needs: nothing.
        Returns: {"status", "problems", "engines", "sessions"}; status 503 while no engine is alive.
        """
        alive = any(engine.alive for engine in self._router.engines)
        answers, silent = await self._workers.ask_those_alive(request, 200, 503)
        others = [json.loads(answer) for answer in answers]
        problems = [problem for problem in (self._recorder.problem, self._sealer.problem, *silent) if problem]
        problems += [problem for other in others for problem in other["problems"]]
        body = {
            "status": ("degraded" if problems else "ok") if alive else "no engine",
            "problems": problems,
            "engines": [engine.describe() for engine in self._router.engines],
            "sessions": len(self._registry) + sum(other["sessions"] for other in others),
        }
        return web.json_response(body, status=200 if alive else 503)

    async def show_metrics(self, request: web.Request) -> web.Response:
        """Return counters and gauges.

        Needs: nothing.
        Returns: Prometheus text; docs/reference/metrics.md lists the names.
        """
        gauges: dict[str, float] = {
            "sessions": len(self._registry),
            "waiting": self._router.places.waiting,
            "log_fsyncs_total": self._recorder.fsyncs,
            "ambiguous_histories_total": self._registry.ambiguous,
        }
        for engine in self._router.engines:
            gauges[f'engine_alive{{url="{engine.url}"}}'] = int(engine.alive)
            gauges[f'engine_lent{{url="{engine.url}"}}'] = int(engine.lent is not None)
            gauges[f'engine_failures_total{{url="{engine.url}"}}'] = engine.failures
        others, _ = await self._workers.ask_those_alive(request, 200)
        return web.Response(text=added([self._metrics.render(gauges), *(other.decode() for other in others)]))

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
        self._metrics.count("errors_total", status=failure.status)
        retry_s = failure.retry_after_s or _RETRY_AFTER_S
        headers = {"Retry-After": str(math.ceil(retry_s))} if failure.status in (429, 503) else None
        dialect = dialect_of(path_without_session(request.path))
        return web.json_response(dialect.error(failure), status=dialect.status(failure), headers=headers)

    async def _refuse_strangers(self, request: web.Request) -> None:
        """Raises 401 without a valid key: memory is for bodies of those who have one. Every route with a body needs
        one; its handler checks the scope."""
        if not self._registry.is_key(given_key(request)) and not await self._access.is_known(request):
            raise unknown_key()

    async def _read_body(self, request: web.Request) -> None:
        """Reads the body, which handlers read again from memory. Raises 408 if it does not arrive in time."""
        if request.content.is_eof():  # most bodies arrive with their headers
            await request.read()
            return
        try:
            current_account().key = None  # it may be revoked meanwhile: the handler looks again
            async with asyncio.timeout(self._config.body_wait_s):
                await request.read()
        except TimeoutError:
            raise GatewayError(
                f"the request body did not arrive within {self._config.body_wait_s:g} s", status=408
            ) from None

    def _failure(self, request: web.Request, error: Exception) -> GatewayError:
        if isinstance(error, GatewayError):
            return error
        if isinstance(error, web.HTTPRequestEntityTooLarge):
            limit = self._config.max_body_bytes
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
