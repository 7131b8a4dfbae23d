"""Parts of grammars for forced tool calls, as llguidance reads them. Each family of calls puts its own together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollmill.chat.format import JSON_STYLE, Tool
from rollmill.chat.tokenizer import Tokenizer


def mark_rule(mark: str, tokenizer: Tokenizer) -> str:
    """A mark: its special token, or its text where the vocabulary has none."""
    id = tokenizer.special.get(mark)
    return text_rule(mark) if id is None else f"<[{id}]>"


def text_rule(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, **JSON_STYLE})}"


def arguments_of(tool: Tool) -> dict[str, Any]:
    """The JSON schema of the arguments."""
    return tool["function"].get("parameters") or {"type": "object"}


def calls_schema(tools: Sequence[Tool], key: str = "arguments", more: Mapping[str, Any] = {}) -> dict[str, Any]:
    """A call as one JSON object: {"name": …, key: {…}}. `more`: properties that may follow."""
    bodies = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["function"]["name"]}, key: arguments_of(tool), **more},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return {"anyOf": bodies}


def repeated(separator: str, single: bool) -> str:
    """One `call`, or several with this text between them."""
    if single:
        return "call"
    return f"call ({text_rule(separator)} call)*" if separator else "call+"


def named_calls(tools: Sequence[Tool], before: str, between: str, after: str) -> str:
    """Rules for `call`: the name of a tool and its arguments, with these rules around them."""
    choices, rules = [], []
    for number, tool in enumerate(tools):
        name = text_rule(tool["function"]["name"])
        choices.append(f"call{number}")
        rules.append(f"call{number}: {before} {name} {between} arguments{number} {after}\n")
        rules.append(f"arguments{number}: {json_rule(arguments_of(tool))}\n")
    return f"call: {' | '.join(choices)}\n{''.join(rules)}"
