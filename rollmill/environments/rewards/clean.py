"""The clean machine that a submission is graded in. Nothing the agent did to its own machine reaches it."""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import PurePosixPath
from typing import TypeVar

from rollmill.environments.episode import Episode
from rollmill.environments.task import Task, WholeDiff
from rollmill.environments.task_machine import create_machine, for_all, make_links, write_over
from rollmill.errors import MachineError, TaskError
from rollmill.machines.machine import ExecResult, Machine
from rollmill.strict import StrictModel, parse_json

M = TypeVar("M", bound=StrictModel)
_START_S = 20.0  # for a program to start in a machine that nobody has touched
_MAX_OUTPUT = 1000  # characters of what a command printed that stand in the evidence
_PYTHON = ("python", "python3")
# Python and pytest run these files unasked. In a whole diff they are no part of the answer.
_HOOKS = frozenset({"conftest.py", "sitecustomize.py", "usercustomize.py", "pytest.ini"})

# Each can name plugins of pytest
_PINNED = frozenset({"setup.cfg", "tox.ini", "pyproject.toml", ".pytest.ini", "pytest.toml", ".pytest.toml"})
UNASKED = _HOOKS | _PINNED


class DoesNotFit(Exception):
    """The submission was refused, or cannot be written into a clean machine. It is worth nothing."""


@contextlib.asynccontextmanager
async def clean_machine(
    episode: Episode, grading_files: Mapping[str, bytes], *, program: str | None, pinned: bool = False
) -> AsyncIterator[Machine]:
    """A machine with the task's files, the submission over them, and the grading files over both.

    TaskError if its image has no `program`, which is checked before the submission is there; None: the caller checks
    it by `check_image`. With `pinned`, configuration that loads code stays as the task has it.
    DoesNotFit if the submission was refused, cannot be written, or leaves no room for the grading files.
    """
    task = episode.task
    if episode.refused is not None:
        raise DoesNotFit(episode.refused[:_MAX_OUTPUT])
    machine = await create_machine(episode.machines, task, grading_files)
    try:
        if program is not None:
            await check_program(machine, task, program)
        try:
            await _apply(machine, episode, _PINNED if pinned else frozenset())
            await write_over(machine, grading_files, {*task.links, *episode.links}, DoesNotFit)
        except OSError as error:
            raise DoesNotFit(str(error)[:_MAX_OUTPUT]) from None
        yield machine
    finally:
        await machine.close()


async def _apply(machine: Machine, episode: Episode, pinned: frozenset[str]) -> None:
    def unpinned(paths: Iterable[str]) -> list[str]:
        return [path for path in paths if PurePosixPath(path).name not in pinned]

    given = declared(episode)
    files = {path: given[path] for path in unpinned(given)}
    if not isinstance(episode.task.submission, WholeDiff):
        for path, data in files.items():
            await machine.write(path, data)
        return
    links = {path: episode.links[path] for path in unpinned(_answers(episode.links))}
    deleted = unpinned(_answers(episode.deleted))
    # a file may stand where a directory was: it is empty now, since all its files are deleted
    parents = {str(parent) for path in deleted for parent in PurePosixPath(path).parents}
    replaced = [*(parents & files.keys()), *(episode.task.links.keys() & files.keys()), *links]
    await for_all(machine, ["rm", "-rf", "--"], [*deleted, *replaced], DoesNotFit)
    for path, data in files.items():
        await machine.write(path, data)
    for mode, paths in (("a-x", episode.task.executable), ("a+x", episode.executable)):
        await for_all(machine, ["chmod", mode, "--"], [path for path in paths if path in files], DoesNotFit)
    await make_links(machine, links, DoesNotFit)


def declared(episode: Episode) -> dict[str, bytes]:
    """The part of a submission that is graded: of named paths, only these; of a whole diff, all but the files that
    Python or pytest would run unasked. A submitted sitecustomize.py or conftest.py is no part of the answer."""
    given = episode.submission
    paths = _answers(given) if isinstance(episode.task.submission, WholeDiff) else episode.task.paths
    return {path: given[path] for path in paths if path in given}


def _answers(paths: Iterable[str]) -> list[str]:
    return [path for path in paths if PurePosixPath(path).name not in _HOOKS and not path.endswith(".pth")]


def read_grading(task: Task, kind: type[M], *, hint: str) -> M:
    """The task's grading, validated as the JSON it would be in a file: a tuple is a list. TaskError if it is wrong.

    Fields of other names are for other rewards, unless they look like a slip of one of ours.
    """
    own = {name: value for name, value in task.grading.items() if name in kind.model_fields}
    for name in task.grading.keys() - own.keys():
        if near := difflib.get_close_matches(str(name), kind.model_fields, n=1, cutoff=0.75):
            raise TaskError(f"task {task.id}: grading has an unknown field {name!r}", hint=f"is it {near[0]!r}?")
    try:
        return parse_json(json.dumps(own), kind)
    except (TypeError, ValueError, RecursionError) as error:
        raise TaskError(f"task {task.id}: its grading cannot be read: {str(error)[:500]}", hint=hint) from None


async def check_image(episode: Episode, program: str) -> None:
    """As `check_program`, in a machine of its own that no submitted code has touched."""
    machine = await create_machine(episode.machines, episode.task)
    try:
        await check_program(machine, episode.task, program)
    finally:
        await machine.close()


async def check_program(machine: Machine, task: Task, program: str) -> None:
    """TaskError if the machine has no `program`, MachineError if it cannot run one.

    Python is started: if it were broken, every submission would fail. A path is not checked: it may be one of the
    task's files.
    """
    if "/" in program:
        return
    limit_s = _START_S * machine.capabilities.slowdown
    if program in _PYTHON:
        found = await machine.exec([program, "-c", "print('here')"], cwd="/", timeout_s=limit_s)
    else:
        ask = 'if command -v "$1" > /dev/null; then echo here; else exit 127; fi'
        found = await machine.exec(["sh", "-c", ask, "-", program], cwd="/", timeout_s=limit_s)
    if found.exit_code == 127 and found.stopped is None:
        raise TaskError(
            f"task {task.id}: its image {task.image!r} has no program {program!r}, which grading needs",
            hint="choose another image, or another command",
        )
    if found.output.decode("utf-8", "replace").strip() != "here":
        why = f"stopped by the limit {found.stopped!r}" if found.stopped else f"exit code {found.exit_code}"
        raise MachineError(f"grading of {task.id} did not start: {why}, {found.output[-500:]!r}")


def evidence_of(result: ExecResult, output: str | None = None) -> dict[str, object]:
    """How a command ended and the end of its output, as bounded text."""
    text = result.output.decode("utf-8", "replace") if output is None else output
    text = text.replace("\0", "\N{REPLACEMENT CHARACTER}").strip()
    return {"exit_code": result.exit_code, "stopped": result.stopped, "output": text[-_MAX_OUTPUT:]}
