"""What may be kept of production traffic: decided before the model sees a request and before anything is written.

    x-rollmill-consent: none | store | train     of one request; else that of its key; else `gateway.consent`

    none      answered, and never written: no log, no payload, no row. The session lives in memory
    store     recorded, and never trained on
    train     recorded, and real-time RL may learn from it

A session has one consent. A request with another one starts a new session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeVar, cast, get_args

from rollmill.chat.format import Message
from rollmill.errors import GatewayError
from rollmill.gateway.access.redaction import (
    Patterns,
    RedactionSection,
    Redactor,
    redact_forged,
    redact_inputs,
    redact_schema,
)
from rollmill.gateway.wire.dialect import ModelRequest
from rollmill.kinds import build

log = logging.getLogger(__name__)
Consent = Literal["none", "store", "train"]
_HEADER = "x-rollmill-consent"
T = TypeVar("T")


class Privacy:
    def __init__(self, default: Consent, redaction: RedactionSection) -> None:
        self._default = default
        self._redactor: Redactor = build(redaction)
        self.redacts = not (isinstance(self._redactor, Patterns) and self._redactor.is_empty)

    def consent(self, headers: Mapping[str, str], of_key: str | None, request: ModelRequest) -> Consent:
        said = headers.get(_HEADER) or of_key or self._default
        if said not in get_args(Consent):
            raise GatewayError(f"{_HEADER} is {said[:80]!r}", hint=f"one of {', '.join(get_args(Consent))}")
        # token ids cannot be redacted
        return "none" if self.redacts and isinstance(request.prompt, list) else cast(Consent, said)

    def redact_inputs(self, request: ModelRequest) -> ModelRequest:
        """Redacts a request before its session is looked for. Answers in it are left for `redact_forged`."""
        prompt = request.prompt
        if isinstance(prompt, str):
            text = prompt
            prompt = _guarded(lambda: self._redactor.redact(text))
        messages = _guarded(lambda: redact_inputs(request.messages, self._redactor))
        tools, schema = _guarded(lambda: redact_schema([request.tools, request.schema], self._redactor))
        return replace(request, prompt=prompt, messages=messages, tools=tools, schema=schema)

    def redact_forged(self, request: ModelRequest, sampled: Sequence[Message]) -> ModelRequest:
        """Redacts the answers in a request that are not among those that its session has `sampled`."""
        return replace(request, messages=_guarded(lambda: redact_forged(request.messages, sampled, self._redactor)))


def _guarded(redact: Callable[[], T]) -> T:
    """A redactor may be code of the user. If it fails, the model does not get the request."""
    try:
        return redact()
    except Exception as error:
        log.error("the redactor failed: %s", type(error).__name__)
        raise GatewayError("the request could not be redacted", status=500, hint="[gateway.redaction]") from None
