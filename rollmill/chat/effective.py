"""The chat template that a model was trained with, as one file that other software can use.

Where the template of a checkpoint has no place for tools, calls, results or a system message, they are written into the
text of other messages (chat/context_fitting.py). Software that knows only the template leaves them out, so the model
would not see what it saw in training. The effective template begins with lines that write them in the same way.
"""

from __future__ import annotations

import json
import re
from datetime import datetime

from rollmill.chat.call_family import CallFamily
from rollmill.chat.context_fitting import Abilities, describe_tools, written_result
from rollmill.chat.format import Message, Tool, assistant_message
from rollmill.chat.formats.template import TemplateFormat
from rollmill.chat.prompt_writer import Writer
from rollmill.chat.sandbox import ChatTemplate, TemplateFailed

_NAME, _ARGUMENTS, _SIGNATURES, _RESULT = "rollmill-name", '{"rollmill": 0}', "rollmill-signatures", "rollmill-result"
_TOOLS: list[Tool] = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("a", "b")]
_BEGIN = """{#- Rollmill: what this template has no place for is written as it was in training. -#}
{%- set r = namespace(messages=[], results='', text='', system=none) -%}
"""
_SIGNED = """{%- if tools -%}
{%- for tool in tools %}{% set r.text = r.text ~ ('' if loop.first else '\\n') ~ (tool | tojson) %}{% endfor -%}
{%- set r.text = BEFORE ~ r.text ~ AFTER -%}
{%- endif -%}
"""
_RESULTS = """{%- if r.results and m.role != 'tool' -%}
{%- set r.messages = r.messages + [{'role': 'user', 'content': r.results}] %}{% set r.results = '' -%}
{%- endif -%}
{%- if m.role == 'tool' -%}
{%- set r.results = r.results ~ ('\\n' if r.results else '') ~ BEFORE ~ m.content ~ AFTER -%}
{%- else -%}
"""
_CALLS = """{%- if m.role == 'assistant' and m.tool_calls -%}
{%- set c = namespace(text=m.content or '') -%}
{%- for call in m.tool_calls -%}
{%- set f = call.function or call -%}
{%- set given = f.arguments if f.arguments is string else (f.arguments | tojson) -%}
{%- set begin = (('\\n' if c.text else '') ~ FIRST) if loop.first else NEXT -%}
{%- set c.text = c.text ~ begin ~ f.name ~ MIDDLE ~ given -%}
{%- endfor -%}
{%- set r.messages = r.messages + [{'role': 'assistant', 'content': c.text ~ LAST}] -%}
{%- else -%}
"""
_SYSTEM = """{%- if r.messages and r.messages[0].role == 'system' -%}
{%- set r.system = r.messages[0].content %}{% set r.messages = r.messages[1:] -%}
{%- endif -%}
{%- if r.text -%}
{%- set r.system = r.system ~ '\\n\\n' ~ r.text if r.system else r.text -%}
{%- endif -%}
"""
_WITH_SYSTEM = """{%- if r.system is not none -%}
{%- set r.messages = [{'role': 'system', 'content': r.system}] + r.messages -%}
{%- endif -%}
"""
_IN_FRONT = """{%- if r.system is not none and r.messages and r.messages[0].role == 'user' -%}
{%- set text = r.system ~ '\\n\\n' ~ r.messages[0].content if r.system else r.messages[0].content -%}
{%- set r.messages = [{'role': 'user', 'content': text}] + r.messages[1:] -%}
{%- elif r.system is not none -%}
{%- set r.messages = [{'role': 'user', 'content': r.system}] + r.messages -%}
{%- endif -%}
"""


def effective_template(format: TemplateFormat) -> str | None:
    """None if the template writes everything by itself. TemplateFailed if it cannot be made to."""
    writer, can = format.writer, format.writer.abilities
    if can.system and can.calls and can.results and can.tools:
        return None
    made = _beginning(can, writer.family) + writer.template.source
    template, now = ChatTemplate(made), datetime.now()
    for tools in ([], _TOOLS):
        given = {"messages": _tried(can), "tools": tools, "documents": None, "add_generation_prompt": True}
        if writer.spelling.marked(template.render({**writer.variables, **given}, now)) != _trained(writer, tools, now):
            raise TemplateFailed("it does not write what training wrote when its messages are changed before it")
    return made


def _trained(writer: Writer, tools: list[Tool], now: datetime) -> str:
    return writer.write(_tried(None), tools, now)


def _tried(can: Abilities | None) -> list[Message]:
    """A conversation with everything; in the form that the template takes, or that training is given (None)."""
    calls = assistant_message("So:", [("a", '{"x": "y"}'), ("b", "{}")])
    results: list[Message] = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
    if can is not None:
        for number, call in enumerate(calls["tool_calls"]):
            call["id"] = f"call{number:05d}"
            if can.arguments == "object":
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        results = [
            {**result, "name": name, "tool_call_id": f"call{number:05d}"}
            for number, (name, result) in enumerate(zip("ab", results, strict=True))
        ]
    start: list[Message] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Look."}]
    return [*start, calls, *results, assistant_message("Done.", []), {"role": "user", "content": "Thanks."}]


def _beginning(can: Abilities, family: CallFamily) -> str:
    """Lines that change the messages as `Fitting` does."""
    loop, end = "{%- for m in messages -%}\n", ""
    if not can.results:
        before, after = written_result(_RESULT).split(_RESULT)
        loop += _filled(_RESULTS, BEFORE=before, AFTER=after)
        end += "{%- endif -%}\n"
    if not can.calls:
        loop += _call_lines(family)
        end += "{%- endif -%}\n"
    loop += "{%- set r.messages = r.messages + [m] -%}\n" + end + "{%- endfor -%}\n"
    if not can.results:
        loop += "{%- if r.results %}{% set r.messages = r.messages + [{'role': 'user', 'content': r.results}] %}"
        loop += "{% endif -%}\n"
    signed, tools = "", ""
    if not can.tools:
        before, after = describe_tools(_SIGNATURES, family).split(_SIGNATURES)
        signed = _filled(_SIGNED, BEFORE=before, AFTER=after)
        tools = f"{{%- set tools = {'[]' if can.needs_list else 'none'} -%}}\n"
    placed = _SYSTEM + (_WITH_SYSTEM if can.system else _IN_FRONT)
    return f"{_BEGIN}{signed}{loop}{placed}{{%- set messages = r.messages -%}}\n{tools}"


def _call_lines(family: CallFamily) -> str:
    one, two = (family.write([(_NAME, _ARGUMENTS)] * count) for count in (1, 2))
    pieces = re.split(f"{re.escape(_NAME)}|{re.escape(_ARGUMENTS)}", two)
    if len(pieces) != 5 or one != pieces[0] + _NAME + pieces[1] + _ARGUMENTS + pieces[4] or pieces[1] != pieces[3]:
        raise TemplateFailed(f"calls of the family {family.name} cannot be written by a template")
    return _filled(_CALLS, FIRST=pieces[0], MIDDLE=pieces[1], NEXT=pieces[2], LAST=pieces[4])


def _filled(lines: str, **texts: str) -> str:
    """The lines with these texts as literals of Jinja."""
    for name, text in texts.items():
        lines = lines.replace(name, json.dumps(text))
    return lines
