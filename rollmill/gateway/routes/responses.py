"""POST /v1/responses: OpenAI's responses. A request may continue a stored response, or refer to items of stored ones.

What is stored belongs to one session. A response is only found by whoever made it: the session's own key, or the
same production key, user and consent.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from rollmill.gateway.access.access import given_key
from rollmill.gateway.access.keys import Key
from rollmill.gateway.gateway_parts import GatewayParts
from rollmill.gateway.routes.chat_completions import ModelRoutes
from rollmill.gateway.routes.request_preparation import Caller
from rollmill.gateway.sessions.identity import conversation
from rollmill.gateway.sessions.registry import session_in
from rollmill.gateway.sessions.sessions import Session
from rollmill.gateway.sessions.stored import no_such_item, no_such_response
from rollmill.gateway.wire.dialect import ModelRequest
from rollmill.gateway.wire.dialects.openai_responses import OpenAIResponses, session_of
from rollmill.gateway.workers import opening

OPENAI_RESPONSES = OpenAIResponses()


class ResponseRoutes:
    def __init__(self, parts: GatewayParts, model: ModelRoutes) -> None:
        self._workers, self._registry, self._model = parts.workers, parts.registry, model

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/responses", self.responses)
        app.router.add_get("/v1/responses/{id}", self.response)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """Answer items, or continue a stored response, and record the exact tokens.

        Needs: as POST /v1/chat/completions.
        Takes: an OpenAI response request; `previous_response_id` names a response of this session, user and consent.
        Returns: an OpenAI response, or a stream of its events; 404 if the previous response is not stored.
        """
        asked = await self._model.parse(request, OPENAI_RESPONSES)
        previous = asked.options["previous"]
        if self._workers.shares:
            owner = session_in(given_key(request)) or (previous and session_of(previous))
            owner = owner or conversation(request, asked) or opening(asked.messages)
            if self._workers.elsewhere(request, owner):
                return await self._workers.forward(request, owner)
        caller = await self._model.admit(request)
        asked, continues = self._resolved(request, caller, asked)
        return await self._model.answer(request, OPENAI_RESPONSES, caller, asked, continues)

    async def response(self, request: web.Request) -> web.StreamResponse:
        """Show a stored response.

        Needs: the key that the response was made with.
        Returns: an OpenAI response; 404 if it is not stored, or its session has ended.
        """
        id = request.match_info["id"]
        owner = session_in(given_key(request)) or session_of(id)
        if self._workers.elsewhere(request, owner):
            return await self._workers.forward(request, owner)
        caller = await self._model.admit(request)
        stored = self._registry.responses.get(id)
        if not _is_owned(self._registry.get(stored.trajectory), caller):
            raise no_such_response()
        return web.json_response(stored.body)

    def _resolved(self, http: web.Request, caller: Caller, asked: ModelRequest) -> tuple[ModelRequest, str | None]:
        """The request with all that it refers to, and the session that it continues."""
        consent = self._model.preparation.consent(http, caller, asked) if isinstance(caller, Key) else ""
        continued: list[str] = []  # sessions

        def is_callers(trajectory: str) -> bool:
            session = self._registry.get(trajectory)
            if session is None or not _is_owned(session, caller):
                return False
            return isinstance(caller, Session) or self._registry.owns(
                session, key_id=caller.id, user=asked.user, consent=consent
            )

        def find(id: str) -> dict[str, Any]:
            trajectory, body = self._registry.responses.with_item(id)
            item = next((item for item in body["output"] if item["id"] == id), None)
            if item is None or not is_callers(trajectory):
                raise no_such_item(id)
            continued.append(trajectory)
            return dict(item)

        stored = self._registry.responses.get(asked.options["previous"]) if asked.options["previous"] else None
        if stored is not None and not is_callers(stored.trajectory):
            raise no_such_response()
        asked = OPENAI_RESPONSES.continued(asked, self._model.limits, stored, find)
        if stored is not None:
            return asked, stored.trajectory
        return asked, continued[-1] if continued else None


def _is_owned(session: Session | None, caller: Caller) -> bool:
    """Whether the caller's key is that of the session, or the one that the session was made with."""
    if isinstance(caller, Session):
        return session is caller
    return session is not None and session.facts.provenance.get("key") == caller.id
