"""Qwen3-Coder: a call as tags, values as plain text.

    <tool_call>⏎<function=edit>⏎<parameter=path>⏎a.py⏎</parameter>⏎</function>⏎</tool_call>

Values have the type that the tool's schema names; a value that does not fit stays text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollmill.chat.call_family import Call, CallFamily, properties_of, read_json, to_json
from rollmill.chat.call_grammar import arguments_of, json_rule, mark_rule, repeated, text_rule
from rollmill.chat.format import CallMark, Tool
from rollmill.chat.tokenizer import Tokenizer

_FUNCTION = "<function="
_START = "<tool_call>"
_VALUE_END = "\n</parameter>\n"
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)


class QwenCoderCalls(CallFamily):
    name = "qwen-coder"
    ends = (_START, _FUNCTION)
    call_mark = CallMark("</tool_call>")

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[str, list[Call]]:
        content, *bodies = text.split(_FUNCTION)
        head, opened, rest = content.partition(_START)
        if opened and not bodies:
            return head, [("invalid", rest.strip())]
        return head, [_parse(body, tools) for body in bodies]

    def write(self, calls: Sequence[Call]) -> str:
        return "\n".join(_write(*call) for call in calls)

    def grammar(self, tools: Sequence[Tool], tokenizer: Tokenizer, single: bool) -> str:
        """Parameters come in the order of the schema; those that it does not require may be left out."""
        start, end = mark_rule(_START, tokenizer), mark_rule("</tool_call>", tokenizer)
        choices, rules = [], []
        for number, tool in enumerate(tools):
            schema, name = arguments_of(tool), tool["function"]["name"]
            parts = []
            for place, key in enumerate(properties_of(tools)[name]):
                part = f"{text_rule(f'<parameter={key}>' + chr(10))} value{number}_{place}"
                parts.append(part if key in required_of(schema) else f"({part})?")
                rules.append(value_rules(f"value{number}_{place}", key, schema, text_rule(_VALUE_END)))
            head, tail = text_rule(f"\n{_FUNCTION}{name}>\n"), text_rule("</function>\n")
            choices.append(f"call{number}")
            rules.append(f"call{number}: {start} {head} {' '.join(parts)} {tail} {end}\n")
        return f"calls: {repeated(chr(10), single)}\ncall: {' | '.join(choices)}\n{''.join(rules)}"


def _parse(body: str, tools: Sequence[Tool]) -> Call:
    name, closed, rest = body.partition(">")
    inner, ended, _ = rest.partition("</function>")
    left = _PARAMETER.sub("", inner).strip()
    if not closed or not ended or left:
        return name.strip() if closed else "invalid", f"{_FUNCTION}{body}"
    schemas = properties_of(tools).get(name.strip(), {})
    return name.strip(), to_json({key: typed(value, schemas.get(key)) for key, value in _PARAMETER.findall(inner)})


def _write(name: str, arguments: str) -> str:
    lines = (f"<parameter={key}>\n{text}{_VALUE_END}" for key, text in written_values(arguments))
    return f"{_START}\n{_FUNCTION}{name}>\n{''.join(lines)}</function>\n</tool_call>"


def written_values(arguments: str) -> list[tuple[str, str]]:
    """Names and values as they are written between tags."""
    try:
        values = read_json(arguments)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        values = {"arguments": arguments}
    return [(key, value if isinstance(value, str) else to_json(value)) for key, value in values.items()]


def required_of(schema: Mapping[str, Any]) -> list[Any]:
    required = schema.get("required")
    return required if isinstance(required, list) else []


def value_rules(name: str, key: str, schema: Mapping[str, Any], end: str) -> str:
    """Rules for a value and its `end`: text of any kind, or JSON as the schema says."""
    own = schema["properties"][key]
    kind = _kind(own)
    listed = own.get("enum") if isinstance(own, Mapping) else None
    choices = [choice for choice in listed if isinstance(choice, str)] if isinstance(listed, list) else []
    if "string" in kind and choices:
        return f"{name}: ({' | '.join(map(text_rule, choices))}) {end}\n"
    if "string" in kind:
        # a special token ends it by itself
        return f"{name}: /(?s:.*)/ {end}\n" if end.startswith("<[") else f"{name}[suffix={end}]: /(?s:.*)/\n"
    if kind == "boolean":  # as Jinja writes them, and as JSON
        return f'{name}: ("True" | "False" | "true" | "false") {end}\n'
    shared = {part: schema[part] for part in ("$defs", "definitions") if part in schema}
    return f"{name}: {name}_json {end}\n{name}_json: {json_rule({**own, **shared})}\n"


def _kind(schema: Any) -> Any:
    """One type, or a list of them."""
    kind = schema.get("type", "string") if isinstance(schema, Mapping) else "string"
    return kind if isinstance(kind, str | list) else "string"


def typed(text: str, schema: Any) -> Any:
    if "string" in _kind(schema):
        return text
    try:
        return {"True": True, "False": False, "None": None}[text]  # as Jinja writes them
    except KeyError:
        pass
    try:
        return read_json(text)
    except ValueError:
        return text
