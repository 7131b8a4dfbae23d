"""Hermes and Qwen: `<tool_call>⏎{"name": …, "arguments": {…}}⏎</tool_call>`, one block per call."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rollmill.chat.calls import Call, parse_call, write_call
from rollmill.chat.format import JSON_STYLE, Tool
from rollmill.chat.tokenizer import Tokenizer

START, END = "<tool_call>", "</tool_call>"


class HermesCalls:
    name = "hermes"
    ends: tuple[str, ...] = (START,)
    silent: tuple[str, ...] = ()

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[str, list[Call]]:
        content, *bodies = text.split(START)
        return content, [parse_call(body.partition(END)[0].strip()) for body in bodies]

    def grammar(self, tools: Sequence[Tool], tokenizer: Tokenizer) -> str:
        """Rules for `calls`, as llguidance reads them: one or more calls of these tools."""
        begin, end = (mark if tokenizer.find_token(mark) is not None else json.dumps(mark) for mark in (START, END))
        bodies = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "arguments": tool["function"].get("parameters") or {"type": "object"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in tools
        ]
        schema = json.dumps({"anyOf": bodies, **JSON_STYLE})
        call = f'call: {begin} "\\n" arguments "\\n" {end}'
        return f'calls: call ("\\n" call)*\n{call}\narguments: %json {schema}\n'

    def ids(self, text: str) -> list[str]:
        return []

    def write(self, calls: Sequence[Call]) -> str:
        return "\n".join(f"{START}\n{write_call(*call)}\n{END}" for call in calls)
