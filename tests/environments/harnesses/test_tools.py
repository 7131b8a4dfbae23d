"""The texts the model reads. They are a format: training transcripts are generated with the same functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.environments.harnesses import tools


def test_texts() -> None:
    assert tools.render_list(["test.py", "main.py"]) == "main.py\ntest.py"
    assert tools.render_read("def f(x):\n    return x\n") == "1 def f(x):\n2     return x"
    assert tools.render_read("no newline\fat the end") == "1 no newline\fat the end"
    assert tools.render_read("") == "empty"
    assert tools.render_run(0, b"") == "ok"
    assert tools.render_run(0, b"all good\n") == "all good"
    assert tools.render_run(1, b"fail f(3) = 5 not 7\n") == "fail f(3) = 5 not 7"
    assert tools.render_run(1, b"") == "error exit 1"
    assert tools.render_run(-9, b"", stopped="time") == "error time limit"
    assert tools.render_run(-9, b"partial\n", stopped="memory") == "partial\nerror memory limit"


TRACEBACK = b"""before
Traceback (most recent call last):
  File "/work/test.py", line 1, in <module>
    from main import f
  File "/work/main.py", line 2, in <module>
    return y
NameError: name 'y' is not defined
"""


def test_an_uncaught_exception_is_one_line_unless_asked_for() -> None:
    assert tools.render_run(1, TRACEBACK) == "before\nerror NameError line 2"
    assert tools.render_run(1, TRACEBACK, full_tracebacks=True) == TRACEBACK.decode().strip()
    syntax = b"  File \"/work/main.py\", line 3\n    return (\n           ^\nSyntaxError: '(' was never closed\n"
    assert tools.render_run(1, syntax) == "error SyntaxError line 3"
    assert tools.render_run(1, b"Traceback (most recent call last):\nno frame") == "error exception"


def test_edit_replaces_one_line_and_keeps_its_indentation() -> None:
    text = "def f(x):\n    return x\n# end"
    assert tools.apply_edit(text, 2, "return x + 1") == "def f(x):\n    return x + 1\n# end\n"
    assert tools.apply_edit(text, 2, "  return 0") == "def f(x):\n  return 0\n# end\n"
    assert tools.apply_edit(text, 1, "def f(y):\n    x = y") == "def f(y):\n    x = y\n    return x\n# end\n"
    assert tools.apply_edit(text, 3, "") == "def f(x):\n    return x\n\n"
    for absent in (0, -1, 4):
        with pytest.raises(tools.BadToolCall, match="no such line"):
            tools.apply_edit(text, absent, "x")


@given(st.lists(st.text(st.characters(exclude_characters="\n")), min_size=1), st.data())
def test_edit_changes_no_other_line(lines: list[str], data: st.DataObject) -> None:
    number = data.draw(st.integers(1, len(lines)))
    edited = tools.apply_edit("\n".join(lines) + "\n", number, "new").split("\n")[:-1]
    assert [line for i, line in enumerate(edited, 1) if i != number] == [
        line for i, line in enumerate(lines, 1) if i != number
    ]
    assert edited[number - 1].lstrip() == "new"


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
        tools.parse_call({"function": {"name": name, "arguments": arguments}})
    assert error.value.text == text


def test_right_calls_and_schemas() -> None:
    assert tools.parse_call({"function": {"name": "done", "arguments": ""}}) == ("done", {})
    arguments = '{"text": "b", "path": "a", "line": 2}'
    assert tools.parse_call({"function": {"name": "edit", "arguments": arguments}}) == (
        "edit",
        {"path": "a", "line": 2, "text": "b"},
    )
    schemas = {schema["function"]["name"]: schema["function"]["parameters"] for schema in tools.tool_schemas()}
    assert list(schemas) == ["list", "read", "write", "edit", "run", "done"]
    # the order is the order of positional arguments in compact chat formats
    assert list(schemas["edit"]["properties"]) == ["path", "line", "text"]
