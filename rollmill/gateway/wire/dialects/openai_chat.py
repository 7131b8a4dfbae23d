"""OpenAI chat completions: the wire format in and out.

A field that would change the answer and cannot be honoured exactly is refused. Fields that only describe the request
are accepted.
"""

from __future__ import annotations

from typing import Any

from rollmill.chat.openai_messages import parse_messages, parse_tools
from rollmill.gateway.wire.answer_grammars import read_forced, read_schema
from rollmill.gateway.wire.body import parse_object, to_bytes
from rollmill.gateway.wire.dialect import Delta, Identity, Limits, ModelRequest, NewCall, Reply
from rollmill.gateway.wire.dialects import fields, openai

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


class OpenAIChat(openai.OpenAIDialect):
    name = "openai_chat"

    def parse(self, body: bytes, limits: Limits) -> ModelRequest:
        tree = parse_object(body)
        ignored = fields.check_names(tree, _KNOWN, NEUTRAL, _IGNORED)
        tools = parse_tools(tree)
        logprobs = bool(fields.field(tree, "logprobs", bool))
        return ModelRequest(
            messages=parse_messages(tree, limits.max_messages),
            tools=tools,
            schema=read_schema("response_format", tree.get("response_format")),
            forced=read_forced(tree.get("tool_choice"), tools),
            one_call=fields.field(tree, "parallel_tool_calls", bool) is False,
            logprobs=logprobs,
            top_logprobs=openai.read_top_logprobs(tree, logprobs),
            ignored=ignored,
            cache_key=fields.field(tree, "prompt_cache_key", str) or "",
            **openai.common(tree, limits, "max_completion_tokens", "max_tokens"),
            **openai.several(tree),
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

    def stream(self, request: ModelRequest, identity: Identity) -> ChunkWriter:
        return ChunkWriter(request, identity)


class ChunkWriter(openai.OpenAIWriter):
    """The events of a streamed answer as bytes."""

    def __init__(self, request: ModelRequest, identity: Identity) -> None:
        super().__init__(_head(request, identity, "chat.completion.chunk"))
        self._request = request
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

    def finish(self, reply: Reply) -> bytes:
        events = b""
        for index, answer in enumerate(reply.answers):
            for number, call in enumerate(answer.message.get("tool_calls") or []):
                rest = call["function"]["arguments"][self._sent.get((index, number), 0) :]
                events += self._call(index, NewCall(call["id"], number, call["function"]["name"], rest, True))
            events += self._event(index, {}, openai.finish_reason(answer), rollmill=reply.about)
        return events + self._end(reply)

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
