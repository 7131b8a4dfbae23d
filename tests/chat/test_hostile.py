"""Templates and messages come from outside: a template cannot do harm, a message cannot change the structure."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.chat import sandbox
from rollmill.chat.format import HistoryRewritten, assistant_message
from rollmill.chat.sandbox import LARGEST_TEMPLATE, ChatTemplate, TemplateFailed
from tests.chat.published import TOOLS, published

NAMES = ["qwen2.5", "qwen3", "qwen3-coder", "llama3.1", "mistral-nemo", "deepseek-v3.1", "kimi-k2", "smollm3", "gemma2"]
NOW = datetime(2026, 1, 2)


def hostile(name: str) -> st.SearchStrategy[str]:
    """Text with special tokens, halves of them, Jinja, blanks, surrogates and characters that marks are made of."""
    special = sorted(published(name).tokenizer.special)
    halves = [token[: len(token) // 2] for token in special] + [token[len(token) // 2 :] for token in special]
    odd = ["{{", "}}", "{% if %}", "\ud800", "\ufdd0", "\ufdd0" + "1" + "\ufdd1", "\ufdd2", " ", "\n", "x", "é"]
    return st.lists(st.sampled_from([*special, *halves, *odd]), max_size=8).map("".join)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", NAMES)
def test_text_of_messages_never_becomes_structure(name: str, data: st.DataObject) -> None:
    case, text = published(name), hostile(name)
    system, user, said, path, result = (data.draw(text) for _ in range(5))
    arguments = [("read", '{"path": "x"}')]

    def structure(system: str, user: str, said: str, result: str) -> list[int]:
        messages = [
            {"role": "system", "content": f"a{system}b"},
            {"role": "user", "content": f"a{user}b"},
            assistant_message(f"a{said}b", []),
            {"role": "user", "content": f"a{user}b"},
            assistant_message(None, arguments),
            {"role": "tool", "content": f"a{result}b"},
        ]
        tokens = case.format.render_start(messages, TOOLS)
        return [token for token in tokens if token in case.tokenizer.special_ids]

    assert structure(system, user, said.replace("think>", ""), result) == structure("", "", "", "")
    assert case.format.render_start([{"role": "user", "content": path}], [])


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", ["qwen2.5", "llama3.1", "kimi-k2", "qwen3-coder"])
def test_text_of_calls_and_tools_never_becomes_structure(name: str, data: st.DataObject) -> None:
    import json

    case, text = published(name), hostile(name)

    def structure(function: str, key: str, value: str, described: str) -> list[int]:
        tool: Any = {
            "name": f"f{function}",
            "description": described,
            "parameters": {"type": "object", "properties": {}},
        }
        tool["parameters"]["properties"] = {f"k{key}": {"type": "string", "description": value}}
        arguments = json.dumps({f"k{key}": value})
        messages = [{"role": "user", "content": "x"}, assistant_message(None, [(f"f{function}", arguments)])]
        messages.append({"role": "tool", "content": "x"})
        tokens = case.format.render_start(messages, [{"type": "function", "function": tool}])
        return [token for token in tokens if token in case.tokenizer.special_ids]

    drawn = [data.draw(text) for _ in range(4)]
    assert structure(*drawn) == structure("", "", "", "")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", ["qwen3", "llama3.1", "deepseek-v3.1", "kimi-k2"])
def test_whatever_was_sampled_can_be_continued(name: str, data: st.DataObject) -> None:
    """Any tokens at all: the next turn is appended, or the template rewrites the history. Nothing else is raised."""
    case = published(name)
    marks = st.sampled_from(sorted(case.tokenizer.special_ids - set(case.format.stop_tokens)))
    tokens = data.draw(st.lists(marks | st.integers(0, case.tokenizer.vocab_size - 1), max_size=20))
    tokens = [token for token in tokens if token not in case.format.stop_tokens]
    closed = data.draw(st.booleans())
    tokens += [case.format.stop_tokens[0]] if closed else []
    history = [{"role": "user", "content": "x"}, case.format.parse(tokens, TOOLS)]
    new = [{"role": "tool", "content": "y"} for _ in history[-1].get("tool_calls", [])] or [
        {"role": "user", "content": "y"}
    ]
    try:
        turn = case.format.render_turn(new, TOOLS, answer_closed=closed, history=history, answer=tokens)
    except HistoryRewritten:
        turn = case.format.render_start([*history, *new], TOOLS)
    assert "y" in case.tokenizer.decode(turn)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set n = namespace(x='ab') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for a in range(99) %}{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for a in range(99) %}{% set n.x = n.x | replace('a', n.x) %}{% endfor %}",
        "{{ 'a' * 999999999 }}",
        "{{ [0] * 999999999 }}",
        "{{ 9 ** 999999999 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ 'a'.ljust(999999999) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages.missing.missing }}",
        "{{ raise_exception('no') }}",
        "{{ {1: messages}['x']() }}",
    ],
)
def test_a_template_that_does_harm_fails(source: str) -> None:
    with pytest.raises(TemplateFailed):
        ChatTemplate(source).render({"messages": [{"role": "user", "content": "x"}]}, NOW)


DOUBLED = "{% set n = namespace(x=START) %}{% for a in range(18) %}BODY{% endfor %}{{ n.x | string | length }}"


def doubled(body: str, start: str = "'ab'") -> str:
    return DOUBLED.replace("START", start).replace("BODY", body)


@pytest.mark.parametrize(
    "source",
    [
        "{{ '{:>50000}'.format(1) | length }}",
        "{{ '{x:>50000}'.format_map({'x': 1}) | length }}",
        "{{ 'x' | attr('format') }}",
        "{{ 'x'['ljust'](50000) | length }}",
        "{{ ['x'] | map(attribute='ljust') | first }}{{ (['x'] | map(attribute='ljust') | first)(50000) | length }}",
        "{{ '%50000d' % 1 }}",
        "{{ range(1000) | join('a' * 100) | length }}",
        "{{ 'a'.join(['b' * 9000] * 9) | length }}",
        "{{ [1, 2] | tojson(indent='a' * 9000) | length }}",
        "{{ [1, 2, 3] | tojson(separators=['a' * 9000, ':']) | length }}",
        doubled("{% set n.x = n.x | tojson %}", "'\\\\'"),
        doubled("{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}"),
        "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}" + doubled("{% set n.x = f(n.x) %}"),
        "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        + doubled("{% set y %}{% call f() %}{{ n.x }}{% endcall %}{% endset %}{% set n.x = y %}"),
        doubled("{% set y %}{% filter upper %}{{ n.x }}{{ n.x }}{% endfilter %}{% endset %}{% set n.x = y %}"),
        doubled("{% set n.x = [n.x, n.x] %}"),
        doubled("{% set n.x = {'a': n.x, 'b': n.x} %}"),
        doubled("{% set n.x = dict(a=n.x, b=n.x) %}"),
        doubled("{% set n.x = namespace(a=n.x, b=n.x) %}"),
        doubled("{% set n.x = n.x * n.x %}", "3"),
        doubled("{% set n.x = n.x * n.x %}", "-3"),
        "{{ [1] | batch(50000, 0) | list | length }}",
        "{{ [1] | slice(50000) | list | length }}",
        "{{ 1 | round(5000, 'ceil') }}",
        "{{ (1).to_bytes(50000, 'big') | length }}",
        "{{ 'a'.encode().ljust(50000) | length }}",
        "{{ 0x" + "f" * 9000 + " > 1 }}",
        "{{ ('f' * 9000) | int(0, 16) > 1 }}",
        "{{ strftime_now('%9000d' * 100) | length }}",
        "{% for a in range(999) %}{{ ('a' * 9999).count('b') }}{% endfor %}",
        "{% for a in range(999) %}{{ 'b' in 'a' * 9999 }}{% endfor %}",
        "{% for a in range(999) %}{{ 'b' is in('a' * 9999) }}{% endfor %}",
        "{% set x = 'a' * 9999 %}{% for a in range(999) %}{{ x[1:] | length }}{% endfor %}",
        "{% for a in range(999) %}{% for b in 'a' * 9999 if b == 'b' %}{% endfor %}{% endfor %}",
        "{% for a in range(999) %}" + "{{ a }}" * 99 + "{% endfor %}",
        "{{ ('a' * 9999) | list | length }}",
        "{{ ('a' * 9999) | select | list | length }}",
        "{{ ('ab ' * 3333).split() | length }}",
        "{{ ('ab,' * 3333).split(',') | length }}",
        "{% for a in 'a' * 9999 %}{{ loop.length }}{% break %}{% endfor %}",
        "{% set x = range(999) | list %}{% for a in range(999) %}{{ x.count(-1) }}{% endfor %}",
        "{% block a %}{% endblock %}{% block b %}" + "{{ self.a() }}" * 99 + "{% endblock %}" + "{{ self.b() }}" * 99,
    ],
)
def test_a_template_cannot_pass_its_bounds(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(sandbox, "LARGEST_TEXT", 10_000)
    monkeypatch.setattr(sandbox, "LARGEST_SUM", 1_000_000, raising=False)
    monkeypatch.setattr(sandbox, "MOST_STEPS", 50_000, raising=False)
    with pytest.raises(TemplateFailed):
        ChatTemplate(source).render({}, NOW)


_LIST = "{% set l = range(99999) | list %}{% for a in range(99999) %}BODY{% endfor %}"
_PAIRS = "{% set n = namespace(t=(1,), u=(1,)) %}" + 16 * "{% set n.t = (n.t, n.t) %}{% set n.u = (n.u, n.u) %}"


@pytest.mark.parametrize(
    "source",
    [
        _LIST.replace("BODY", "{% set b = l | sort(reverse=true) %}"),
        _LIST.replace("BODY", "{{ l | max }}{{ l | unique | first }}"),
        _LIST.replace("BODY", "{% set b = l | tojson %}"),
        _LIST.replace("BODY", "{% if -1 in l %}{% endif %}"),
        _PAIRS + "{% if n.t == n.u %}{% endif %}" * 7000,
        _PAIRS + "{{ n.t | tojson | length }}" * 9000,
    ],
)
def test_a_template_that_does_little_at_great_cost_runs_out_of_time(
    monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(sandbox, "MOST_SECONDS", 0.2, raising=False)
    with pytest.raises(TemplateFailed, match="of a processor"):
        ChatTemplate(source).render({}, NOW)


@pytest.mark.parametrize(
    "source", ["{% if", "{{ 'a' | center(9) }}", "x" * (LARGEST_TEMPLATE + 1), "{{ " + "(" * 9999 + " }}"]
)
def test_a_template_that_cannot_be_compiled(source: str) -> None:
    with pytest.raises(TemplateFailed):
        ChatTemplate(source)


def test_a_template_has_what_transformers_gives_it() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'x' %}{% continue %}{% endif %}{% generation %}{{ m | tojson }}"
        "{% endgeneration %}{% break %}{% endfor %}{{ strftime_now('%d %b %Y') }}{{ messages | length * 2 }}{{ 7 % 4 }}"
    )
    text = ChatTemplate(source).render({"messages": [{"role": "x"}, {"role": "é<"}]}, NOW)
    assert text == '{"role": "é<"}02 Jan 202643'
