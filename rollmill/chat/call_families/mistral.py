"""A mark and a JSON list: Mistral's `[TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}]`, Granite's `<|tool_call|>`.

Newer Mistral models write `[TOOL_CALLS]name[ARGS]{…}` for each call, some with `[CALL_ID]id` behind the name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rollmill.chat.call_family import Call, CallFamily, call_of, json_prefix, malformed, write_call
from rollmill.chat.call_grammar import calls_schema, json_rule, mark_rule, named_calls, repeated
from rollmill.chat.format import Tool
from rollmill.chat.tokenizer import Tokenizer

_ID, _ARGS = "[CALL_ID]", "[ARGS]"

_NINE = re.compile(r"[A-Za-z0-9]{9}")  # the template refuses other ids


class MarkedListCalls(CallFamily):
    def __init__(self, name: str, mark: str) -> None:
        self.name = name
        self.ends = (mark,)
        self._mark = mark

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[str, list[Call]]:
        content, *bodies = text.split(self._mark)
        return content, [call for body in bodies for call in _parse(body.strip())]

    def ids(self, text: str) -> list[str]:
        found = [id for body in text.split(self._mark)[1:] for id in _ids(body.strip())]
        return [id for id in found if isinstance(id, str) and _NINE.fullmatch(id)]

    def write(self, calls: Sequence[Call]) -> str:
        return f"{self._mark}[{', '.join(write_call(*call) for call in calls)}]"

    def grammar(self, tools: Sequence[Tool], tokenizer: Tokenizer, single: bool) -> str:
        mark = mark_rule(self._mark, tokenizer)
        if tokenizer.special.get(_ARGS) is not None:
            return f"calls: {repeated('', single)}\n{named_calls(tools, mark, mark_rule(_ARGS, tokenizer), '')}"
        ids = {"id": {"type": "string", "pattern": f"^{_NINE.pattern}$"}} if self.name == "mistral" else {}
        body = json_rule(calls_schema(tools, more=ids))
        return f'calls: {mark} " "? "[" {repeated(", ", single)} "]"\ncall: {body}\n'


def _ids(body: str) -> list[Any]:
    if not body.startswith(("[", "{")):
        return [body.partition(_ARGS)[0].partition(_ID)[2].strip()]
    try:
        value, _ = json_prefix(body)
    except ValueError:
        return []
    return [each.get("id") for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict)]


def _parse(body: str) -> list[Call]:
    if not body.startswith(("[", "{")) and _ARGS in body:
        head, _, arguments = body.partition(_ARGS)
        return [(head.partition(_ID)[0].strip(), arguments.strip())]
    try:
        value, _ = json_prefix(body)
    except ValueError:
        return [malformed(body)]
    calls = [call_of(each) for each in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call] if calls and all(calls) else [malformed(body)]
