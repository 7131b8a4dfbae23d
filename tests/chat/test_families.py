"""Tool calls of all families: what is written is parsed, malformed calls stay calls, streams show what is parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.chat.call_families.choice import FAMILIES
from rollmill.chat.config import FamilyName
from rollmill.chat.format import Thinking, assistant_message
from tests.chat.published import TOOLS, published

NAMES = [
    "qwen2.5",
    "qwen3",
    "qwen3-coder",
    "glm4.5",
    "llama3.1",
    "mistral-nemo",
    "deepseek-v3.1",
    "kimi-k2",
    "granite3.3",
    "gemma2",
]
ONE_CALL = ("llama3.1",)  # its template refuses more
NO_TEXT = ("llama3.1", "mistral-nemo")  # their templates drop the text of an answer that has calls

words = st.text(alphabet='ab "\\\n<{}é😀', max_size=12)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", NAMES)
def test_messages_round_trip(name: str, data: st.DataObject) -> None:
    format = published(name).format
    clean = words.map(str.strip)
    paths = data.draw(st.lists(clean, min_size=1, max_size=1 if name in ONE_CALL else 3))
    content = None if name in NO_TEXT else data.draw(st.none() | clean.filter(lambda text: text and "<" not in text))
    values = [{"path": path, "line": 3, "parts": [path]} for path in paths]
    calls = [("edit", json.dumps(value, ensure_ascii=False)) for value in values]
    message = assistant_message(content, calls)
    parsed = format.parse(format.render_answer(message, TOOLS), TOOLS)
    assert parsed["content"] == content
    assert [json.loads(call["function"]["arguments"]) for call in parsed["tool_calls"]] == values


@settings(max_examples=30, deadline=None)
@given(text=st.text(max_size=30), reasoning=st.text(alphabet="ab \n<é", max_size=10))
@pytest.mark.parametrize("name", [*NAMES, "deepseek-r1", "smollm3"])
def test_a_stream_shows_what_is_parsed(name: str, text: str, reasoning: str) -> None:
    case = published(name)
    for calls in ([], [("read", '{"path": "a"}')]):
        message = assistant_message(text, calls, reasoning)
        tokens = case.format.render_answer(message, [])
        parsed = case.format.parse(tokens, TOOLS)
        stream, shown, thought = case.format.content_stream(), "", ""
        for token in tokens:
            shown += stream.push([token])
            thought += stream.reasoning
        assert (parsed["content"] or "").startswith(shown)
        assert parsed.get("reasoning_content", "").startswith(thought)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3.1", "llama3.1", "kimi-k2", "glm4.5", "gpt-oss", "command-r7b"])
def test_any_tokens_parse_and_stream(name: str, data: st.DataObject) -> None:
    case = published(name)
    marks = st.sampled_from(sorted(case.tokenizer.special_ids))
    tokens = data.draw(st.lists(marks | st.integers(0, case.tokenizer.vocab_size - 1), max_size=30))
    parsed = case.format.parse(tokens, TOOLS)
    stream = case.format.content_stream()
    shown = "".join(stream.push([token]) for token in tokens)
    assert (parsed["content"] or "").startswith(shown)
    json.dumps(parsed)


TEXTS: dict[FamilyName, tuple[str, tuple[str, str]]] = {
    "hermes": ('<tool_call>\n{"name": "read", "arguments": {"pa', ("read", '{"pa')),
    "qwen-coder": (
        "<tool_call>\n<function=read>\n<parameter=path>\na.py",
        ("read", "<function=read>\n<parameter=path>\na.py"),
    ),
    "glm": (
        "<tool_call>read\n<arg_key>path</arg_key>\n<arg_value>a.py",
        ("read", "read\n<arg_key>path</arg_key>\n<arg_value>a.py"),
    ),
    "llama3": ('{"name": "read", "parameters": {"path', ("read", '{"name": "read", "parameters": {"path')),
    "mistral": ('[TOOL_CALLS][{"name": "read", "arg', ("read", '[{"name": "read", "arg')),
    "granite": ("<|tool_call|>read", ("invalid", "read")),
    "deepseek": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>read<｜tool▁sep｜>{", ("read", "{")),
    "deepseek-v3": ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>read\n```json\n{", ("read", "{")),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>{",
        ("read", "{"),
    ),
    "harmony": ("<|channel|>commentary to=functions.read <|constrain|>json<|message|>{", ("read", "{")),
    "cohere": ('<|START_ACTION|>[{"tool_name": "read", "para', ("read", '[{"tool_name": "read", "para')),
    "json": ('{"name": "read", "argu', ("read", '{"name": "read", "argu')),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_malformed_calls_stay_calls_with_their_raw_text(name: FamilyName) -> None:
    text, call = TEXTS[name]
    assert FAMILIES[name].parse(text, TOOLS)[1] == [call]
    assert FAMILIES[name].parse(text[:1] + "[" * 100_000, TOOLS)  # JSON nested too deeply


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("llama3", '<|python_tag|>{"name": "read", "parameters": {"path": "a"}}', [("read", '{"path": "a"}')]),
        ("llama3", '{"name": "read", "parameters": {}}; {"name": "x", "parameters": {}}', [("read", "{}")]),
        ("llama3", '{"a": 1} is an object', []),
        (
            "mistral",
            "[TOOL_CALLS]read[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]edit[ARGS]{}",
            [("read", "{}"), ("edit", "{}")],
        ),
        ("json", '```json\n[{"name": "read", "arguments": {}}]\n```', [("read", "{}")]),
        ("json", "[1, 2]", []),
        ("qwen-coder", "<function=edit>\n<parameter=line>\n3\n</parameter>\n</function>", [("edit", '{"line": 3}')]),
        ("qwen-coder", "<function=edit>\n<parameter=line>\nx\n</parameter>\n</function>", [("edit", '{"line": "x"}')]),
        (
            "glm",
            "<tool_call>edit<arg_key>line</arg_key><arg_value>3</arg_value></tool_call>",
            [("edit", '{"line": 3}')],
        ),
        ("glm", '<tool_call>{"name": "read"}</tool_call>', [("invalid", '{"name": "read"}</tool_call>')]),
        ("harmony", "<|channel|>final<|message|>to=functions.read", []),
        ("harmony", "<|channel|>commentary to=a.b", [("invalid", "<|channel|>commentary to=a.b")]),
        ("cohere", '<|START_ACTION|>[{"tool_name": "read", "parameters": {}}]<|END_ACTION|>', [("read", "{}")]),
        ("cohere", "<|START_ACTION|>[]<|END_ACTION|>", [("invalid", "[]")]),
        ("hermes", "<tool_call></tool_call>", [("invalid", "")]),
    ],
)
def test_layouts_that_models_use(name: FamilyName, text: str, expected: Any) -> None:
    assert FAMILIES[name].parse(text, TOOLS)[1] == expected


def test_reasoning_is_split_as_it_was_opened() -> None:
    written, opened = Thinking("<think>", "</think>"), Thinking("<think>", "</think>", opened=True)
    assert written.split("<think>\na\n</think>\n\nb") == opened.split("a\n</think>\n\nb") == ("a", "b")
    assert written.split("a b") == opened._replace(always=False).split("a b") == ("", "a b")
    assert opened.split("a b") == written.split("\n<think>a b") == ("a b", "")
