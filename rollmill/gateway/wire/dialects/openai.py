"""What OpenAI's wire formats share: errors, usage, log-probs, the end of an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollmill.errors import GatewayError
from rollmill.gateway.wire.answer import Answer
from rollmill.gateway.wire.dialect import Dialect, Identity, Limits, ModelRequest, Reply, TokenLogprob, error_text
from rollmill.gateway.wire.dialects import fields
from rollmill.inference.engine import MOST_TOP_LOGPROBS

_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ERROR_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    503: "service_unavailable",
}
_MOST_ANSWERS = 16


class OpenAIDialect(Dialect):
    def error(self, error: GatewayError) -> dict[str, Any]:
        return error_body(error)


class OpenAIWriter:
    """What the streams of chat completions and of completions have in common."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._head = head

    def heartbeat(self) -> bytes:
        return b": heartbeat\n\n"  # a comment of server-sent events

    def error(self, error: GatewayError) -> bytes:
        return fields.event(error_body(error))

    def _end(self, reply: Reply) -> bytes:
        wanted = reply.request.options.get("include_usage")
        told = fields.event({**self._head, "choices": [], "usage": usage(reply)}) if wanted else b""
        return told + b"data: [DONE]\n\n"


def error_body(error: GatewayError) -> dict[str, Any]:
    status = error.status
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = error.code or _ERROR_CODES.get(status)
    return {"error": {"message": error_text(error), "type": kind, "param": None, "code": code}}


def common(tree: Mapping[str, Any], limits: Limits, *max_tokens: str) -> dict[str, Any]:
    """The fields of a ModelRequest that have the same names in OpenAI's formats."""
    return {**fields.common(tree, limits, max_tokens), "user": fields.field(tree, "user", str) or ""}


def several(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that chat completions and completions have beside those."""
    options = fields.field(tree, "stream_options", dict) or {}
    return {
        "stop": fields.stops("stop", tree.get("stop")),
        "count": fields.integer(tree, "n", 1, _MOST_ANSWERS) or 1,
        "options": {"include_usage": options.get("include_usage") is True},
    }


def head(id: str, kind: str, request: ModelRequest, identity: Identity) -> dict[str, Any]:
    """The first fields of a chat completion or a completion, whole or in pieces."""
    return {"id": id, "object": kind, "created": identity.created, "model": request.model or "rollmill"}


def usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.sampled_tokens,
        "total_tokens": reply.prompt_tokens + reply.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }


def finish_reason(answer: Answer) -> str:
    if answer.finish != "stop":
        return "length"
    return "tool_calls" if answer.message.get("tool_calls") else "stop"


def token_logprobs(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """The log-prob of each sampled token, in the form of chat completions and responses.

    A token that is a part of a character has no text of its own, so its bytes are not told.
    """
    return [
        {**_one(each.text, each.logprob), "top_logprobs": [_one(text, logprob) for text, logprob in each.best]}
        for each in logprobs
    ]


def read_top_logprobs(tree: Mapping[str, Any], logprobs: bool) -> int:
    """How many of the most likely tokens a request asks for."""
    count = fields.integer(tree, "top_logprobs", 0, MOST_TOP_LOGPROBS) or 0
    if count and not logprobs:
        raise GatewayError(f"top_logprobs = {count} needs log-probs", hint="ask for logprobs too")
    return count


def _one(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}
