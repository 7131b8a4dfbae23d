"""The clean machine that a submission is graded in. Nothing the agent did to its own machine reaches it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import TypeVar

from rollmill.environments.episode import Episode, Submission
from rollmill.environments.machine import ExecResult, Machine
from rollmill.environments.task import Task
from rollmill.errors import MachineError, TaskError
from rollmill.strict import StrictModel, parse_json

M = TypeVar("M", bound=StrictModel)
_START_S = 20.0  # for a program to start in a machine that nobody has touched
_MAX_OUTPUT = 1000  # characters of what a command printed that stand in the evidence


class DoesNotFit(Exception):
    """The submission cannot be written into a clean machine. It is worth nothing."""


@contextlib.asynccontextmanager
async def clean_machine(
    episode: Episode, grading_files: Mapping[str, bytes], *, program: str
) -> AsyncIterator[Machine]:
    """A machine with the task's files, the submission over them, and the grading files over both.

    TaskError if its image has no `program`, which is checked before the submission is there. DoesNotFit if the
    submission cannot be written, or leaves no room for the grading files.
    """
    task = episode.task
    machine = await episode.machines.create(task.image, {**task.files, **grading_files})
    try:
        await check_program(machine, task, program)
        try:
            for path, data in {**declared(task, episode.submission), **grading_files}.items():
                await machine.write(path, data)
        except OSError as error:
            raise DoesNotFit(str(error)[:_MAX_OUTPUT]) from None
        yield machine
    finally:
        await machine.close()


def declared(task: Task, submission: Submission) -> dict[str, bytes]:
    """What the task declares of a submission. A submitted sitecustomize.py or conftest.py is no part of the answer."""
    return {path: submission[path] for path in task.submission if path in submission}


def read_grading(task: Task, kind: type[M], *, hint: str) -> M:
    """The task's grading, validated as the JSON it would be in a file: a tuple is a list. TaskError if it is wrong."""
    try:
        return parse_json(json.dumps(dict(task.grading)), kind)
    except (TypeError, ValueError, RecursionError) as error:
        raise TaskError(f"task {task.id}: its grading cannot be read: {str(error)[:500]}", hint=hint) from None


async def check_program(machine: Machine, task: Task, program: str) -> None:
    """TaskError if the machine has no `program`. A path is not checked: it may be one of the task's files."""
    if "/" in program:
        return
    result = await machine.exec(["sh", "-c", 'command -v "$1"', "-", program], timeout_s=_START_S)
    if result.stopped is not None:
        raise MachineError(f"grading of {task.id} did not start: stopped by the limit {result.stopped!r}")
    if result.exit_code != 0:
        raise TaskError(
            f"task {task.id}: its image {task.image!r} has no program {program!r}, which grading needs",
            hint="choose another image, or another command",
        )


def evidence_of(result: ExecResult, output: str | None = None) -> dict[str, object]:
    """How a command ended and the end of its output, as bounded text."""
    text = result.output.decode("utf-8", "replace") if output is None else output
    text = text.replace("\0", "\N{REPLACEMENT CHARACTER}").strip()
    return {"exit_code": result.exit_code, "stopped": result.stopped, "output": text[-_MAX_OUTPUT:]}
