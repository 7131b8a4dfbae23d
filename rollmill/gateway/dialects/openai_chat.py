"""OpenAI chat completions: the wire format in and out.

A field that would change the sampling and cannot be honoured exactly is refused. Fields that only describe the request
are accepted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollmill.chat.format import Message, Tool
from rollmill.errors import GatewayError
from rollmill.gateway.body import parse_object, short
from rollmill.gateway.segments import Answer
from rollmill.types import Sampling

# field -> values that have no effect
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}
_LARGEST = (1 << 31) - 1
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error"}
_ERROR_CODES = {401: "invalid_api_key", 404: "not_found", 413: "request_too_large", 503: "service_unavailable"}


@dataclass(frozen=True)
class ChatRequest:
    messages: list[Message]  # text content only, see `_message`
    tools: list[Tool]
    sampling: Sampling
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    model: str
    user: str


def parse_request(
    body: bytes, *, stop_tokens: tuple[int, ...], default_max_tokens: int, max_messages: int
) -> ChatRequest:
    tree = parse_object(body)
    for name, neutral in _UNSUPPORTED.items():
        value = tree.get(name)
        if value is not None and value not in neutral:
            raise GatewayError(f"{name} = {short(value)} is not supported", hint=f"leave {name} out")
    messages = _field(tree, "messages", list)
    if not messages or len(messages) > max_messages:
        raise GatewayError(f"messages must hold 1 to {max_messages} messages, got {len(messages or ())}")
    options = _field(tree, "stream_options", dict) or {}
    return ChatRequest(
        messages=[_message(message, index) for index, message in enumerate(messages)],
        tools=_tools(tree),
        sampling=_sampling(tree, stop_tokens, default_max_tokens),
        stop=_stop(tree.get("stop")),
        stream=bool(_field(tree, "stream", bool)),
        include_usage=options.get("include_usage") is True,
        model=_field(tree, "model", str) or "rollmill",
        user=_field(tree, "user", str) or "",
    )


def completion(identity: str, request_model: str, answer: Answer, prompt_tokens: int, extra: dict[str, Any]) -> bytes:
    """The complete answer as one JSON body."""
    return json.dumps(
        {
            "id": identity,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request_model,
            "choices": [
                {"index": 0, "message": answer.message, "finish_reason": finish_reason(answer), "logprobs": None}
            ],
            "usage": usage(answer, prompt_tokens),
            "rollmill": extra,
        }
    ).encode()


class ChunkWriter:
    """The events of a streamed answer as bytes."""

    def __init__(self, identity: str, model: str) -> None:
        self._head = {"id": identity, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}

    def start(self) -> bytes:
        return self._event({"role": "assistant", "content": ""})

    def text(self, text: str) -> bytes:
        return self._event({"content": text})

    def calls(self, calls: list[dict[str, Any]]) -> bytes:
        return self._event({"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]})

    def finish(self, answer: Answer, prompt_tokens: int, extra: dict[str, Any], *, include_usage: bool) -> bytes:
        events = self._event({}, finish_reason=finish_reason(answer), rollmill=extra)
        if include_usage:
            events += _sse({**self._head, "choices": [], "usage": usage(answer, prompt_tokens)})
        return events + b"data: [DONE]\n\n"

    def _event(self, delta: dict[str, Any], *, finish_reason: str | None = None, **extra: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return _sse({**self._head, "choices": [choice], **extra})


def finish_reason(answer: Answer) -> str:
    if answer.finish != "stop":
        return "length"
    return "tool_calls" if answer.message.get("tool_calls") else "stop"


def usage(answer: Answer, prompt_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(answer.tokens),
        "total_tokens": prompt_tokens + len(answer.tokens),
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def error_body(status: int, message: str, hint: str | None) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    text = f"{message} (hint: {hint})" if hint else message
    return {"error": {"message": text, "type": kind, "param": None, "code": _ERROR_CODES.get(status)}}


def error_event(status: int, message: str, hint: str | None) -> bytes:
    """A stream that has begun cannot change its status, so the error is its last event."""
    return _sse(error_body(status, message, hint))


def _sse(tree: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(tree).encode() + b"\n\n"


def _message(message: Any, index: int) -> Message:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise GatewayError(f"{where} must be an object, got {short(message)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise GatewayError(f"{where}.role is {short(role)}", hint=f"one of {', '.join(_ROLES)}")
    content = _text(message.get("content"), where)
    if role == "assistant":
        calls = message.get("tool_calls") or []
        clean: Message = {"role": role, "content": content}
        if calls:
            clean["tool_calls"] = _calls(calls, where)
        return clean
    if content is None:
        raise GatewayError(f"{where}.content is missing")
    return {"role": _ROLES[role], "content": content}


def _text(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise GatewayError(f"{where}.content must be a string, got {short(content)}")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise GatewayError(f"{where}.content has a part that is not text", hint="this model reads text only")
    return "".join(part["text"] for part in content)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    clean = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not isinstance(function.get("arguments"), str)
        ):
            raise GatewayError(
                f"{where}.tool_calls: {short(call)} is not a call",
                hint="function.name and function.arguments are strings",
            )
        named = {"name": function["name"], "arguments": function["arguments"]}
        clean.append({"id": str(call.get("id", "")), "type": "function", "function": named})
    return clean


def _tools(tree: dict[str, Any]) -> list[Tool]:
    tools = _field(tree, "tools", list) or []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise GatewayError(f"tools[{index}] is not a function with a name")
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, dict) or not isinstance(parameters.get("properties") or {}, dict):
            raise GatewayError(f"tools[{index}].function.parameters is not a JSON schema of an object")
    choice = tree.get("tool_choice")
    if choice == "none":
        return []
    if choice not in (None, "auto"):
        raise GatewayError(f"tool_choice = {short(choice)} is not supported", hint='use "auto" or "none"')
    return tools


def _sampling(tree: dict[str, Any], stop_tokens: tuple[int, ...], default_max_tokens: int) -> Sampling:
    limit = _field(tree, "max_completion_tokens", int)
    if limit is None:
        limit = _field(tree, "max_tokens", int)
    limit = default_max_tokens if limit is None else limit
    if not 1 <= limit <= _LARGEST:
        raise GatewayError(f"max_tokens must be from 1 to {_LARGEST}, got {short(limit)}")
    seed = _field(tree, "seed", int)
    return Sampling(
        temperature=_number(tree, "temperature", 0.0, 2.0),
        top_p=_number(tree, "top_p", 1e-6, 1.0),
        top_k=min(max(0, _field(tree, "top_k", int) or 0), _LARGEST),
        max_tokens=limit,
        stop_tokens=stop_tokens,
        seed=None if seed is None else seed % (1 << 63),
    )


def _number(tree: dict[str, Any], name: str, low: float, high: float) -> float:
    value = tree.get(name)
    if value is None:
        return 1.0
    # NaN is outside of every range
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise GatewayError(f"{name} must be a number from {low:g} to {high:g}, got {short(value)}")
    return float(value)


def _stop(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or len(stops) > 16 or not all(isinstance(text, str) and text for text in stops):
        raise GatewayError(f"stop must be a string or up to 16 strings, got {short(stop)}")
    return tuple(stops)


def _field(tree: dict[str, Any], name: str, kind: type) -> Any:
    value = tree.get(name)
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise GatewayError(f"{name} must be of type {kind.__name__}, got {short(value)}")
    return value
