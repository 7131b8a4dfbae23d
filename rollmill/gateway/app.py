"""The gateway: the only access to the engines. Clients speak OpenAI chat completions; every token is recorded exactly.

    POST   /v1/chat/completions     a session's key, or the production key        see gateway.completions
    GET    /v1/models
    POST   /sessions                admin token: open a session for a trajectory, get its key
    POST   /sessions/ID/seal        admin token: store the record, finish the trajectory
    GET    /sessions/ID             admin token: how long its requests have waited for an engine
    DELETE /sessions/ID             admin token: forget the session
    GET    /health, /metrics        no key; 503 while no engine is alive

A production client names its conversation with the header `x-rollmill-session: ID`. Without it, a request belongs to
the conversation whose history it continues. Keys and message contents are never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from aiohttp import web

from rollmill.chat.format import ChatFormat
from rollmill.chat.tokenizer import Tokenizer
from rollmill.errors import GatewayError, StorageError
from rollmill.gateway.body import parse_object, short
from rollmill.gateway.completions import Completions
from rollmill.gateway.config import EngineEndpoint, GatewayConfig
from rollmill.gateway.dialects import openai_chat
from rollmill.gateway.entries import encode_open
from rollmill.gateway.metrics import Metrics
from rollmill.gateway.recorder import Recorder
from rollmill.gateway.registry import Registry
from rollmill.gateway.router import Router
from rollmill.gateway.sealing import Sealer
from rollmill.gateway.sessions import check_id, parse_facts
from rollmill.storage.objects import Objects
from rollmill.trajectories.storable import LONGEST_OBJECT_KEY, is_key
from rollmill.trajectories.store import TrajectoryStore

log = logging.getLogger(__name__)
_RETRY_AFTER_S = 1
_ADMIN_HINT = "send `Authorization: Bearer TOKEN`; TOKEN is `admin_token` in the run's run.json"


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
) -> web.Application:
    """Sessions found in `log_dir` continue after a crash. Without a production key only rollouts are served."""
    gateway = Gateway(config, format, tokenizer, engines, trajectories, objects, log_dir, admin_token, production_key)
    app = web.Application(client_max_size=config.max_body_bytes, middlewares=[gateway.report_errors])
    app.router.add_post("/v1/chat/completions", gateway.chat)
    app.router.add_get("/v1/models", gateway.models)
    app.router.add_post("/sessions", gateway.open_session)
    app.router.add_post("/sessions/{id}/seal", gateway.seal_session)
    app.router.add_get("/sessions/{id}", gateway.show_session)
    app.router.add_delete("/sessions/{id}", gateway.delete_session)
    app.router.add_get("/health", gateway.health)
    app.router.add_get("/metrics", gateway.show_metrics)
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
        production_key: str | None,
    ) -> None:
        self._config = config
        self._stop_tokens = format.stop_tokens
        self._admin_token = admin_token
        self._production_key = production_key
        self._metrics = Metrics()
        self._registry = Registry(admin_token)
        self._recorder = Recorder(log_dir, compact_bytes=config.compact_bytes)
        self._registry.replay(self._recorder.replay())
        self._router = Router(engines, config)
        self._sealer = Sealer(config, self._recorder, self._registry, trajectories, objects, self._metrics)
        self._completions = Completions(
            config, format, tokenizer, self._router, self._recorder, self._registry, self._metrics
        )

    async def lifetime(self, app: web.Application) -> AsyncIterator[None]:
        self._recorder.start()
        await self._router.start()
        sweep = asyncio.create_task(self._sealer.sweep())
        yield
        sweep.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sweep
        await self._completions.close()
        await self._router.close()
        self._recorder.close()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a conversation and record its exact tokens.

        Needs: the key of an open session, or the production key.
        Takes: an OpenAI chat completion; header `x-rollmill-session: ID` names a production conversation.
        Returns: an OpenAI chat completion, or a stream of it; 503 with Retry-After while no engine is alive.
        """
        key = _bearer(request)
        session = self._registry.by_key(key)
        if session is None and not _same(key, self._production_key):
            raise GatewayError(
                "this API key is unknown or its session has ended",
                status=401,
                hint="send `Authorization: Bearer KEY`; for production KEY is `production_key` in the run's run.json",
            )
        chat = openai_chat.parse_request(
            await request.read(),
            stop_tokens=self._stop_tokens,
            default_max_tokens=self._config.default_max_tokens,
            max_messages=self._config.max_messages,
        )
        if session is None:
            session = self._registry.production(request.headers.get("x-rollmill-session"), chat.user, chat.messages)
        self._metrics.count("requests_total", traffic=session.facts.traffic)
        return await self._completions.answer(session, chat, request)

    async def models(self, request: web.Request) -> web.Response:
        """List the one model, `rollmill`.

        Needs: nothing.
        Returns: an OpenAI list of models.
        """
        return web.json_response(
            {"object": "list", "data": [{"id": "rollmill", "object": "model", "owned_by": "rollmill"}]}
        )

    async def open_session(self, request: web.Request) -> web.Response:
        """Open a session whose requests become one trajectory.

        Needs: the admin token.
        Takes: {"trajectory", "traffic": "rollout" or "production"}, and optionally run, task_id, group_id, min_version
        and provenance.
        Returns: {"key"}: the API key of this session, the same if it is already open; 409 if it is sealed.
        """
        self._check_admin(request)
        facts = parse_facts(parse_object(await request.read()))
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

    async def seal_session(self, request: web.Request) -> web.Response:
        """End a session: store its record and finish its trajectory.

        Needs: the admin token.
        Takes: {"submission_key"}: the object with the submission, or null.
        Returns: {"trajectory", "payload_key", "tokens", …}; the same if it is already sealed.
        """
        self._check_admin(request)
        submission_key = parse_object(await request.read() or b"{}").get("submission_key")
        if submission_key is not None and not is_key(submission_key, LONGEST_OBJECT_KEY):
            raise GatewayError(f"submission_key must be an object key or null, got {short(submission_key)}")
        return web.json_response(await self._sealer.seal(check_id(request.match_info["id"]), submission_key))

    async def show_session(self, request: web.Request) -> web.Response:
        """Say how long the requests of an open session have waited for an engine, in all.

        Needs: the admin token.
        Returns: {"waited_seconds"}: a request that is waiting now counts too; 404 if there is no such session.
        """
        self._check_admin(request)
        session = self._registry.get(check_id(request.match_info["id"]))
        if session is None:
            raise GatewayError("there is no such open session", status=404, hint="it was sealed or never opened")
        return web.json_response({"waited_seconds": session.wait.seconds()})

    async def delete_session(self, request: web.Request) -> web.Response:
        """Delete a session and its record.

        Needs: the admin token.
        Returns: {"deleted"}: false if there was no such session.
        """
        self._check_admin(request)
        session = self._registry.get(check_id(request.match_info["id"]))
        if session is not None:
            await self._sealer.give_up(session, "the session was deleted")
        return web.json_response({"deleted": session is not None})

    async def health(self, request: web.Request) -> web.Response:
        """Report the state of the gateway and its engines.

        Needs: nothing.
        Returns: {"status", "problems", "engines", "sessions"}; status 503 while no engine is alive.
        """
        alive = any(engine.alive for engine in self._router.engines)
        problems = [problem for problem in (self._recorder.problem, self._sealer.problem) if problem]
        body = {
            "status": ("degraded" if problems else "ok") if alive else "no engine",
            "problems": problems,
            "engines": [engine.describe() for engine in self._router.engines],
            "sessions": len(self._registry),
        }
        return web.json_response(body, status=200 if alive else 503)

    async def show_metrics(self, request: web.Request) -> web.Response:
        """Return counters and gauges.

        Needs: nothing.
        Returns: Prometheus text; docs/reference/metrics.md lists the names.
        """
        gauges: dict[str, float] = {"sessions": len(self._registry), "log_fsyncs_total": self._recorder.fsyncs}
        for engine in self._router.engines:
            gauges[f'engine_alive{{url="{engine.url}"}}'] = int(engine.alive)
            gauges[f'engine_failures_total{{url="{engine.url}"}}'] = engine.failures
        return web.Response(text=self._metrics.render(gauges))

    @web.middleware
    async def report_errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """The only error boundary: every failure becomes an OpenAI error object with the right status."""
        try:
            return await handler(request)
        except GatewayError as error:
            status, message, hint = error.status, error.message, error.hint
        except web.HTTPRequestEntityTooLarge:
            limit = self._config.max_body_bytes
            status, message, hint = 413, f"the request body is larger than {limit} bytes", "gateway.max_body_bytes"
        except web.HTTPException as error:
            status, message, hint = error.status, f"{request.method} {request.path}: {error.reason}", None
        except StorageError as error:
            log.error("%s %s: %s", request.method, request.path, error)
            status, message, hint = 503, error.message, error.hint
        except (ConnectionResetError, asyncio.CancelledError):
            raise
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            status, message, hint = 500, "internal error", "the gateway's log has the details"
        self._metrics.count("errors_total", status=status)
        headers = {"Retry-After": str(_RETRY_AFTER_S)} if status == 503 else None
        return web.json_response(openai_chat.error_body(status, message, hint), status=status, headers=headers)

    def _check_admin(self, request: web.Request) -> None:
        if not _same(_bearer(request), self._admin_token):
            raise GatewayError("this request needs the admin token", status=401, hint=_ADMIN_HINT)


def _bearer(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


def _same(given: str, secret: str | None) -> bool:
    return bool(secret) and hmac.compare_digest(given.encode(errors="replace"), str(secret).encode())
