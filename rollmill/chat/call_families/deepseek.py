"""DeepSeek: special tokens around each call.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>…<｜tool▁calls▁end｜>    V3.1
<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME⏎```json⏎{…}⏎```<｜tool▁call▁end｜>                      V3, R1
"""

from __future__ import annotations

from collections.abc import Sequence

from rollmill.chat.call_family import Call, CallFamily
from rollmill.chat.call_grammar import mark_rule, named_calls, repeated, text_rule
from rollmill.chat.format import CallMark, Tool
from rollmill.chat.tokenizer import Tokenizer

CALLS = "<｜tool▁calls▁begin｜>"
_CALL, _SEPARATOR, _CALL_END, _CALLS_END = (
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)


class DeepSeekCalls(CallFamily):
    ends = (CALLS, _CALL)
    call_mark = CallMark(_CALL, ends=False)

    def __init__(self, *, fenced: bool) -> None:
        self._fenced = fenced  # the layout of V3 and R1
        self.name = "deepseek-v3" if fenced else "deepseek"

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[str, list[Call]]:
        content, *bodies = text.split(_CALL)
        content, opened, rest = content.partition(CALLS)
        if opened and not bodies:
            return content, [("invalid", rest)]
        return content, [_parse(body.partition(_CALL_END)[0].removesuffix(_CALLS_END)) for body in bodies]

    def write(self, calls: Sequence[Call]) -> str:
        return CALLS + ("\n" if self._fenced else "").join(self._write(*call) for call in calls) + _CALLS_END

    def grammar(self, tools: Sequence[Tool], tokenizer: Tokenizer, single: bool) -> str:
        begin, call, separator, call_end, end = (
            mark_rule(mark, tokenizer) for mark in (CALLS, _CALL, _SEPARATOR, _CALL_END, _CALLS_END)
        )
        if self._fenced:
            before, between = f'{call} "function" {separator}', text_rule("\n```json\n")
            rules = named_calls(tools, before, between, f"{text_rule(chr(10) + '```')} {call_end}")
        else:
            rules = named_calls(tools, call, separator, call_end)
        return f"calls: {begin} {repeated(chr(10) if self._fenced else '', single)} {end}\n{rules}"

    def _write(self, name: str, arguments: str) -> str:
        if self._fenced:
            return f"{_CALL}function{_SEPARATOR}{name}\n```json\n{arguments}\n```{_CALL_END}"
        return f"{_CALL}{name}{_SEPARATOR}{arguments}{_CALL_END}"


def _parse(body: str) -> Call:
    head, separated, rest = body.partition(_SEPARATOR)
    if not separated:
        return "invalid", body
    if head.strip() != "function" or "\n" not in rest:
        return head.strip(), rest.strip()
    name, _, arguments = rest.partition("\n")
    return name.strip(), arguments.strip().removeprefix("```json").removesuffix("```").strip()
