"""Kimi K2: special tokens around each call, whose id holds its name and a number.

<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>…
<|tool_calls_section_end|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollmill.chat.call_family import Call, CallFamily
from rollmill.chat.call_grammar import mark_rule, named_calls, repeated
from rollmill.chat.format import CallMark, Tool
from rollmill.chat.tokenizer import Tokenizer

SECTION = "<|tool_calls_section_begin|>"
_CALL, _ARGUMENT, _CALL_END, _SECTION_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)

_ID = re.compile(r"functions\.[\w.-]+:\d+")


class KimiCalls(CallFamily):
    name = "kimi"
    ends = (SECTION, _CALL)
    call_mark = CallMark(_CALL, ends=False)

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[str, list[Call]]:
        content, *bodies = text.split(_CALL)
        content, opened, rest = content.partition(SECTION)
        if opened and not bodies:
            return content, [("invalid", rest)]
        return content, [_parse(body.partition(_CALL_END)[0].removesuffix(_SECTION_END)) for body in bodies]

    def ids(self, text: str) -> list[str]:
        return [head for body in text.split(_CALL)[1:] if _ID.fullmatch(head := body.partition(_ARGUMENT)[0].strip())]

    def write(self, calls: Sequence[Call]) -> str:
        written = (
            f"{_CALL}functions.{name}:{number}{_ARGUMENT}{arguments}{_CALL_END}"
            for number, (name, arguments) in enumerate(calls)
        )
        return SECTION + "".join(written) + _SECTION_END

    def grammar(self, tools: Sequence[Tool], tokenizer: Tokenizer, single: bool) -> str:
        section, call, argument, call_end, section_end = (
            mark_rule(mark, tokenizer) for mark in (SECTION, _CALL, _ARGUMENT, _CALL_END, _SECTION_END)
        )
        rules = named_calls(tools, f'{call} "functions."', f'":" /[0-9]{{1,3}}/ {argument}', call_end)
        return f"calls: {section} {repeated('', single)} {section_end}\n{rules}"


def _parse(body: str) -> Call:
    head, separated, arguments = body.partition(_ARGUMENT)
    if not separated:
        return "invalid", body
    return head.strip().removeprefix("functions.").rpartition(":")[0] or head.strip(), arguments.strip()
