"""The grammar of a request that asks for JSON output, or that must call a tool.

The chat format knows how a call is written: `call_grammar(tools)` returns rules for `calls`, and `text_marks` are the
marks before and behind a text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollmill.chat.format import JSON_STYLE, ChatFormat, Tool
from rollmill.errors import GatewayError
from rollmill.gateway.wire.dialect import ModelRequest
from rollmill.strict import short


def grammar_of(request: ModelRequest, format: ChatFormat) -> str | None:
    """As llguidance reads it; None if the answer is free."""
    if request.schema is None and not request.forced:
        return None
    if format.reasons_first:
        raise GatewayError(
            "a format of the output is not supported with a chat template that begins answers with reasoning",
            hint="leave it out",
        )
    calls = _calls(request, format) if request.tools else ""
    if request.forced:
        return f"start: calls\n{calls}"
    before, behind = format.text_marks
    start = "start: text | calls" if calls else "start: text"
    schema = {**(request.schema or {}), **JSON_STYLE}
    return f"{start}\ntext: {before} body {behind}\nbody: %json {json.dumps(schema)}\n{calls}"


def check_one_call(request: ModelRequest, format: ChatFormat) -> None:
    """Raises 400 for a client that wants one call at a time, if this format writes several as one text."""
    single = format.single_call or bool(request.forced) or format.call_mark is not None
    if request.one_call and request.tools and not single:
        raise GatewayError(
            f"one tool call at a time is not supported with the chat format {format.name} of this model",
            hint="leave parallel_tool_calls out, or force a call by tool_choice",
        )


def _calls(request: ModelRequest, format: ChatFormat) -> str:
    forced = request.forced or [tool["function"]["name"] for tool in request.tools]
    wanted = [tool for tool in request.tools if tool["function"]["name"] in forced]
    return format.call_grammar(wanted, single=request.one_call)


def read_schema(where: str, given: Any) -> dict[str, Any] | None:
    """The JSON schema that the text of an answer must follow. `given` is {"type", "schema"}, or holds both inside
    `json_schema`."""
    if given is None or given == {"type": "text"}:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        schema = (given.get("json_schema") or given) if isinstance(given, dict) else None
        schema = schema.get("schema") if isinstance(schema, dict) else None
        if isinstance(schema, dict):
            return schema
    raise GatewayError(
        f"{where} = {short(given)} is not supported", hint="text, json_object or json_schema with a schema"
    )


def read_forced(choice: Any, tools: Sequence[Tool]) -> tuple[str, ...]:
    """The model must call one of these tools; () if it may answer in text. `choice` is a word, or {"type", "name"}."""
    names = tuple(tool["function"]["name"] for tool in tools)
    if choice in (None, "auto", "none"):
        return ()
    if choice in ("required", "any"):
        wanted = names
    else:
        inner: Any = choice.get("function", choice) if isinstance(choice, Mapping) else {}
        name = inner.get("name") if isinstance(inner, Mapping) else None
        wanted = (name,) if name in names else ()
    if not wanted:
        raise GatewayError(
            f"tool_choice = {short(choice)} names no tool of this request", hint='"auto", "none", "required" or a tool'
        )
    return wanted
