"""The routes that clients of the model use, one per dialect. See `rollmill.gateway.wire.dialect`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from rollmill.errors import GatewayError
from rollmill.gateway.access.access import Access, given_key
from rollmill.gateway.access.keys import Key
from rollmill.gateway.access.privacy import Consent, Privacy
from rollmill.gateway.answering import Ask, Completions
from rollmill.gateway.config import GatewayConfig
from rollmill.gateway.routing.targets import DEFAULT
from rollmill.gateway.sessions.identity import agent_session, check_named, named_session
from rollmill.gateway.sessions.registry import Registry, session_in
from rollmill.gateway.sessions.sessions import Session, is_id
from rollmill.gateway.sessions.stored import Stored, no_such_item, no_such_response
from rollmill.gateway.watching.metrics import Metrics
from rollmill.gateway.wire.dialect import Dialect, Limits, ModelRequest
from rollmill.gateway.wire.dialects.anthropic import AnthropicMessages
from rollmill.gateway.wire.dialects.openai_chat import OpenAIChat
from rollmill.gateway.wire.dialects.openai_completions import OpenAICompletions
from rollmill.gateway.wire.dialects.responses import OpenAIResponses, session_of
from rollmill.gateway.wire.offload import aside
from rollmill.gateway.workers import Workers, opening
from rollmill.trajectories.table_rows import consent_of

log = logging.getLogger(__name__)
OPENAI_CHAT, OPENAI_COMPLETIONS, ANTHROPIC = OpenAIChat(), OpenAICompletions(), AnthropicMessages()


class ModelRoutes:
    """`model_names` returns the names that a request may ask for; the first stands for no name. `served` returns the
    one of them that a name is an alias of, see `gateway.aliases`. `window` returns the
    tokens of context that every engine has, or None if no engine tells."""

    def __init__(
        self,
        config: GatewayConfig,
        stop_tokens: tuple[int, ...],
        completions: Completions,
        registry: Registry,
        metrics: Metrics,
        access: Access,
        model_names: Callable[[], Sequence[str]],
        served: Callable[[str], str],
        window: Callable[[], int | None],
        workers: Workers,
    ) -> None:
        self._workers = workers
        self._limits = Limits(stop_tokens, config.default_max_tokens, config.max_messages)
        self._completions = completions
        self._registry = registry
        self._metrics = metrics
        self._access = access
        self._privacy = Privacy(config.consent, config.redaction)
        self._model_names = model_names
        self._served = served
        self._window = window
        self._responses = OpenAIResponses()
        self._told: set[tuple[str, str]] = set()  # what was named in the log: few, names are those of the dialects

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/messages", self.messages)
        app.router.add_post("/v1/messages/count_tokens", self.count_tokens)
        app.router.add_post("/v1/responses", self.responses)
        app.router.add_get("/v1/responses/{id}", self.response)
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
        await self._admit(request)
        asked = ANTHROPIC.parse(await request.read(), self._limits)
        self._check_model(asked.model)
        count = await aside(asked, lambda: self._completions.count_tokens(asked))
        return web.json_response({"input_tokens": count})

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """Answer items, or continue a stored response, and record the exact tokens.

        Needs: as POST /v1/chat/completions.
        Takes: an OpenAI response request; `previous_response_id` names a response of this session, user and consent.
        Returns: an OpenAI response, or a stream of its events; 404 if the previous response is not stored.
        """
        asked = await self._parsed(request, self._responses)
        previous = asked.options["previous"]
        if self._workers.shares:
            name = session_in(given_key(request)) or (previous and session_of(previous))
            name = name or _named(request, asked) or opening(asked.messages)
            if self._workers.elsewhere(request, name):
                return await self._workers.forward(request, name)
        admitted = await self._admit(request)
        stored = self._find_stored(previous, admitted) if previous else None
        if stored is not None and isinstance(admitted, Key):
            self._check_owner(stored, admitted, self._privacy.consent(request.headers, admitted.consent, asked), asked)
        consent = self._privacy.consent(request.headers, admitted.consent, asked) if isinstance(admitted, Key) else ""
        items = _StoredItems(self._registry, admitted, asked.user, consent)
        asked = self._responses.continued(self._responses.resolved(asked, self._limits, items.find), stored)
        name = stored.trajectory if stored is not None else items.trajectory or named_session(request)
        return await self._answer_in(request, self._responses, name, admitted, asked)

    async def response(self, request: web.Request) -> web.StreamResponse:
        """Show a stored response.

        Needs: the key that the response was made with.
        Returns: an OpenAI response; 404 if it is not stored, or its session has ended.
        """
        id = request.match_info["id"]
        name = session_in(given_key(request)) or session_of(id)
        if self._workers.elsewhere(request, name):
            return await self._workers.forward(request, name)
        return web.json_response(self._find_stored(id, await self._admit(request)).body)

    async def models(self, request: web.Request) -> web.Response:
        """List the names of models that a request may ask for.

        Needs: nothing.
        Returns: a list that clients of OpenAI and of Anthropic can read; `max_model_len` is the context in tokens.
        """
        listed = [_describe_model(name, self._window()) for name in self._model_names()]
        page = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"], "has_more": False}
        return web.json_response({"object": "list", "data": listed, **page})

    async def model(self, request: web.Request) -> web.Response:
        """Describe one model.

        Needs: nothing.
        Returns: a model that clients of OpenAI and of Anthropic can read; 404 if there is none of this name.
        """
        self._check_model(request.match_info["id"])
        return web.json_response(_describe_model(request.match_info["id"], self._window()))

    async def _answer(self, http: web.Request, dialect: Dialect) -> web.StreamResponse:
        request = None
        if self._workers.shares:
            name = session_in(given_key(http)) or named_session(http) or agent_session(http.headers)
            if name is None:
                request = await self._parsed(http, dialect)
                # a prompt: any worker's
                name = _named(http, request) or (opening(request.messages) if request.messages else None)
            if name is not None and self._workers.elsewhere(http, name):
                return await self._workers.forward(http, name)
        admitted = await self._admit(http)
        request = request or dialect.parse(await http.read(), self._limits)
        return await self._answer_in(http, dialect, named_session(http), admitted, request)

    async def _parsed(self, http: web.Request, dialect: Dialect) -> ModelRequest:
        """Of a client whose key was not checked yet: it learns what is wrong with its request if its key is right."""
        try:
            return dialect.parse(await http.read(), self._limits)
        except GatewayError:
            await self._admit(http)
            raise

    async def _answer_in(
        self, http: web.Request, dialect: Dialect, name: str | None, admitted: Session | Key, request: ModelRequest
    ) -> web.StreamResponse:
        self._check_model(request.model)
        self._tell_ignored(dialect, request)
        if isinstance(admitted, Session):
            check_named(name, admitted)
            session = admitted
            if session.facts.traffic == "production":
                self._check_consent(http, session, request)
                request = await self._redacted(request)
            request = await self._with_tokens(request)
        else:
            consent = self._privacy.consent(http.headers, admitted.consent, request)
            request = await self._with_tokens(await self._redacted(request))
            session = self._registry.production(
                name or _named(http, request),
                request.user,
                request.messages,
                key_id=admitted.id,
                consent=consent,
                cache_key=request.cache_key,
            )
        if session.facts.traffic == "production" and self._privacy.redacts:
            given = request
            request = await aside(given, lambda: self._privacy.redact_forged(given, session))
        self._metrics.count("requests_total", traffic=session.facts.traffic)
        return await self._completions.answer(session, Ask(request, dialect, http))

    def _check_consent(self, http: web.Request, session: Session, request: ModelRequest) -> None:
        """A session that was opened with its own key keeps its consent. Raises 400 for a request with another one."""
        own = consent_of(session.facts.provenance)
        asked = self._privacy.consent(http.headers, own, request)
        if asked != own:
            raise GatewayError(
                f"the consent of this session is {own[:80]!r}, and that of this request {asked!r}",
                hint="open another session; with redaction, a prompt of token ids is never stored",
            )

    def _tell_ignored(self, dialect: Dialect, request: ModelRequest) -> None:
        """Counts what has no effect, and names each field and kind of tool once in the log."""
        for name in request.ignored:
            self._metrics.count("ignored_fields_total", field=name, dialect=dialect.name)
        for name in request.dropped:
            self._metrics.count("dropped_tools_total", tool=name, dialect=dialect.name)
        for name in (*request.ignored, *request.dropped):
            if (dialect.name, name) not in self._told:
                self._told.add((dialect.name, name))
                log.info("requests of %s have %r: it is accepted without effect", dialect.name, name)

    async def _redacted(self, request: ModelRequest) -> ModelRequest:
        if not self._privacy.redacts:
            return request
        return await aside(request, lambda: self._privacy.redact_inputs(request))

    async def _with_tokens(self, request: ModelRequest) -> ModelRequest:
        if request.prompt is None:
            return request
        return await aside(request, lambda: self._completions.with_tokens(request))

    def _find_stored(self, id: str, admitted: Session | Key) -> Stored:
        """A stored response of the caller's own open session. Raises 404 for any other."""
        stored = self._registry.responses.get(id)
        session = self._registry.get(stored.trajectory)
        owner = None if session is None else session.facts.provenance.get("key")
        mine = session is admitted if isinstance(admitted, Session) else owner == admitted.id
        if session is None or not mine:
            raise no_such_response()
        return stored

    def _check_owner(self, stored: Stored, key: Key, consent: Consent, asked: ModelRequest) -> None:
        """Raises 404 if the response is of another user or consent: a session has one of each."""
        session = self._registry.get(stored.trajectory)
        if session is None or not self._registry.owns(session, key_id=key.id, user=asked.user, consent=consent):
            raise no_such_response()

    async def _admit(self, http: web.Request) -> Session | Key:
        """The session of the request's key, or a production key. Raises for any other key."""
        return self._registry.by_key(given_key(http)) or await self._access.admit(http, "production")

    def _check_model(self, name: str) -> None:
        if name in ("", DEFAULT):
            return
        names = self._model_names()
        if self._served(name) not in names:
            raise GatewayError(
                "there is no model of this name",
                status=404,
                hint=f"one of {', '.join(names[:8])}, or leave it out; gateway.aliases can take other names",
                code="model_not_found",
            )


class _StoredItems:
    """The stored items that a request refers to. They are of one session, which the request continues."""

    def __init__(self, registry: Registry, admitted: Session | Key, user: str, consent: str) -> None:
        self._registry, self._admitted, self._user, self._consent = registry, admitted, user, consent
        self.trajectory: str | None = None

    def find(self, id: str) -> dict[str, Any]:
        """Raises 404 for an item that is not the caller's own."""
        trajectory, body = self._registry.responses.with_item(id)
        session, caller = self._registry.get(trajectory), self._admitted
        if session is None or (
            session is not caller
            if isinstance(caller, Session)
            else not self._registry.owns(session, key_id=caller.id, user=self._user, consent=self._consent)
        ):
            raise no_such_item(id)
        for item in body["output"]:
            if item["id"] == id:
                self.trajectory = trajectory
                return dict(item)
        raise no_such_item(id)


def _named(http: web.Request, request: ModelRequest) -> str | None:
    """The conversation that a production request names: itself, or as its agent does."""
    return named_session(http) or agent_session(http.headers) or (request.session if is_id(request.session) else None)


def dialect_of(path: str) -> Dialect:
    """The dialect in which an error of this path is told."""
    return ANTHROPIC if "/v1/messages" in path else OPENAI_CHAT


def dialect_name(path: str) -> str:
    """The name of the dialect that a path speaks, for metrics."""
    named = {"/v1/responses": OpenAIResponses.name, "/v1/completions": OPENAI_COMPLETIONS.name}
    return named.get(path) or dialect_of(path).name


def _describe_model(name: str, window: int | None) -> dict[str, Any]:
    """A model with the fields of OpenAI and of Anthropic, and the window as vLLM tells it."""
    openai: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "rollmill"}
    if window is not None:
        openai["max_model_len"] = window
    return openai | {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
