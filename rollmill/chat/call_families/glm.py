"""GLM-4.5 and later: a call as its name and pairs of tags, values as plain text.

    <tool_call>edit⏎<arg_key>path</arg_key>⏎<arg_value>a.py</arg_value>⏎</tool_call>

Newer models leave the line breaks out. Values have the type that the tool's schema names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollmill.chat.call_families.qwen_coder import required_of, typed, value_rules, written_values
from rollmill.chat.call_family import Call, CallFamily, properties_of, to_json
from rollmill.chat.call_grammar import arguments_of, mark_rule, repeated, text_rule
from rollmill.chat.format import CallMark, Tool
from rollmill.chat.tokenizer import Tokenizer

KEY = "<arg_key>"
_START, _END, _RESULT = "<tool_call>", "</tool_call>", "<|observation|>"
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_BREAK = '"\\n"?'


class GlmCalls(CallFamily):
    name = "glm"
    ends = (_START,)
    closings = (_RESULT,)
    call_mark = CallMark(_END)

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[str, list[Call]]:
        content, *bodies = text.split(_START)
        return content, [_parse(body, tools) for body in bodies]

    def write(self, calls: Sequence[Call]) -> str:
        return "\n".join(
            f"{_START}{name}\n"
            + "".join(
                f"{KEY}{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in written_values(arguments)
            )
            + _END
            for name, arguments in calls
        )

    def grammar(self, tools: Sequence[Tool], tokenizer: Tokenizer, single: bool) -> str:
        """Parameters come in the order of the schema; those that it does not require may be left out."""
        start, end, key_start, key_end, value = (
            mark_rule(mark, tokenizer) for mark in (_START, _END, KEY, "</arg_key>", "<arg_value>")
        )
        choices, rules = [], []
        for number, tool in enumerate(tools):
            schema, name = arguments_of(tool), tool["function"]["name"]
            parts = []
            for place, key in enumerate(properties_of(tools)[name]):
                own = f"value{number}_{place}"
                part = f"{key_start} {text_rule(key)} {key_end} {_BREAK} {value} {own} {_BREAK}"
                parts.append(part if key in required_of(schema) else f"({part})?")
                rules.append(value_rules(own, key, schema, mark_rule("</arg_value>", tokenizer)))
            choices.append(f"call{number}")
            rules.append(f"call{number}: {start} {text_rule(name)} {_BREAK} {' '.join(parts)} {end}\n")
        closing = "".join(f" <[{token}]>" for token in self.closing_tokens(tokenizer))
        return f"calls: {repeated(chr(10), single)}{closing}\ncall: {' | '.join(choices)}\n{''.join(rules)}"


def _parse(body: str, tools: Sequence[Tool]) -> Call:
    inner, ended, _ = body.partition(_END)
    name = inner.partition(KEY)[0].strip()
    known = name if re.fullmatch(r"[\w.-]+", name) else "invalid"
    if not ended or known == "invalid" or _PAIR.sub("", inner).strip() != name:
        return known, body
    schemas = properties_of(tools).get(name, {})
    return name, to_json({key.strip(): typed(value, schemas.get(key.strip())) for key, value in _PAIR.findall(inner)})
