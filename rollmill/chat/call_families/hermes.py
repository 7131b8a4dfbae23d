"""Hermes and Qwen: `<tool_call>⏎{"name": …, "arguments": {…}}⏎</tool_call>`, one block per call."""

from __future__ import annotations

from collections.abc import Sequence

from rollmill.chat.call_family import Call, CallFamily, parse_call, write_call
from rollmill.chat.call_grammar import calls_schema, json_rule, mark_rule, repeated
from rollmill.chat.format import CallMark, Tool
from rollmill.chat.tokenizer import Tokenizer

START, END = "<tool_call>", "</tool_call>"


class HermesCalls(CallFamily):
    name = "hermes"
    ends = (START,)
    call_mark = CallMark(END)
    streamed = (START, END)

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[str, list[Call]]:
        content, *bodies = text.split(START)
        return content, [parse_call(body.partition(END)[0].strip()) for body in bodies]

    def grammar(self, tools: Sequence[Tool], tokenizer: Tokenizer, single: bool) -> str:
        begin, end = mark_rule(START, tokenizer), mark_rule(END, tokenizer)
        call = f'call: {begin} "\\n" call_body "\\n" {end}'
        return f"calls: {repeated(chr(10), single)}\n{call}\ncall_body: {json_rule(calls_schema(tools))}\n"

    def write(self, calls: Sequence[Call]) -> str:
        return "\n".join(f"{START}\n{write_call(*call)}\n{END}" for call in calls)
