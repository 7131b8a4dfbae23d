"""The tools of the demo: their JSON schemas, and every text that the model reads from them.

Texts are short, because a model with a small vocabulary and a small context reads them. Generated training transcripts
must match them exactly, so their writers call the same pure functions:

    call                          the model reads
    list()                        render_list(["main.py", "test.py"])       "main.py\\ntest.py"
    read("main.py")               render_read("def f(x):\\n    return x\\n")   "1 def f(x):\\n2     return x"
    write("main.py", "…")         OK                                        "ok"
    edit("main.py", 2, "return 1")  OK, and the file is apply_edit(text, 2, "return 1")
    run()                         render_run(0, b"")                        "ok"
                                  render_run(1, b"fail f(3) = 5 not 7\\n")   "fail f(3) = 5 not 7"
                                  render_run(1, b"Traceback …")             "error NameError line 2"
                                  render_run(-9, b"", stopped="time")       "error time limit"
    done()                        nothing: the episode is over
    anything wrong                one of the ERROR texts below

All of them pass through `cut`, which keeps at most `limit` characters and says how many it left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from rollmill.environments.harnesses.tools import BadToolCall, Tool

OK = "ok"
ERROR_NO_FILE = "error no such file"
ERROR_NO_LINE = "error no such line"
ERROR_DIRECTORY = "error is a directory"
ERROR_DENIED = "error not allowed"
ERROR_TOO_LARGE = "error too large"
ERROR_TIME = "error time limit"
ERROR_MEMORY = "error memory limit"
ERROR_PROCESSES = "error process limit"
ERROR_MACHINE = "error machine lost"

TOOLS: tuple[Tool, ...] = (
    Tool("list", "List the files of the work directory.", {}),
    Tool("read", "Show a file with its lines numbered.", {"path": str}),
    Tool("write", "Create or replace a file.", {"path": str, "content": str}),
    Tool(
        "edit",
        "Replace one numbered line of a file. The line's indentation is kept if the text has none.",
        {"path": str, "line": int, "text": str},
    ),
    Tool("run", "Run the tests.", {}),
    Tool("done", "Hand in the work as it is.", {}),
)
TOOLS_BY_NAME = {tool.name: tool for tool in TOOLS}


def tool_schemas() -> list[dict[str, Any]]:
    return [tool.schema() for tool in TOOLS]


def render_list(paths: Sequence[str]) -> str:
    return "\n".join(sorted(paths)) or "no files"


def render_read(text: str) -> str:
    return "\n".join(f"{number} {line}" for number, line in enumerate(_lines(text), start=1)) or "empty"


def apply_edit(text: str, line: int, replacement: str) -> str:
    """Replace one numbered line of `text`; `replacement` may have several. BadToolCall if there is no such line."""
    lines = _lines(text)
    if not 1 <= line <= len(lines):
        raise BadToolCall(ERROR_NO_LINE)
    old = lines[line - 1]
    if replacement and not replacement[0].isspace():
        replacement = old[: len(old) - len(old.lstrip())] + replacement
    lines[line - 1] = replacement.rstrip("\n")
    return "\n".join(lines) + "\n"


def _lines(text: str) -> list[str]:
    """Split at newlines only. str.splitlines also splits at form feeds and others, and an edit would lose them."""
    return text.removesuffix("\n").split("\n") if text else []


_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):$|^  File \"", re.MULTILINE)
_FRAME_LINE = re.compile(r"^ +File \"[^\"]*\", line (\d+)", re.MULTILINE)
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*)(?::|$)", re.MULTILINE)

_STOPPED = {"time": ERROR_TIME, "memory": ERROR_MEMORY, "processes": ERROR_PROCESSES, "machine": ERROR_MACHINE}


def render_run(
    exit_code: int,
    output: bytes,
    *,
    stopped: Literal["time", "memory", "processes", "machine"] | None = None,
) -> str:
    """The text for a test run. An uncaught exception becomes one short line."""
    text = output.decode("utf-8", "replace").rstrip().lstrip("\n")  # a syntax error begins with spaces
    if stopped is not None:
        reason = _STOPPED[stopped]
        return f"{text}\n{reason}" if text else reason
    if exit_code == 0:
        return text or OK
    if start := _TRACEBACK.search(text):
        text = (text[: start.start()].strip() + "\n" + _short_traceback(text[start.start() :])).strip()
    return text or f"error exit {exit_code}"


def _short_traceback(traceback: str) -> str:
    """`error NameError line 2`: an edit needs the line of the last frame and the name of the exception."""
    lines = _FRAME_LINE.findall(traceback)
    names = _EXCEPTION.findall(traceback)
    name = names[-1].rpartition(".")[2] if names else "exception"
    return f"error {name} line {lines[-1]}" if lines else f"error {name}"
