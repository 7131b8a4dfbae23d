"""Calls as plain JSON: the answer is `{"name": …, "parameters": {…}}`, or a list of such objects.

Llama 3 writes one call, also behind `<|python_tag|>`. Other models write a list, perhaps in a ```json block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmill.chat.call_family import Call, CallFamily, call_of, json_prefix, malformed, write_call
from rollmill.chat.call_grammar import calls_schema, json_rule, repeated
from rollmill.chat.format import Tool
from rollmill.chat.tokenizer import Tokenizer

_TAG = "<|python_tag|>"
_FENCE = "```json"


class JsonCalls(CallFamily):
    def __init__(self, name: str, *, key: str, single: bool) -> None:
        self.name = name
        self.ends = (_TAG,)
        self.silent = ("{",) if single else ("{", "[", "`")
        self._key = key
        self.single_call = single  # one call per answer

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[str, list[Call]]:
        content, tagged, body = text.partition(_TAG)
        if tagged:
            return content, self._calls(body.strip()) or [malformed(body.strip())]
        return ("", calls) if (calls := self._calls(text.strip())) else (text, [])

    def write(self, calls: Sequence[Call]) -> str:
        bodies = [write_call(*call, key=self._key) for call in calls]
        return bodies[0] if len(bodies) == 1 else f"[{', '.join(bodies)}]"

    def grammar(self, tools: Sequence[Tool], tokenizer: Tokenizer, single: bool) -> str:
        several = "" if single or self.single_call else f' | "[" {repeated(", ", False)} "]"'
        return f"calls: call{several}\ncall: {json_rule(calls_schema(tools, self._key))}\n"

    def _calls(self, body: str) -> list[Call]:
        """The calls of a text that consists of calls; none if it is another text."""
        if not self.single_call and body.startswith(_FENCE):
            body = body.removeprefix(_FENCE).strip().removesuffix("```").strip()
        try:
            value, rest = json_prefix(body)
        except ValueError:
            # text that begins like a call is a malformed call
            return [malformed(body)] if body.startswith('{"name"') else []
        if self.single_call:
            call = call_of(value)
            return [call] if call and (not rest.strip() or rest.lstrip().startswith((";", "{", ","))) else []
        values: list[Any] = value if isinstance(value, list) else [value]
        calls = [call_of(each) for each in values]
        return [call for call in calls if call] if all(calls) and not rest.strip() else []
