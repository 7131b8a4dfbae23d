"""MBPP-style JSONL: `task_id`, `text` or `prompt`, `code`, `test_list`; also `test_setup_code`, `test_imports` and
`challenge_test_list`. The agent writes main.py and sees the first assertion; all of them decide. Other keys are left.
"""

from __future__ import annotations

import ast
from typing import ClassVar

from pydantic import ConfigDict, Field

from rollmill.config import Config
from rollmill.environments.task import Task
from rollmill.environments.tasks.lines import Parsed, read_jsonl, validate
from rollmill.environments.tasks.listed import ListedTasks
from rollmill.environments.tasks.programs import MAIN, parse_python, script_grading
from rollmill.environments.tasks.task_splits import TaskFileConfig
from rollmill.errors import TaskError

_INSTRUCTION = (
    "{text}\n\nWrite it into {main}. The function's name is `{function}`. For example, this holds:\n\n{example}\n"
)


class MbppEntry(Config):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore")

    task_id: int | str = Field(description="The problem's number.")
    text: str = Field("", description="What is asked.")
    prompt: str = Field("", description="What is asked, in the sanitized edition.")
    code: str = Field(min_length=1, description="The reference solution.")
    test_list: tuple[str, ...] = Field(min_length=1, description="Assertions.")
    test_setup_code: str = Field("", description="Runs before the assertions.")
    test_imports: tuple[str, ...] = Field((), description="Import statements that run before the assertions.")
    challenge_test_list: tuple[str, ...] = Field((), description="More assertions.")
    split: str | None = Field(None, description="The split, if the file names one.")


class MbppTasks(ListedTasks):
    name = "mbpp"

    def __init__(self, config: TaskFileConfig) -> None:
        super().__init__(*read_jsonl(config, lambda line: _task(validate(MbppEntry, line))))


def _task(entry: MbppEntry) -> Parsed:
    text = (entry.text or entry.prompt).strip()
    if not text:
        raise TaskError("text: it is missing", hint="the instruction is in `text` or `prompt`")
    tests = [*entry.test_list, *entry.challenge_test_list]
    function = _function(entry)
    checks = "\n".join([entry.test_setup_code, *entry.test_imports, *tests]).replace("\r\n", "\n")
    task = Task(
        id=f"mbpp/{entry.task_id}",
        instruction=_INSTRUCTION.format(text=text, main=MAIN, function=function, example=tests[0]),
        family="mbpp",
        submission=(MAIN,),
        grading=script_grading(checks),
        reference={MAIN: (entry.code.replace("\r\n", "\n").rstrip() + "\n").encode("utf-8", "replace")},
    )
    return task, entry.split


def _function(entry: MbppEntry) -> str:
    """The function that the first assertion calls and `code` defines."""
    try:
        defined = {node.name for node in ast.walk(parse_python(entry.code)) if isinstance(node, ast.FunctionDef)}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TaskError(f"code: it is no Python: {error}", hint="correct it, or remove the problem") from None
    try:
        parsed = parse_python(entry.test_list[0])
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TaskError(f"test_list.0: it is no Python: {error}", hint="correct it, or remove the problem") from None
    names = [node.id for node in ast.walk(parsed) if isinstance(node, ast.Name)]
    found = next((name for name in names if name in defined), None)
    if found is None:
        raise TaskError(
            f"test_list.0 uses no function that `code` defines ({', '.join(sorted(defined)) or 'none'})",
            hint="the first assertion must call the function",
        )
    return found
