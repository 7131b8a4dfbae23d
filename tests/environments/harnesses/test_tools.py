"""Calls of tools: wrong ones are answered with what is wrong, long results are cut."""

from __future__ import annotations

import pytest

from rollmill.demo.coding_tools import TOOLS_BY_NAME
from rollmill.environments.harnesses import tools


def test_cut_says_how_much_is_missing() -> None:
    assert tools.cut("abc", 3) == "abc"
    assert tools.cut("a" * 50 + "b" * 50, 10) == "aaaaa[… 90 characters cut]bbbbb"


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("fly", "{}", tools.ERROR_UNKNOWN_TOOL),
        ("read", "main.py", tools.ERROR_NOT_JSON),
        ("read", "[" * 100_000, tools.ERROR_NOT_JSON),
        ("read", "[]", tools.ERROR_ARGUMENTS),
        ("read", "{}", tools.ERROR_ARGUMENTS),
        ("read", '{"path": 3}', tools.ERROR_ARGUMENTS),
        ("read", '{"path": "a", "mode": "r"}', tools.ERROR_ARGUMENTS),
        ("edit", '{"path": "a", "line": "2", "text": "b"}', tools.ERROR_ARGUMENTS),
        ("edit", '{"path": "a", "line": true, "text": "b"}', tools.ERROR_ARGUMENTS),
        ("done", '{"now": 1}', tools.ERROR_ARGUMENTS),
    ],
)
def test_wrong_calls_have_different_errors(name: str, arguments: str, text: str) -> None:
    with pytest.raises(tools.BadToolCall) as error:
        tools.parse_call({"function": {"name": name, "arguments": arguments}}, TOOLS_BY_NAME)
    assert error.value.text == text


def test_right_calls_and_schemas() -> None:
    assert tools.parse_call({"function": {"name": "done", "arguments": ""}}, TOOLS_BY_NAME) == ("done", {})
    arguments = '{"text": "b", "path": "a", "line": 2}'
    assert tools.parse_call({"function": {"name": "edit", "arguments": arguments}}, TOOLS_BY_NAME) == (
        "edit",
        {"path": "a", "line": 2, "text": "b"},
    )
