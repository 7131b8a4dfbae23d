"""Harmony, the format of gpt-oss: an answer is one or several messages, each in a channel.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    … <|end|><|start|>assistant to=functions.read<|channel|>commentary json<|message|>{"path": …}<|call|>

The analysis is reasoning. A message to a function is a call; models also write `<|channel|>commentary to=functions.read
<|constrain|>json`. An answer has at most one call, because the template writes only one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollmill.chat.call_family import Call, CallFamily
from rollmill.chat.call_grammar import mark_rule, named_calls
from rollmill.chat.format import Tool
from rollmill.chat.tokenizer import Tokenizer

CHANNEL = "<|channel|>"
_MESSAGE, _NEXT, _END, _CALL = "<|message|>", "<|start|>assistant", "<|end|>", "<|call|>"
_FINAL = f"{CHANNEL}final{_MESSAGE}"
_TO = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class HarmonyCalls(CallFamily):
    name = "harmony"
    ends = (_END, _NEXT, _CALL)
    single_call = True
    closings = (_CALL,)
    frames = (_FINAL, _NEXT + _FINAL)
    frame_ends = (CHANNEL, _MESSAGE, _END, "<|start|>", "<|constrain|>")

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[str, list[Call]]:
        if CHANNEL not in text and _MESSAGE not in text:
            return text, []
        texts, calls = [], []
        for part in text.split(_NEXT):
            head, begun, body = part.partition(_MESSAGE)
            to = _TO.search(head)
            body = body.partition(_END)[0].partition(_CALL)[0]
            if to is not None:
                calls.append((to[1], body.strip()) if begun else ("invalid", part))
            elif begun and f"{CHANNEL}analysis" not in head:
                texts.append(body)
        return "".join(texts), calls

    def write(self, calls: Sequence[Call]) -> str:
        written = (f" to=functions.{name}{CHANNEL}commentary json{_MESSAGE}{arguments}" for name, arguments in calls)
        return f"{_CALL}{_NEXT}".join(written)

    def grammar(self, tools: Sequence[Tool], tokenizer: Tokenizer, single: bool) -> str:
        channel, message, end = (mark_rule(mark, tokenizer) for mark in (CHANNEL, _MESSAGE, _CALL))
        rules = named_calls(tools, '" to=functions."', f'{channel} "commentary json" {message}', end)
        return f"calls: call\n{rules}"

    def text_marks(self, tokenizer: Tokenizer) -> tuple[str, str]:
        return f'{mark_rule(CHANNEL, tokenizer)} "final" {mark_rule(_MESSAGE, tokenizer)}', ""
