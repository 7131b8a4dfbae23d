"""OpenAI responses: the wire format in and out. `responses_request.py` reads the items."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rollmill.errors import GatewayError
from rollmill.gateway.wire.answer import Answer
from rollmill.gateway.wire.answer_grammars import read_forced, read_schema
from rollmill.gateway.wire.body import parse_object, to_bytes
from rollmill.gateway.wire.dialect import Delta, Identity, Limits, ModelRequest, Reply, Stored, error_text
from rollmill.gateway.wire.dialects import fields, openai
from rollmill.gateway.wire.dialects.responses_request import FindItem, parse_items, referenced
from rollmill.gateway.wire.dialects.responses_tools import call_item, flat_name, parse_response_tools

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "max_tool_calls": (),
    "prompt": (),
    "context_management": (),
}
_KNOWN = frozenset(
    "include input instructions max_output_tokens metadata model parallel_tool_calls previous_response_id"
    " prompt_cache_key seed store stream temperature text tool_choice tools top_k top_logprobs top_p user".split()
)
# accepted without effect: `reasoning` is a wish; `truncation` allows the server to shorten, which it never does
_IGNORED = frozenset(
    "client_metadata prompt_cache_options prompt_cache_retention reasoning safety_identifier service_tier"
    " stream_options truncation".split()
)


class OpenAIResponses(openai.OpenAIDialect):
    name = "openai_responses"

    def parse(self, body: bytes, limits: Limits) -> ModelRequest:
        """The request without the response that it continues: see `continued`."""
        tree = parse_object(body)
        ignored = fields.check_names(tree, _KNOWN, _NEUTRAL, _IGNORED)
        text_format = (fields.field(tree, "text", dict) or {}).get("format")
        tools, named, custom, dropped = parse_response_tools(tree)
        include = fields.field(tree, "include", list) or []
        logprobs = "message.output_text.logprobs" in include
        store = fields.field(tree, "store", bool)
        return ModelRequest(
            messages=parse_items(tree.get("input"), limits.max_messages),
            tools=tools,
            schema=read_schema("text.format", text_format),
            forced=read_forced(_chosen(tree.get("tool_choice")), tools),
            one_call=fields.field(tree, "parallel_tool_calls", bool) is False,
            logprobs=logprobs,
            top_logprobs=openai.read_top_logprobs(tree, logprobs),
            options={
                "previous": fields.field(tree, "previous_response_id", str),
                "instructions": fields.field(tree, "instructions", str),
                "store": store is not False,
                "text_format": text_format or {"type": "text"},
                "tools": tree.get("tools") or [],
                "tool_choice": tree.get("tool_choice") or "auto",
                "metadata": fields.field(tree, "metadata", dict) or {},
                "input": tree["input"],
                "named": named,
                "custom": custom,
                "references": referenced(tree["input"]),
            },
            ignored=ignored,
            dropped=dropped,
            cache_key=fields.field(tree, "prompt_cache_key", str) or "",
            **openai.common(tree, limits, "max_output_tokens"),
        )

    def continued(self, request: ModelRequest, limits: Limits, previous: Stored | None, find: FindItem) -> ModelRequest:
        """The request with the conversation before it, and with the stored items that it refers to. Instructions are
        not inherited."""
        options = request.options
        messages = request.messages
        if options["references"]:
            messages = parse_items(options["input"], limits.max_messages, find)
        conversation = [*(previous.messages if previous else ()), *messages]
        instructions = options["instructions"]
        system = [{"role": "system", "content": instructions}] if instructions else []
        return replace(request, messages=[*system, *conversation])

    def reply(self, reply: Reply) -> bytes:
        return to_bytes(_completed(reply))

    def kept(self, reply: Reply) -> Stored | None:
        """The response, unless the client declined."""
        options, request = reply.request.options, reply.request
        if not options["store"]:
            return None
        skipped = 1 if options["instructions"] else 0
        messages = [*request.messages[skipped:], reply.answers[0].message]  # redacted
        return Stored(str(reply.about["trajectory"]), messages, _completed(reply), skipped)

    def stream(self, request: ModelRequest, identity: Identity) -> ItemWriter:
        return ItemWriter(request, identity)


class ItemWriter:
    """One output item at a time: reasoning, then the message, then one item per call."""

    def __init__(self, request: ModelRequest, identity: Identity) -> None:
        self._head = _head(request, identity)
        self._id = identity.id
        self._options = request.options
        self._arguments: list[str] = []  # of each call that has begun, as far as they are sent
        self._done = 0  # calls
        self._sequence = -1
        self._index = -1
        self._open: dict[str, Any] | None = None  # the item that is being written

    def start(self, prompt_tokens: int) -> bytes:
        return self._event("response.created", response=self._begun()) + self.heartbeat()

    def heartbeat(self) -> bytes:
        """An event, because clients that wait for events do not see comments."""
        return self._event("response.in_progress", response=self._begun())

    def _begun(self) -> dict[str, Any]:
        return {**self._head, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}

    def delta(self, index: int, delta: Delta) -> bytes:
        events = b""
        if delta.reasoning:
            events += self._enter(_reasoning_item(self._id, ""), "content")
            events += self._piece("response.reasoning_text", delta.reasoning)
        if delta.text:
            events += self._enter(_message_item(self._id, "", []), "content")
            logprobs = openai.token_logprobs(delta.logprobs)
            events += self._piece("response.output_text", delta.text, logprobs=logprobs)
        for call in delta.calls:
            # the input of a custom tool is a part of the arguments; calls begin in their order
            if call.name not in self._options["custom"] and call.number <= len(self._arguments):
                before = self._arguments[call.number] if call.number < len(self._arguments) else ""
                function = {"name": call.name, "arguments": before + call.text}
                item = _call_item(self._id, self._options, call.number, {"id": call.id, "function": function})
                events += self._leave() + self._call(call.number, item, call.done)
        return events

    def finish(self, reply: Reply) -> bytes:
        events = self._leave()
        body = _completed(reply)
        items = [item for item in body["output"] if item["type"] in ("function_call", "custom_tool_call")]
        for number, item in enumerate(items[self._done :], self._done):
            events += self._call(number, item, done=True)
        kind = "response.completed" if body["status"] == "completed" else "response.incomplete"
        return events + self._event(kind, response=body)

    def error(self, error: GatewayError) -> bytes:
        return self._event("error", code=error.code, message=error_text(error), param=None)

    def _enter(self, item: dict[str, Any], parts: str) -> bytes:
        if self._open is not None and self._open["type"] == item["type"]:
            return b""
        events = self._leave()
        self._index, self._open = self._index + 1, item
        bare = {**item, parts: [], "status": "in_progress"}
        events += self._event("response.output_item.added", output_index=self._index, item=bare)
        return events + self._part("response.content_part.added", item[parts][0])

    def _piece(self, kind: str, text: str, **more: Any) -> bytes:
        assert self._open is not None
        self._open["content"][0]["text"] += text
        return self._event(f"{kind}.delta", **self._place(), delta=text, **more)

    def _leave(self) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        self._open = item
        part = item["content"][0]
        more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
        events = self._event(f"response.{part['type']}.done", **self._place(), text=part["text"], **more)
        events += self._part("response.content_part.done", part)
        self._open = None
        return events + self._event("response.output_item.done", output_index=self._index, item=item)

    def _call(self, number: int, item: dict[str, Any], done: bool) -> bytes:
        """What is new of a call, whose arguments are known so far; `done`: these are all."""
        custom = item["type"] == "custom_tool_call"
        kind, part = ("custom_tool_call_input", "input") if custom else ("function_call_arguments", "arguments")
        events, first = b"", number == len(self._arguments)
        if first:
            self._index += 1
            self._arguments.append("")
            bare = {**item, part: "", "status": "in_progress"}
            events = self._event("response.output_item.added", output_index=self._index, item=bare)
        place = {"output_index": self._index, "item_id": item["id"]}
        new = item[part][len(self._arguments[number]) :]
        self._arguments[number] = item[part]
        if new or first:
            events += self._event(f"response.{kind}.delta", **place, delta=new)
        if done:
            self._done += 1
            events += self._event(f"response.{kind}.done", **place, **{part: item[part], "name": item["name"]})
            events += self._event("response.output_item.done", output_index=self._index, item=item)
        return events

    def _part(self, kind: str, part: dict[str, Any]) -> bytes:
        return self._event(kind, **self._place(), part=dict(part))

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": self._index, "content_index": 0}

    def _event(self, kind: str, **more: Any) -> bytes:
        self._sequence += 1
        return fields.event({"type": kind, "sequence_number": self._sequence, **more}, kind)


def response_id(identity: Identity) -> str:
    """Names the session, so that whoever is asked for the response knows where it is, however sessions are divided."""
    return f"resp_{identity.session}_{identity.id}" if identity.session else f"resp_{identity.id}"


def _chosen(choice: Any) -> Any:
    """A choice of a tool, with the name that the model knows it by."""
    if not isinstance(choice, dict) or not isinstance(choice.get("namespace"), str):
        return choice
    return {**choice, "name": flat_name(str(choice.get("name")), choice["namespace"])}


def session_of(response: str) -> str:
    """The session in the id of a stored response. Older ids have none: there the rest of the id stands for it."""
    session, _, own = response.removeprefix("resp_").rpartition("_")
    return session or own


def _head(request: ModelRequest, identity: Identity) -> dict[str, Any]:
    options, sampling = request.options, request.sampling
    return {
        "id": response_id(identity),
        "object": "response",
        "created_at": identity.created,
        "model": request.model or "rollmill",
        "error": None,
        "instructions": options["instructions"],
        "max_output_tokens": sampling.max_tokens,
        "metadata": options["metadata"],
        "parallel_tool_calls": not request.one_call,
        "previous_response_id": options["previous"],
        "reasoning": {"effort": None, "summary": None},
        "store": options["store"],
        "temperature": sampling.temperature,
        "text": {"format": options["text_format"]},
        "tool_choice": options["tool_choice"],
        "tools": options["tools"],
        "top_logprobs": request.top_logprobs,
        "top_p": sampling.top_p,
        "truncation": "disabled",
    }


def _completed(reply: Reply) -> dict[str, Any]:
    (answer,) = reply.answers
    whole = answer.finish == "stop"
    return {
        **_head(reply.request, reply.identity),
        "status": "completed" if whole else "incomplete",
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "output": list(_output(reply, answer)),
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": reply.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.sampled_tokens,
        },
        "rollmill": reply.about,
    }


def _output(reply: Reply, answer: Answer) -> Iterator[dict[str, Any]]:
    message, id = answer.message, reply.identity.id
    if message.get("reasoning_content"):
        yield _reasoning_item(id, message["reasoning_content"])
    if message["content"]:
        logprobs = openai.token_logprobs(reply.logprobs[0] if reply.request.logprobs else [])
        yield _message_item(id, message["content"], logprobs)
    for index, call in enumerate(message.get("tool_calls") or ()):
        yield _call_item(id, reply.request.options, index, call)


def _call_item(id: str, options: Mapping[str, Any], number: int, call: Mapping[str, Any]) -> dict[str, Any]:
    item = call_item(call, options["named"], options["custom"])
    return {**item, "id": f"fc_{id}_{number}", "status": "completed"}


def _message_item(id: str, text: str, logprobs: list[Any]) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {"type": "message", "id": f"msg_{id}", "role": "assistant", "status": "completed", "content": [part]}


def _reasoning_item(id: str, text: str) -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "id": f"rs_{id}", "status": "completed", "summary": [], "content": [part]}
