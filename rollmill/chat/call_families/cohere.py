"""Command R7B and later models of Cohere: text and calls each stand between marks of their own.

<|START_THINKING|>…<|END_THINKING|><|START_ACTION|>[⏎    {"tool_call_id": "0", "tool_name": …, "parameters": {…}}⏎]
<|END_ACTION|><|END_OF_TURN_TOKEN|>        <|START_RESPONSE|>…<|END_RESPONSE|><|END_OF_TURN_TOKEN|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rollmill.chat.call_family import Call, CallFamily, json_prefix, to_json
from rollmill.chat.call_grammar import arguments_of, json_rule, mark_rule
from rollmill.chat.format import Tool
from rollmill.chat.tokenizer import Tokenizer

ACTION = "<|START_ACTION|>"
_ACTION_END = "<|END_ACTION|>"
_NAME = re.compile(r'"tool_name"\s*:\s*"([^"]*)"')
_TEXT, _TEXT_END = "<|START_RESPONSE|>", "<|END_RESPONSE|>"


class CohereCalls(CallFamily):
    name = "cohere"
    ends = (ACTION, _TEXT_END)
    frames = (_TEXT,)
    frame_ends = (_TEXT_END, _ACTION_END)

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[str, list[Call]]:
        content, *bodies = text.split(ACTION)
        _, framed, inside = content.partition(_TEXT)
        content = inside.partition(_TEXT_END)[0] if framed else content
        return content, [call for body in bodies for call in _parse(body.partition(_ACTION_END)[0].strip())]

    def write(self, calls: Sequence[Call]) -> str:
        listed = ",\n".join(
            f'    {{"tool_call_id": "{number}", "tool_name": {to_json(name)}, "parameters": {arguments}}}'
            for number, (name, arguments) in enumerate(calls)
        )
        return f"{ACTION}[\n{listed}\n]{_ACTION_END}"

    def grammar(self, tools: Sequence[Tool], tokenizer: Tokenizer, single: bool) -> str:
        start, end = mark_rule(ACTION, tokenizer), mark_rule(_ACTION_END, tokenizer)
        more = "" if single else " (/,[ \\n]+/ call)*"
        rules = [f"calls: {start} /\\[[ \\n]*/ call{more} /[ \\n]*\\]/ {end}\n"]
        rules.append(f"call: {' | '.join(f'call{number}' for number in range(len(tools)))}\n")
        for number, tool in enumerate(tools):
            head = '"{\\"tool_call_id\\": \\"" /[0-9]{1,4}/ "\\", \\"tool_name\\": "'
            name = to_json(to_json(tool["function"]["name"]))
            rules.append(f'call{number}: {head} {name} ", \\"parameters\\": " arguments{number} "}}"\n')
            rules.append(f"arguments{number}: {json_rule(arguments_of(tool))}\n")
        return "".join(rules)

    def text_marks(self, tokenizer: Tokenizer) -> tuple[str, str]:
        return mark_rule(_TEXT, tokenizer), mark_rule(_TEXT_END, tokenizer)


def _parse(body: str) -> list[Call]:
    try:
        value, rest = json_prefix(body)
    except ValueError:
        return [_malformed(body)]
    listed: list[Any] = value if isinstance(value, list) else [value]
    calls = [_call(each) for each in listed]
    if rest.strip() or not calls or None in calls:
        return [_malformed(body)]
    return [call for call in calls if call is not None]


def _malformed(body: str) -> Call:
    named = _NAME.search(body)
    return named[1] if named else "invalid", body


def _call(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("tool_name"), str):
        return None
    parameters = value.get("parameters")
    return (value["tool_name"], to_json(parameters)) if isinstance(parameters, dict) else None
