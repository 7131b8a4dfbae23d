"""POST /v1/chat/completions, and the other routes that ask the model in one of its dialects.

    key ─► parse ─► prepare (consent, redaction, session) ─► answer

A request about a session of another worker is forwarded first. /v1/responses is in responses.py.
"""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import web

from rollmill.errors import GatewayError
from rollmill.gateway.access.access import given_key
from rollmill.gateway.answering import Ask
from rollmill.gateway.gateway_parts import GatewayParts
from rollmill.gateway.routes.request_preparation import Caller, RequestPreparation, aside
from rollmill.gateway.routing.targets import DEFAULT
from rollmill.gateway.sessions.identity import agent_session, conversation, named_session
from rollmill.gateway.sessions.registry import session_in
from rollmill.gateway.wire.dialect import Dialect, Limits, ModelRequest
from rollmill.gateway.wire.dialects.anthropic import AnthropicMessages
from rollmill.gateway.wire.dialects.openai_chat import OpenAIChat
from rollmill.gateway.wire.dialects.openai_completions import OpenAICompletions
from rollmill.gateway.workers import opening

log = logging.getLogger(__name__)
OPENAI_CHAT, OPENAI_COMPLETIONS, ANTHROPIC = OpenAIChat(), OpenAICompletions(), AnthropicMessages()


class ModelRoutes:
    def __init__(self, parts: GatewayParts) -> None:
        self._workers = parts.workers
        self.limits = Limits(parts.given.format.stop_tokens, parts.config.default_max_tokens, parts.config.max_messages)
        self.preparation = RequestPreparation(parts)
        self._format = parts.given.format
        self._answering = parts.answering
        self._registry = parts.registry
        self._router = parts.router
        self._metrics = parts.metrics
        self._access = parts.access
        self._logged: set[tuple[str, str]] = set()  # fields without effect: few, names are those of the dialects

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/messages", self.messages)
        app.router.add_post("/v1/messages/count_tokens", self.count_tokens)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{id}", self.model)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a conversation and record its exact tokens.

        Needs: the key of an open session, or a key with the scope production.
        Takes: an OpenAI chat completion; header `x-rollmill-session: ID` names a production conversation.
        Returns: an OpenAI chat completion, or a stream of it; 503 with Retry-After while no engine is alive.
        """
        return await self._answer(request, OPENAI_CHAT)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Continue a prompt, given as text or as token ids, and record the exact tokens.

        Needs: as POST /v1/chat/completions.
        Takes: an OpenAI completion with one prompt.
        Returns: an OpenAI completion with `token_ids` in each choice, or a stream of it.
        """
        return await self._answer(request, OPENAI_COMPLETIONS)

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """Answer a conversation and record its exact tokens.

        Needs: as POST /v1/chat/completions; the key may be sent as `x-api-key`.
        Takes: an Anthropic message request; header `x-rollmill-session: ID` names a production conversation.
        Returns: an Anthropic message, or a stream of it; 529 with Retry-After while no engine is alive.
        """
        return await self._answer(request, ANTHROPIC)

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        """Count the tokens of a conversation.

        Needs: as POST /v1/messages.
        Takes: an Anthropic message request.
        Returns: {"input_tokens"}.
        """
        if (name := session_in(given_key(request))) is not None and self._workers.elsewhere(request, name):
            return await self._workers.forward(request, name)
        await self.admit(request)
        asked = ANTHROPIC.parse(await request.read(), self.limits)
        self._check_model(asked.model)
        tokens = await aside(lambda asked: self._format.render_start(asked.messages, asked.tools), asked)
        return web.json_response({"input_tokens": len(tokens)})

    async def models(self, request: web.Request) -> web.Response:
        """List the names of models that a request may ask for.

        Needs: nothing.
        Returns: a list that clients of OpenAI and of Anthropic can read; `max_model_len` is the context in tokens.
        """
        listed = [_describe_model(name, self._router.window()) for name in self._router.names()]
        page = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"], "has_more": False}
        return web.json_response({"object": "list", "data": listed, **page})

    async def model(self, request: web.Request) -> web.Response:
        """Describe one model.

        Needs: nothing.
        Returns: a model that clients of OpenAI and of Anthropic can read; 404 if there is none of this name.
        """
        self._check_model(request.match_info["id"])
        return web.json_response(_describe_model(request.match_info["id"], self._router.window()))

    async def admit(self, http: web.Request) -> Caller:
        """The session of the request's key, or a production key. Raises for any other key."""
        return self._registry.by_key(given_key(http)) or await self._access.admit(http, "production")

    async def parse(self, http: web.Request, dialect: Dialect) -> ModelRequest:
        """Of a client whose key was not checked yet: it learns what is wrong with its request if its key is right."""
        try:
            return dialect.parse(await http.read(), self.limits)
        except GatewayError:
            await self.admit(http)
            raise

    async def answer(
        self, http: web.Request, dialect: Dialect, caller: Caller, request: ModelRequest, continues: str | None = None
    ) -> web.StreamResponse:
        """`continues`: the session of what the request refers to."""
        self._check_model(request.model)
        self._note_ignored(dialect, request)
        session, request = await self.preparation.prepare(http, caller, request, continues)
        self._metrics.count("requests_total", traffic=session.facts.traffic)
        return await self._answering.answer(session, Ask(request, dialect, http))

    async def _answer(self, http: web.Request, dialect: Dialect) -> web.StreamResponse:
        request = None
        if self._workers.shares:
            owner = session_in(given_key(http)) or named_session(http) or agent_session(http.headers)
            if owner is None:
                request = await self.parse(http, dialect)
                # a prompt has no opening: it is any worker's
                owner = conversation(http, request) or (opening(request.messages) if request.messages else None)
            if owner is not None and self._workers.elsewhere(http, owner):
                return await self._workers.forward(http, owner)
        caller = await self.admit(http)
        request = request or dialect.parse(await http.read(), self.limits)
        return await self.answer(http, dialect, caller, request)

    def _check_model(self, name: str) -> None:
        if name in ("", DEFAULT):
            return
        names = self._router.names()
        if self._router.served(name) not in names:
            raise GatewayError(
                "there is no model of this name",
                status=404,
                hint=f"one of {', '.join(names[:8])}, or leave it out; gateway.aliases can take other names",
                code="model_not_found",
            )

    def _note_ignored(self, dialect: Dialect, request: ModelRequest) -> None:
        """Counts what has no effect, and names each field and kind of tool once in the log."""
        for name in request.ignored:
            self._metrics.count("ignored_fields_total", field=name, dialect=dialect.name)
        for name in request.dropped:
            self._metrics.count("dropped_tools_total", tool=name, dialect=dialect.name)
        for name in (*request.ignored, *request.dropped):
            if (dialect.name, name) not in self._logged:
                self._logged.add((dialect.name, name))
                log.info("requests of %s have %r: it is accepted without effect", dialect.name, name)


def dialect_of(path: str) -> Dialect:
    """The dialect in which errors of this path are written."""
    return ANTHROPIC if "/v1/messages" in path else OPENAI_CHAT


def dialect_name(path: str) -> str:
    """The name of the dialect that a path speaks, for metrics."""
    named = {"/v1/responses": "openai_responses", "/v1/completions": OPENAI_COMPLETIONS.name}
    return named.get(path) or dialect_of(path).name


def _describe_model(name: str, window: int | None) -> dict[str, Any]:
    """A model with the fields of OpenAI and of Anthropic, and the window as vLLM tells it."""
    openai: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "rollmill"}
    if window is not None:
        openai["max_model_len"] = window
    return openai | {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
