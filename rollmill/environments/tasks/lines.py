"""A JSONL file of tasks as a stream. A bad line becomes a problem with its place and remedy; the others are read."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from pydantic import ValidationError

from rollmill.config import Config, explain_problems
from rollmill.environments.task import Task
from rollmill.environments.tasks.task_splits import Splits, TaskFileConfig
from rollmill.errors import TaskError
from rollmill.storage.fetched import local_path
from rollmill.storage.parquet import PARQUET, json_lines

MAX_LINE = 1 << 26  # bytes
_MAX_PROBLEM = 1000  # characters
R = TypeVar("R", bound=Config)
Parsed = tuple[Task, str | None]  # a task, and the split that it names itself


def read_jsonl(config: TaskFileConfig, parse: Callable[[bytes], Parsed]) -> tuple[list[Task], list[str]]:
    """The tasks of a file and its problems."""
    path = Path(local_path(config.path))
    with open_lines(path) as file:
        lines = lines_of(file)
        return collect(config, ((f"{path}:{number}", partial(_parse, parse, line)) for number, _, line in lines))


def collect(
    config: TaskFileConfig, sources: Iterable[tuple[str, Callable[[], Parsed]]]
) -> tuple[list[Task], list[str]]:
    """The tasks of `sources` with their splits, and a problem for each that cannot be used."""
    splits = Splits(config)
    tasks: dict[str, Task] = {}
    places: dict[str, str] = {}
    problems: list[str] = []
    for place, read in sources:
        try:
            task, own = read()
            if task.id in places:
                hint = "give one of them another id"
                raise TaskError(f"task {task.id!r} is also at {places[task.id]}", hint=hint)
            places[task.id] = place
            tasks[task.id] = replace(task, split=splits.split_of(task.id, own))
        except TaskError as error:
            problems.append(problem_at(f"{place}: ", error))
    return list(tasks.values()), [*problems, *splits.unmet()]


def problem_at(place: str, error: TaskError) -> str:
    """The error as one line of `problems`."""
    text = f"{place}{error.message}" + (f"; {error.hint}" if error.hint else "")
    return text if len(text) <= _MAX_PROBLEM else f"{text[:_MAX_PROBLEM]} …"


def validate(model: type[R], data: bytes | str) -> R:
    """JSON as a `model`. TaskError names the field; an unknown key gets the nearest valid one."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        if first["type"] == "json_invalid":
            raise TaskError(f"not valid JSON: {first['msg']}", hint="each line is one JSON object") from None
        hint = "`rollmill config task-files` describes the format"
        raise TaskError(explain_problems(model, error), hint=hint) from None
    except RecursionError:
        raise TaskError("nested too deep", hint="a task is a flat object") from None


def open_lines(path: Path) -> BinaryIO:
    """The lines of a JSONL file; those of a Parquet file are written to a file without a name."""
    try:
        if path.suffix != PARQUET:
            return path.open("rb")
        path.open("rb").close()
        lines = tempfile.TemporaryFile()  # noqa: SIM115
        lines.writelines(json_lines(str(path)))
        lines.seek(0)
        return lines
    except ValueError as error:
        raise TaskError(f"the task file {path} is no whole Parquet file: {error}", hint="load it again") from None
    except OSError as error:
        hint = "`path` in [tasks] is relative to the directory of the configuration"
        raise TaskError(f"the task file {path} cannot be read: {error.strerror}", hint=hint) from None


def lines_of(file: BinaryIO) -> Iterator[tuple[int, int, bytes | None]]:
    """Number, start in bytes and text of each line; None for one that is too long. Blank lines are skipped."""
    number = start = 0
    while line := file.readline(MAX_LINE):
        number, begun, start = number + 1, start, start + len(line)
        if len(line) == MAX_LINE and not line.endswith(b"\n"):
            while rest := file.readline(MAX_LINE):
                start += len(rest)
                if rest.endswith(b"\n"):
                    break
            yield number, begun, None
        elif line.strip():
            yield number, begun, line


def bounded(line: bytes | None) -> bytes:
    if line is None:
        raise TaskError(f"longer than {MAX_LINE >> 20} MiB", hint="put large files into an image, or use a directory")
    return line


def _parse(parse: Callable[[bytes], Parsed], line: bytes | None) -> Parsed:
    return parse(bounded(line))
