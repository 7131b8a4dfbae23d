"""Qwen3-Coder: a call as tags, values as plain text.

    <tool_call>⏎<function=edit>⏎<parameter=path>⏎a.py⏎</parameter>⏎</function>⏎</tool_call>

Values have the type that the tool's schema names; a value that does not fit stays text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollmill.chat.calls import Call, read_json, to_json
from rollmill.chat.format import CallMark, Tool
from rollmill.chat.tokenizer import Tokenizer

_FUNCTION = "<function="
_START = "<tool_call>"
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)


class QwenCoderCalls:
    name = "qwen-coder"
    ends: tuple[str, ...] = (_START, _FUNCTION)
    silent: tuple[str, ...] = ()
    call_mark: CallMark | None = CallMark("</tool_call>")

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[str, list[Call]]:
        content, *bodies = text.split(_FUNCTION)
        head, opened, rest = content.partition(_START)
        if opened and not bodies:
            return head, [("invalid", rest.strip())]
        return head, [_parse(body, tools) for body in bodies]

    def ids(self, text: str) -> list[str]:
        return []

    def write(self, calls: Sequence[Call]) -> str:
        return "\n".join(_write(*call) for call in calls)

    def grammar(self, tools: Sequence[Tool], tokenizer: Tokenizer, single: bool) -> str | None:
        return None


def _parse(body: str, tools: Sequence[Tool]) -> Call:
    name, closed, rest = body.partition(">")
    inner, ended, _ = rest.partition("</function>")
    left = _PARAMETER.sub("", inner).strip()
    if not closed or not ended or left:
        return name.strip() if closed else "invalid", f"{_FUNCTION}{body}"
    schemas = _properties(name.strip(), tools)
    return name.strip(), to_json({key: _typed(value, schemas.get(key)) for key, value in _PARAMETER.findall(inner)})


def _write(name: str, arguments: str) -> str:
    try:
        values = read_json(arguments)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        values = {"arguments": arguments}
    lines = [
        f"<parameter={key}>\n{value if isinstance(value, str) else to_json(value)}\n</parameter>\n"
        for key, value in values.items()
    ]
    return f"{_START}\n{_FUNCTION}{name}>\n{''.join(lines)}</function>\n</tool_call>"


def _properties(name: str, tools: Sequence[Tool]) -> Mapping[str, Any]:
    for tool in tools:
        if tool["function"]["name"] == name:
            properties = (tool["function"].get("parameters") or {}).get("properties")
            return properties if isinstance(properties, Mapping) else {}
    return {}


def _typed(text: str, schema: Any) -> Any:
    kind = schema.get("type", "string") if isinstance(schema, Mapping) else "string"
    if "string" in kind:  # one type, or a list of them
        return text
    try:
        return {"True": True, "False": False, "None": None}[text]  # as Jinja writes them
    except KeyError:
        pass
    try:
        return read_json(text)
    except ValueError:
        return text
