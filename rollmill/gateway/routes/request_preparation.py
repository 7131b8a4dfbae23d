"""From a parsed request to what the model sees, and the session that records it.

    consent ─► redaction of what the client says ─► token ids ─► session ─► redaction of answers it has not sampled

A request makes this way once. What its session is looked for by is redacted before: nothing else is ever kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from aiohttp import web

from rollmill.errors import GatewayError
from rollmill.gateway.access.keys import Key
from rollmill.gateway.access.privacy import Consent, Privacy
from rollmill.gateway.gateway_parts import GatewayParts
from rollmill.gateway.sessions.identity import check_named, conversation, named_session
from rollmill.gateway.sessions.sessions import Session
from rollmill.gateway.wire.dialect import ModelRequest
from rollmill.trajectories.table_rows import consent_of

T = TypeVar("T")
Caller = Session | Key  # the session whose key a request has, or its key for production


class RequestPreparation:
    def __init__(self, parts: GatewayParts) -> None:
        self._privacy = Privacy(parts.config.consent, parts.config.redaction)
        self._registry = parts.registry
        self._tokenizer = parts.given.tokenizer

    def consent(self, http: web.Request, caller: Caller, request: ModelRequest) -> Consent:
        """Raises 400 for a request of a session with another consent than its own: a session has one."""
        if isinstance(caller, Key):
            return self._privacy.consent(http.headers, caller.consent, request)
        own = consent_of(caller.facts.provenance)
        consent = self._privacy.consent(http.headers, own, request)
        if consent != own:
            raise GatewayError(
                f"the consent of this session is {own[:80]!r}, and that of this request {consent!r}",
                hint="open another session; with redaction, a prompt of token ids is never stored",
            )
        return consent

    async def prepare(
        self, http: web.Request, caller: Caller, request: ModelRequest, continues: str | None
    ) -> tuple[Session, ModelRequest]:
        """`continues`: the session of what the request refers to."""
        if isinstance(caller, Session):
            check_named(continues or named_session(http), caller)
            if caller.facts.traffic == "rollout":
                return caller, await aside(self._with_tokens, request)
        consent, redacts = self.consent(http, caller, request), self._privacy.redacts
        if redacts:
            request = await aside(self._privacy.redact_inputs, request)
        request = await aside(self._with_tokens, request)
        if isinstance(caller, Session):
            session = caller
        else:
            session = self._registry.production(
                continues or conversation(http, request),
                request.user,
                request.messages,
                key_id=caller.id,
                consent=consent,
                cache_key=request.cache_key,
            )
        if redacts:
            sampled = [turn.answer.message for segment in session.segments.values() for turn in segment.turns]
            request = await aside(partial(self._privacy.redact_forged, sampled=sampled), request)
        return session, request

    def _with_tokens(self, request: ModelRequest) -> ModelRequest:
        """A request that gives its context itself, as token ids. In the record it is a message of the role "prompt"."""
        if request.prompt is None:
            return request
        prompt = self._tokenizer.encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
        message = {"role": "prompt", "content": self._tokenizer.decode(prompt)}
        return replace(request, prompt=prompt, messages=[message])


async def aside(work: Callable[[ModelRequest], T], request: ModelRequest) -> T:
    """What `work` makes of the request. For a large one it runs in a thread, beside other answers."""
    return await asyncio.to_thread(work, request) if request.is_large else work(request)
