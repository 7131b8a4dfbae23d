"""Hermes and Qwen: `<tool_call>⏎{"name": …, "arguments": {…}}⏎</tool_call>`, one block per call."""

from __future__ import annotations

from collections.abc import Sequence

from rollmill.chat.calls import Call, parse_call, write_call
from rollmill.chat.format import Tool

START, END = "<tool_call>", "</tool_call>"


class HermesCalls:
    name = "hermes"
    ends: tuple[str, ...] = (START,)
    silent: tuple[str, ...] = ()

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[str, list[Call]]:
        content, *bodies = text.split(START)
        return content, [parse_call(body.partition(END)[0].strip()) for body in bodies]

    def write(self, calls: Sequence[Call]) -> str:
        return "\n".join(f"{START}\n{write_call(*call)}\n{END}" for call in calls)
