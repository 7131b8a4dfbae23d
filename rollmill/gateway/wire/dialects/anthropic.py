"""Anthropic messages: the wire format in and out. `anthropic_request.py` reads the conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rollmill.chat.format import Message
from rollmill.errors import GatewayError
from rollmill.gateway.wire.answer import Answer
from rollmill.gateway.wire.answer_grammars import read_forced, read_schema
from rollmill.gateway.wire.body import parse_object, to_bytes
from rollmill.gateway.wire.dialect import Delta, Dialect, Identity, Limits, ModelRequest, Reply, error_text
from rollmill.gateway.wire.dialects import fields
from rollmill.gateway.wire.dialects.anthropic_request import (
    MALFORMED,
    parse_anthropic_tools,
    parse_conversation,
    parse_user,
)

_NEUTRAL: dict[str, tuple[Any, ...]] = {"container": (), "mcp_servers": ([],)}
_KNOWN = frozenset(
    "max_tokens messages metadata model output_config output_format seed stop_sequences stream system temperature"
    " tool_choice tools top_k top_p".split()
)
# accepted without effect: a model reasons as it was trained to, and a history is only what the client sends
_IGNORED = frozenset("betas cache_control context_management inference_geo service_tier speed thinking".split())
_SIGNATURE = "cm9sbG1pbGw="  # never checked; some clients send thinking without a signature back as text
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


class AnthropicMessages(Dialect):
    name = "anthropic"

    def parse(self, body: bytes, limits: Limits) -> ModelRequest:
        tree = parse_object(body)
        ignored = fields.check_names(tree, _KNOWN, _NEUTRAL, _IGNORED)
        user, session = parse_user(tree)
        choice = fields.field(tree, "tool_choice", dict) or {"type": "auto"}
        tools, deferred, dropped = parse_anthropic_tools(tree)
        if choice.get("type") == "none":
            tools = []
        wanted = choice if choice.get("type") == "tool" else choice.get("type")
        output = (fields.field(tree, "output_config", dict) or {}).get("format") or tree.get("output_format")
        return ModelRequest(
            messages=parse_conversation(tree, limits.max_messages, deferred),
            tools=tools,
            schema=read_schema("output_config.format", output),
            forced=read_forced(wanted, tools),
            one_call=fields.field(choice, "disable_parallel_tool_use", bool) is True,
            stop=fields.stops("stop_sequences", tree.get("stop_sequences")),
            user=user,
            deferred=deferred,
            ignored=ignored,
            dropped=dropped,
            session=session,
            **fields.common(tree, limits, ("max_tokens",)),
        )

    def reply(self, reply: Reply) -> bytes:
        (answer,) = reply.answers
        return to_bytes(
            {
                **_head(reply.request, reply.identity),
                "content": list(_blocks(answer.message)),
                **_end(answer),
                "usage": _usage(reply),
                "rollmill": reply.about,
            }
        )

    def stream(self, request: ModelRequest, identity: Identity) -> EventWriter:
        return EventWriter(request, identity)

    def error(self, error: GatewayError) -> dict[str, Any]:
        status = self.status(error)
        kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        text = error_text(error)
        if error.code == "context_length_exceeded":
            text = f"prompt is too long: {text}"  # clients look for these words
        return {"type": "error", "error": {"type": kind, "message": text}}

    def status(self, error: GatewayError) -> int:
        return 529 if error.status == 503 else error.status


class EventWriter:
    """One block of content at a time: thinking, then text, then one block per tool call."""

    def __init__(self, request: ModelRequest, identity: Identity) -> None:
        self._head = _head(request, identity)
        self._index = -1  # number of the current block
        self._open = ""  # type of the current block; "" if none is open

    def start(self, prompt_tokens: int) -> bytes:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=message) + _event("ping")

    def delta(self, index: int, delta: Delta) -> bytes:
        events = b""
        if delta.reasoning:
            events += self._enter({"type": "thinking", "thinking": "", "signature": ""})  # it comes at the end
            events += self._piece({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.text:
            events += self._enter({"type": "text", "text": ""})
            events += self._piece({"type": "text_delta", "text": delta.text})
        return events

    def heartbeat(self) -> bytes:
        return _event("ping")

    def finish(self, reply: Reply) -> bytes:
        (answer,) = reply.answers
        events = b""
        for block in _blocks(answer.message):
            if block["type"] == "tool_use":
                events += self._leave() + self._enter({**block, "input": {}})
                events += self._piece({"type": "input_json_delta", "partial_json": json.dumps(block["input"])})
        events += self._leave()
        events += _event("message_delta", delta=_end(answer), usage=_usage(reply), rollmill=reply.about)
        return events + _event("message_stop")

    def error(self, error: GatewayError) -> bytes:
        return fields.event(AnthropicMessages().error(error), "error")

    def _enter(self, block: dict[str, Any]) -> bytes:
        if self._open == block["type"]:
            return b""
        events = self._leave()
        self._index, self._open = self._index + 1, block["type"]
        return events + _event("content_block_start", index=self._index, content_block=block)

    def _piece(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _leave(self) -> bytes:
        if not self._open:
            return b""
        signed = self._piece({"type": "signature_delta", "signature": _SIGNATURE}) if self._open == "thinking" else b""
        self._open = ""
        return signed + _event("content_block_stop", index=self._index)


def _head(request: ModelRequest, identity: Identity) -> dict[str, Any]:
    model = request.model or "rollmill"
    return {"id": f"msg_{identity.id}", "type": "message", "role": "assistant", "model": model}


def _blocks(message: Message) -> Iterator[dict[str, Any]]:
    if message.get("reasoning_content"):
        yield {"type": "thinking", "thinking": message["reasoning_content"], "signature": _SIGNATURE}
    if message["content"]:
        yield {"type": "text", "text": message["content"]}
    for call in message.get("tool_calls") or ():
        function = call["function"]
        yield {"type": "tool_use", "id": call["id"], "name": function["name"], "input": _input(function["arguments"])}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call. This format knows only objects, so anything else is wrapped into one."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        given = None
    return given if isinstance(given, dict) else {MALFORMED: arguments}


def _end(answer: Answer) -> dict[str, Any]:
    if answer.finish != "stop":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if answer.message.get("tool_calls"):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": "end_turn" if answer.stop is None else "stop_sequence", "stop_sequence": answer.stop}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "cache_read_input_tokens": reply.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": reply.sampled_tokens,
    }


def _event(kind: str, **fields_: Any) -> bytes:
    return fields.event({"type": kind, **fields_}, kind)
