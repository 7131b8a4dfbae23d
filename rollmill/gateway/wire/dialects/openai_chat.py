"""OpenAI chat completions: the wire format in and out.

A field that would change the answer and cannot be honoured exactly is refused. Fields that only describe the request
are accepted.
"""

from __future__ import annotations

from typing import Any

from rollmill.chat.format import Message, Tool
from rollmill.errors import GatewayError
from rollmill.gateway.wire.answer_grammars import read_forced, read_schema
from rollmill.gateway.wire.body import parse_object, short, to_bytes
from rollmill.gateway.wire.dialect import Delta, Identity, Limits, ModelRequest, NewCall, Reply
from rollmill.gateway.wire.dialects import fields, openai

MOST_ANSWERS = 16
# field -> values that have no effect
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}
# accepted without effect: they say nothing about the answer, or only wish for something, and clients send them unasked
_IGNORED = frozenset(
    "client_metadata metadata prompt_cache_options prompt_cache_retention reasoning reasoning_effort safety_identifier"
    " service_tier store thinking verbosity".split()
)
_KNOWN = fields.PENALTIES | frozenset(
    "messages model n logprobs max_completion_tokens max_tokens parallel_tool_calls prompt_cache_key response_format"
    " seed stop stream stream_options temperature tool_choice tools top_k top_logprobs top_p user".split()
)
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_PLAIN = ("user", "assistant", "system", "tool")  # a role may be any JSON, so no set


class OpenAIChat:
    name = "openai_chat"

    def parse(self, body: bytes, limits: Limits) -> ModelRequest:
        tree = parse_object(body)
        ignored = fields.check_names(tree, _KNOWN, NEUTRAL, _IGNORED)
        options = fields.field(tree, "stream_options", dict) or {}
        max_tokens = fields.max_tokens(tree, ("max_completion_tokens", "max_tokens"), limits.default_max_tokens)
        tools = parse_tools(tree)
        logprobs = bool(fields.field(tree, "logprobs", bool))
        return ModelRequest(
            messages=parse_messages(tree, limits.max_messages),
            tools=tools,
            schema=read_schema("response_format", tree.get("response_format")),
            forced=read_forced(tree.get("tool_choice"), tools),
            sampling=fields.sampling(tree, limits.stop_tokens, max_tokens),
            stop=fields.stops("stop", tree.get("stop")),
            stream=bool(fields.field(tree, "stream", bool)),
            model=fields.field(tree, "model", str) or "",
            user=fields.field(tree, "user", str) or "",
            count=fields.integer(tree, "n", 1, MOST_ANSWERS) or 1,
            one_call=fields.field(tree, "parallel_tool_calls", bool) is False,
            logprobs=logprobs,
            top_logprobs=openai.read_top_logprobs(tree, logprobs),
            options={"include_usage": options.get("include_usage") is True},
            ignored=ignored,
            cache_key=fields.field(tree, "prompt_cache_key", str) or "",
        )

    def reply(self, reply: Reply) -> bytes:
        choices = []
        for index, answer in enumerate(reply.answers):
            logprobs = None
            if reply.request.logprobs:
                logprobs = {"content": openai.token_logprobs(reply.logprobs[index]), "refusal": None}
            choices.append(
                {
                    "index": index,
                    "message": answer.message,
                    "finish_reason": openai.finish_reason(answer),
                    "logprobs": logprobs,
                }
            )
        head = _head(reply.request, reply.identity, "chat.completion")
        return to_bytes({**head, "choices": choices, "usage": openai.usage(reply), "rollmill": reply.about})

    def kept(self, reply: Reply) -> None:
        return None

    def stream(self, request: ModelRequest, identity: Identity) -> ChunkWriter:
        return ChunkWriter(request, identity)

    def error(self, error: GatewayError) -> dict[str, Any]:
        return openai.error_body(error)

    def status(self, error: GatewayError) -> int:
        return error.status


class ChunkWriter:
    """The events of a streamed answer as bytes."""

    def __init__(self, request: ModelRequest, identity: Identity) -> None:
        self._request = request
        self._head = _head(request, identity, "chat.completion.chunk")
        self._before = b"data: " + to_bytes(self._head)[:-1] + b","  # the same in all events
        self._sent: dict[tuple[int, int], int] = {}  # (answer, call) -> characters of its arguments

    def start(self, prompt_tokens: int) -> bytes:
        return b"".join(
            self._event(index, {"role": "assistant", "content": ""}) for index in range(self._request.count)
        )

    def delta(self, index: int, delta: Delta) -> bytes:
        events = b"".join(self._call(index, call) for call in delta.calls)
        if self._request.logprobs and delta.tokens:
            logprobs = {"content": openai.token_logprobs(delta.logprobs), "refusal": None}
            return self._event(index, _piece(delta), logprobs=logprobs) + events
        return (self._event(index, _piece(delta)) if delta.text or delta.reasoning else b"") + events

    def heartbeat(self) -> bytes:
        return openai.HEARTBEAT

    def finish(self, reply: Reply) -> bytes:
        events = b""
        for index, answer in enumerate(reply.answers):
            for number, call in enumerate(answer.message.get("tool_calls") or []):
                rest = call["function"]["arguments"][self._sent.get((index, number), 0) :]
                events += self._call(index, NewCall(call["id"], number, call["function"]["name"], rest, True))
            events += self._event(index, {}, openai.finish_reason(answer), rollmill=reply.about)
        if reply.request.options.get("include_usage"):
            events += fields.event({**self._head, "choices": [], "usage": openai.usage(reply)})
        return events + openai.DONE

    def error(self, error: GatewayError) -> bytes:
        return fields.event(openai.error_body(error))

    def _call(self, index: int, call: NewCall) -> bytes:
        known = self._sent.get((index, call.number))
        if known is not None and not call.text:
            return b""
        self._sent[index, call.number] = (known or 0) + len(call.text)
        piece: dict[str, Any] = {"index": call.number, "function": {"arguments": call.text}}
        if known is None:
            piece |= {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
        return self._event(index, {"tool_calls": [piece]})

    def _event(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None, **extra: Any
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return b"%b%b\n\n" % (self._before, to_bytes({"choices": [choice], **extra})[1:])


def _piece(delta: Delta) -> dict[str, str]:
    piece = {"content": delta.text} if delta.text or not delta.reasoning else {}
    return {**piece, "reasoning_content": delta.reasoning} if delta.reasoning else piece


def _head(request: ModelRequest, identity: Identity, kind: str) -> dict[str, Any]:
    return openai.head(f"chatcmpl-{identity.id}", kind, request, identity)


def parse_messages(tree: dict[str, Any], max_messages: int) -> list[Message]:
    messages = fields.field(tree, "messages", list)
    if not messages or len(messages) > max_messages:
        raise GatewayError(f"messages must hold 1 to {max_messages} messages, got {len(messages or ())}")
    return [
        # nearly all messages are these two fields: there is nothing to drop
        message
        if type(message) is dict
        and len(message) == 2
        and message.get("role") in _PLAIN
        and type(message.get("content")) is str
        else _message(message, index)
        for index, message in enumerate(messages)
    ]


def parse_tools(tree: dict[str, Any]) -> list[Tool]:
    tools = fields.field(tree, "tools", list) or []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise GatewayError(f"tools[{index}] is not a function with a name")
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, dict) or not isinstance(parameters.get("properties") or {}, dict):
            raise GatewayError(f"tools[{index}].function.parameters is not a JSON schema of an object")
    return [] if tree.get("tool_choice") == "none" else tools


def _message(message: Any, index: int) -> Message:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise GatewayError(f"{where} must be an object, got {short(message)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise GatewayError(f"{where}.role is {short(role)}", hint=f"one of {', '.join(_ROLES)}")
    content = _text(message.get("content"), where)
    if role == "assistant":
        return _answer(message, content, where)
    if content is None:
        raise GatewayError(f"{where}.content is missing")
    clean: Message = {"role": _ROLES[role], "content": content}
    if role == "tool" and isinstance(message.get("tool_call_id"), str):
        clean["tool_call_id"] = message["tool_call_id"]
    return clean


def _answer(message: dict[str, Any], content: str | None, where: str) -> Message:
    clean: Message = {"role": "assistant", "content": content}
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning:
        clean["reasoning_content"] = reasoning
    calls = message.get("tool_calls") or []
    if calls:
        clean["tool_calls"] = _calls(calls, where)
    return clean


def _text(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise GatewayError(f"{where}.content must be a string, got {short(content)}")
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise GatewayError(
                f"{where}.content[{index}] is {short(kind)}, not text",
                hint="this model reads text only",
                code="unsupported_content",
            )
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
