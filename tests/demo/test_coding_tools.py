"""The texts the model reads. They are a format: training transcripts are generated with the same functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.demo import coding_tools as tools
from rollmill.environments.harnesses.tools import BadToolCall


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


def test_an_uncaught_exception_is_one_line() -> None:
    assert tools.render_run(1, TRACEBACK) == "before\nerror NameError line 2"
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
        with pytest.raises(BadToolCall, match="no such line"):
            tools.apply_edit(text, absent, "x")


@given(st.lists(st.text(st.characters(exclude_characters="\n")), min_size=1), st.data())
def test_edit_changes_no_other_line(lines: list[str], data: st.DataObject) -> None:
    number = data.draw(st.integers(1, len(lines)))
    edited = tools.apply_edit("\n".join(lines) + "\n", number, "new").split("\n")[:-1]
    assert [line for i, line in enumerate(edited, 1) if i != number] == [
        line for i, line in enumerate(lines, 1) if i != number
    ]
    assert edited[number - 1].lstrip() == "new"


def test_schemas() -> None:
    schemas = {schema["function"]["name"]: schema["function"]["parameters"] for schema in tools.tool_schemas()}
    assert list(schemas) == ["list", "read", "write", "edit", "run", "done"]
    # the order is the order of positional arguments in compact chat formats
    assert list(schemas["edit"]["properties"]) == ["path", "line", "text"]
