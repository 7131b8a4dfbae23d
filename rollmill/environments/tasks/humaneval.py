"""HumanEval-style JSONL: `task_id`, `prompt`, `canonical_solution`, `test`, `entry_point`. main.py holds the prompt (a
function without a body) and the agent completes it; `check(entry_point)` of `test` decides. Other keys are ignored.
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

_INSTRUCTION = "Complete the function `{function}` in {main}:\n\n{prompt}"


class HumanEvalEntry(Config):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore")

    task_id: int | str = Field(description="The problem's name.")
    prompt: str = Field(min_length=1, description="The function's head and docstring, with what it needs above it.")
    canonical_solution: str = Field(min_length=1, description="The function's body.")
    test: str = Field(min_length=1, description="Python that defines `check(candidate)`.")
    entry_point: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="The function's name.")
    split: str | None = Field(None, description="The split, if the file names one.")


class HumanEvalTasks(ListedTasks):
    name = "humaneval"

    def __init__(self, config: TaskFileConfig) -> None:
        super().__init__(*read_jsonl(config, lambda line: _task(validate(HumanEvalEntry, line))))


def _task(entry: HumanEvalEntry) -> Parsed:
    solution = entry.prompt + entry.canonical_solution
    _check_python("prompt and canonical_solution", solution, entry.entry_point)
    _check_python("test", entry.test, "check")
    name = str(entry.task_id)
    task = Task(
        id=name if "/" in name else f"humaneval/{name}",
        instruction=_INSTRUCTION.format(function=entry.entry_point, main=MAIN, prompt=entry.prompt),
        family="humaneval",
        files={MAIN: entry.prompt.encode("utf-8", "replace")},
        submission=(MAIN,),
        grading=script_grading(f"{entry.test}\n\ncheck({entry.entry_point})"),
        reference={MAIN: solution.encode("utf-8", "replace")},
    )
    return task, entry.split


def _check_python(field: str, source: str, function: str) -> None:
    try:
        names = {node.name for node in ast.walk(parse_python(source)) if isinstance(node, ast.FunctionDef)}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TaskError(f"{field}: no Python: {error}", hint="correct it, or remove the problem") from None
    if function not in names:
        raise TaskError(f"{field}: defines no function {function!r}", hint="see `entry_point`; `test` defines `check`")
