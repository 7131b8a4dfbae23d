"""The format of task files as text, made from the classes that read them: for docs/reference and `rollmill config`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module

from pydantic_core import PydanticUndefined

from rollmill.environments.tasks import jsonl
from rollmill.environments.tasks import task_directory as directory
from rollmill.environments.tasks.task_splits import TaskFileConfig

_KINDS = ("calls", "script", "pytest", "logged_tests")  # of grading, and modules of rewards/


def task_files() -> Iterator[str]:
    """Blocks of Markdown."""
    yield "# Task files\n"
    yield (
        "Tasks are written as lines of JSON, as directories, or as a class of your own (`ListedTasks`).\n"
        '`[tasks] kind` chooses: `"jsonl"`, `"directory"` or `"module:Class"`. The guide is\n'
        "[your first task](../guides/your-first-task.md).\n"
    )
    yield "## Fields of a task\n"
    yield "| field | default | what it is |\n| --- | --- | --- |"
    for name, field in jsonl.TaskEntry.model_fields.items():
        default = "needed" if field.default is PydanticUndefined else f"`{_plain(field.default)}`"
        yield f"| `{name}` | {default} | {(field.description or '').replace('|', '/')} |"
    yield ""
    for title, module in (('## `kind = "jsonl"`\n', jsonl), ('## `kind = "directory"`\n', directory)):
        yield title
        yield _fenced(module.__doc__)
    yield "Both kinds have these settings in `[tasks]`:\n"
    for name, field in TaskFileConfig.model_fields.items():
        yield f"- `{name}`: {field.description}"
    yield (
        "\n## Kinds of grading\n\n"
        "`grading.kind` names the reward that grades the task. The run lists the same kind first in `[[rewards]]`.\n"
    )
    for kind in _KINDS:
        yield f"### `{kind}`\n"
        yield _fenced(import_module(f"rollmill.environments.rewards.{kind}").__doc__)


def _plain(default: object) -> str:
    return "not set" if default is None else str(default) if default else '""' if default == "" else "empty"


def _fenced(text: str | None) -> str:
    plain = inspect.cleandoc(text or "").replace("`", "")
    return f"```text\n{plain}\n```\n"
