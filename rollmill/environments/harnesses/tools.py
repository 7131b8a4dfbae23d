"""Tools that a model may call: their JSON schemas, checked arguments, and bounded results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# what the model reads after a wrong call
ERROR_NOT_JSON = "error not json"
ERROR_UNKNOWN_TOOL = "error no such tool"
ERROR_ARGUMENTS = "error wrong arguments"


@dataclass(frozen=True)
class Tool:
    """One function the model may call. Arguments stand in the order of `parameters`; all of them are required."""

    name: str
    description: str
    parameters: Mapping[str, type[str] | type[int]]

    def schema(self) -> dict[str, Any]:
        """The tool as the OpenAI chat format declares it."""
        properties = {name: {"type": "integer" if kind is int else "string"} for name, kind in self.parameters.items()}
        parameters = {
            "type": "object",
            "properties": properties,
            "required": list(self.parameters),
            "additionalProperties": False,
        }
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


class BadToolCall(Exception):
    """The policy made a wrong call. The model reads `text`."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def parse_call(call: Any, tools: Mapping[str, Tool]) -> tuple[str, dict[str, Any]]:
    """Returns the name and the arguments of a tool call. `call` may be anything; BadToolCall if it is no call."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise BadToolCall(ERROR_UNKNOWN_TOOL)
    name = str(function.get("name"))
    return name, parse_arguments(name, function.get("arguments"), tools)


def parse_arguments(name: str, arguments: Any, tools: Mapping[str, Tool]) -> dict[str, Any]:
    """Returns the arguments of a call, checked against the tool's parameters; BadToolCall otherwise."""
    tool = tools.get(name)
    if tool is None:
        raise BadToolCall(ERROR_UNKNOWN_TOOL)
    try:
        values = json.loads(arguments or "{}")
    except (TypeError, ValueError, RecursionError):
        raise BadToolCall(ERROR_NOT_JSON) from None
    # not isinstance: `true` must not count as line number 1
    if not isinstance(values, dict) or {key: type(value) for key, value in values.items()} != dict(tool.parameters):
        raise BadToolCall(ERROR_ARGUMENTS)
    return values


def cut(text: str, limit: int) -> str:
    """Keep at most `limit` characters of `text`, from both ends: a test's verdict is at its end."""
    if len(text) <= limit:
        return text
    head = limit // 2
    tail = limit - head
    return f"{text[:head]}[… {len(text) - limit} characters cut]{text[len(text) - tail :]}"
