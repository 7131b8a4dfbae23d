"""The OpenAPI document of the gateway, made from its routes and the docstrings of their handlers: GET /openapi.json.

A docstring has a summary and the facts `Needs:`, `Takes:` and `Returns:`. The gateway's part of docs/reference/http.md
comes from the document.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from aiohttp import web
from pydantic import TypeAdapter

from rollmill import __version__
from rollmill.gateway.routes.feedback import Feedback
from rollmill.gateway.sessions.sessions import SessionFacts


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required.split(), "properties": properties}


def _list(items: dict[str, Any], **bounds: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **bounds}


def _one_of(*names: str) -> dict[str, Any]:
    return {"oneOf": [_named(name) for name in names]}


def _named(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


_TEXT = {"type": "string"}
_COMMON: dict[str, Any] = {
    "model": _TEXT,
    "temperature": {"type": "number", "minimum": 0, "maximum": 1},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "stream": {"type": "boolean"},
}
_MAX_TOKENS = {"type": "integer", "minimum": 1, "maximum": 65536}
_NAME = {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]{0,63}$"}
_FUNCTION = {"name": _NAME, "description": _TEXT, "parameters": _named("Parameters")}
_CHOICE = {"enum": ["auto", "none", "required"]}
_STOP = _list({"type": "string", "minLength": 1}, maxItems=4)
_OF_USER = {"enum": ["system", "developer", "user"]}


def _block(kind: str, required: str = "", **properties: Any) -> dict[str, Any]:
    return _object(f"type {required}", type={"const": kind, "type": "string"}, **properties)


def _message(role: str, required: str, **properties: Any) -> dict[str, Any]:
    return _object(f"role {required}", role={"const": role, "type": "string"}, **properties)


# Named, so that a generated client has classes of these names.
_SCHEMAS: dict[str, dict[str, Any]] = {
    "Value": _object(
        "type",
        type={"enum": ["string", "integer", "number", "boolean", "array", "object"]},
        description=_TEXT,
    ),
    "Parameters": {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"const": "object", "type": "string"},
            "properties": {"type": "object", "additionalProperties": _named("Value")},
            "required": _list(_TEXT),
        },
    },
    "CalledFunction": _object("name arguments", name=_TEXT, arguments=_TEXT),
    "ToolCall": _block("function", "id function", id=_TEXT, function=_named("CalledFunction")),
    "InputMessage": _object("role content", role=_OF_USER, content=_TEXT),
    "AssistantMessage": _message(
        "assistant",
        "",
        content={"type": ["string", "null"]},
        reasoning_content=_TEXT,
        tool_calls=_list(_named("ToolCall"), minItems=1),
    ),
    "ToolMessage": _message("tool", "tool_call_id content", tool_call_id=_TEXT, content=_TEXT),
    "Function": _object("name", **_FUNCTION),
    "ChatTool": _block("function", "function", function=_named("Function")),
    "TextBlock": _block("text", "text", text=_TEXT),
    "ToolUseBlock": _block("tool_use", "id name input", id=_TEXT, name=_TEXT, input={"type": "object"}),
    "ToolResultBlock": _block("tool_result", "tool_use_id content", tool_use_id=_TEXT, content=_TEXT),
    "AnthropicMessage": _object(
        "role content",
        role={"enum": ["user", "assistant"]},
        content={"anyOf": [_TEXT, _list(_one_of("TextBlock", "ToolUseBlock", "ToolResultBlock"), minItems=1)]},
    ),
    "AnthropicTool": _object("name input_schema", name=_NAME, description=_TEXT, input_schema=_named("Parameters")),
    "ItemMessage": _block(
        "message", "role content", role={"enum": ["system", "developer", "user", "assistant"]}, content=_TEXT
    ),
    "FunctionCall": _block("function_call", "call_id name arguments", call_id=_TEXT, name=_TEXT, arguments=_TEXT),
    "FunctionCallOutput": _block("function_call_output", "call_id output", call_id=_TEXT, output=_TEXT),
    "ResponseTool": _block("function", "name", **_FUNCTION),
}
_MESSAGES = _list(_one_of("InputMessage", "AssistantMessage", "ToolMessage"), minItems=1)
_ITEM = _one_of("ItemMessage", "FunctionCall", "FunctionCallOutput")
_ANTHROPIC = {
    "messages": _list(_named("AnthropicMessage"), minItems=1),
    "tools": _list(_named("AnthropicTool")),
    "system": _TEXT,
}
# The fields that most clients use; the dialects know more.
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _object(
        "messages",
        messages=_MESSAGES,
        tools=_list(_named("ChatTool")),
        tool_choice=_CHOICE,
        parallel_tool_calls={"type": "boolean"},
        stop=_STOP,
        n={"type": "integer", "minimum": 1, "maximum": 4},
        logprobs={"type": "boolean"},
        seed={"type": "integer"},
        max_tokens=_MAX_TOKENS,
        **_COMMON,
    ),
    "/v1/completions": _object(
        "prompt",
        prompt={"anyOf": [_TEXT, _list({"type": "integer", "minimum": 0})]},
        stop=_STOP,
        max_tokens=_MAX_TOKENS,
        **_COMMON,
    ),
    "/v1/messages": _object(
        "messages max_tokens", **_ANTHROPIC, stop_sequences=_STOP, max_tokens=_MAX_TOKENS, **_COMMON
    ),
    "/v1/messages/count_tokens": _object("messages", **_ANTHROPIC),
    "/v1/responses": _object(
        "input",
        input={"anyOf": [{"type": "string", "minLength": 1}, _list(_ITEM, minItems=1)]},
        instructions=_TEXT,
        previous_response_id={"type": ["string", "null"]},
        tools=_list(_named("ResponseTool")),
        tool_choice=_CHOICE,
        max_output_tokens=_MAX_TOKENS,
        store={"type": "boolean"},
        **_COMMON,
    ),
    "/forget": _object("user", user={"type": "string", "minLength": 1}),
    "/v1/feedback": Feedback.model_json_schema(),
    "/sessions": TypeAdapter(SessionFacts).json_schema(),
    "/sessions/{id}/seal": {"properties": {"submission_key": {"type": ["string", "null"]}}},
}


def document(app: web.Application) -> dict[str, Any]:
    """The whole document. Routes of a session's own path (/s/SESSION/v1/…) repeat those of /v1/… and are left out."""
    paths: dict[str, dict[str, Any]] = {}
    for route in app.router.routes():
        path = route.resource.canonical if route.resource is not None else ""
        if path and route.method != "HEAD" and not path.startswith("/s/"):
            paths.setdefault(path, {})[route.method.lower()] = _operation(path, route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rollmill gateway", "version": __version__},
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "paths": dict(sorted(paths.items())),
    }


def read_docstring(docstring: str) -> tuple[str, str, str, str]:
    """What a handler's docstring says: what it does, and what stands behind Needs, Takes and Returns."""
    summary, _, rest = docstring.partition("\n\n")
    facts = dict.fromkeys(("Needs", "Takes", "Returns"), "")
    name = ""
    for line in rest.splitlines():
        head, colon, tail = line.partition(": ")
        if colon and head in facts:
            name, line = head, tail
        if name:
            facts[name] = f"{facts[name]} {line.strip()}".strip()
    needs, takes, returns = (fact.removesuffix(".") for fact in facts.values())
    return summary.replace("\n", " "), needs, takes, returns


def _operation(path: str, route: web.AbstractRoute) -> dict[str, Any]:
    summary, needs, takes, returns = read_docstring(inspect.getdoc(route.handler) or "")
    operation: dict[str, Any] = {
        "operationId": getattr(route.handler, "__name__", path),
        "summary": summary,
        "description": "\n\n".join(
            f"{title}: {text}." for title, text in (("Needs", needs), ("Takes", takes), ("Returns", returns)) if text
        ),
        "responses": {
            "200": {"description": returns or "done"},
            "4XX": {"description": "the request is wrong; the body says why and what to do"},
            "5XX": {"description": "try again after Retry-After"},
        },
    }
    if needs and needs != "nothing":
        operation["security"] = [{"key": []}]
    names = re.findall(r"\{(\w+)\}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if route.method == "POST":
        schema = {"type": "object", **_BODIES.get(path, {})}
        operation["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    return operation
