"""The OpenAPI document of the gateway, made from its routes and the docstrings of their handlers: GET /openapi.json.

A docstring has a summary and the facts `Needs:`, `Takes:` and `Returns:`. docs/reference/http.md comes from the same.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from aiohttp import web
from pydantic import TypeAdapter

from rollmill import __version__
from rollmill.gateway.sessions.feedback import Feedback
from rollmill.gateway.sessions.sessions import SessionFacts

_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["user", "assistant"]}, "content": {"type": "string"}},
        "additionalProperties": False,
    },
}
_COMMON = {
    "model": {"type": "string"},
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 65536},
    "temperature": {"type": "number", "minimum": 0, "maximum": 1},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "stream": {"type": "boolean"},
}
_STOP = {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 4}
# The fields that most clients use; the dialects know more.
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "required": ["messages"],
        "properties": {"messages": _MESSAGES, "stop": _STOP, "seed": {"type": "integer"}, **_COMMON},
    },
    "/v1/completions": {
        "required": ["prompt"],
        "properties": {
            "prompt": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer", "minimum": 0}}]},
            "stop": _STOP,
            **_COMMON,
        },
    },
    "/v1/messages": {
        "required": ["messages", "max_tokens"],
        "properties": {"messages": _MESSAGES, "stop_sequences": _STOP, "system": {"type": "string"}, **_COMMON},
    },
    "/v1/messages/count_tokens": {"required": ["messages"], "properties": {"messages": _MESSAGES}},
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
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
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
