"""SWE-bench-style JSONL: `instance_id`, `repo`, `base_commit`, `problem_statement`, `patch`, `test_patch`,
`FAIL_TO_PASS`, `PASS_TO_PASS`. Other keys are left.

A task starts with the files of `base_commit`, read from a local clone with their executable bits and symbolic links,
and hands in the whole diff. The reward `pytest` writes the files of `test_patch` over it and runs the named tests. The
reference is `patch`. Tests are named as pytest names them: `file.py::test`.
"""

from __future__ import annotations

import json
import os
import shlex
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, Field, field_validator

from rollmill.config import Config, LocalPath
from rollmill.environments.task import Task, WholeDiff
from rollmill.environments.tasks.git_files import CommitFiles, PatchResult, apply_patch, check_commit, modes_of
from rollmill.environments.tasks.lines import Parsed, read_jsonl, validate
from rollmill.environments.tasks.listed import ListedTasks
from rollmill.environments.tasks.task_splits import TaskFileConfig
from rollmill.errors import TaskError

_INSTRUCTION = "The work directory holds the repository {repo}. Resolve this issue in it:\n\n{problem}\n"


class SweBenchConfig(TaskFileConfig):
    repositories: LocalPath = Field(
        description="Directory with clones of the repositories, as `owner/name`, `owner__name` or `name`."
    )
    image: str = Field("host-python", min_length=1, description="The machine image of repositories not in `images`.")
    images: dict[str, str] = Field(
        {}, description="Machine images by instance or repository: `owner/name` to the name of an image."
    )
    modules_in: tuple[str, ...] = Field(
        (".", "src", "lib"), description="Directories of a repository in which tests find its modules."
    )
    grading_timeout_s: float = Field(300.0, gt=0, description="Seconds that all tests of one submission may take.")


class SweBenchEntry(Config):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore")

    instance_id: str = Field(min_length=1, max_length=200, description="The task's name.")
    repo: str = Field(pattern=r"^[\w.-]+(/[\w.-]+)?$", description="owner/name.")
    base_commit: str = Field(description="The commit that the task starts with.")
    problem_statement: str = Field(min_length=1, description="The issue.")
    patch: str = Field(min_length=1, description="The reference solution.")
    test_patch: str = Field(min_length=1, description="Adds or changes the hidden tests.")
    FAIL_TO_PASS: tuple[str, ...] = Field(min_length=1, description="Tests that must pass now.")
    PASS_TO_PASS: tuple[str, ...] = Field((), description="Tests that must not break.")
    split: str | None = Field(None, description="The split, if the file names one.")

    @field_validator("FAIL_TO_PASS", "PASS_TO_PASS", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        """The data set has these lists as JSON in a string."""
        listed = json.loads(value) if isinstance(value, str) else value
        return tuple(listed) if isinstance(listed, list) else listed

    @field_validator("FAIL_TO_PASS", "PASS_TO_PASS")
    @classmethod
    def _names(cls, tests: tuple[str, ...]) -> tuple[str, ...]:
        strange = next((test for test in tests if "::" not in test), None)
        if strange is not None:
            raise ValueError(f"{strange[:100]!r} is no name of a pytest test, such as file.py::test")
        return tests


class SweBenchTasks(ListedTasks):
    name = "swe_bench"

    def __init__(self, config: SweBenchConfig) -> None:
        super().__init__(*read_jsonl(config, partial(_parse, config)))


def _parse(config: SweBenchConfig, line: bytes) -> Parsed:
    entry = validate(SweBenchEntry, line)
    repository = _clone(Path(config.repositories), entry.repo)
    check_commit(repository, entry.base_commit)
    tests = apply_patch(repository, entry.base_commit, entry.test_patch, "test_patch")
    reference = apply_patch(repository, entry.base_commit, entry.patch, "patch")
    executable, links = modes_of(repository, entry.base_commit)
    task = Task(
        id=entry.instance_id,
        instruction=_INSTRUCTION.format(repo=entry.repo, problem=entry.problem_statement.strip()),
        family=entry.repo,
        image=config.images.get(entry.instance_id, config.images.get(entry.repo, config.image)),
        files=CommitFiles(repository, entry.base_commit),
        executable=executable,
        links=links,
        submission=WholeDiff(),
        grading={
            "kind": "pytest",
            "files": {path: _text(path, data) for path, data in tests.files.items()},
            "FAIL_TO_PASS": list(entry.FAIL_TO_PASS),
            "PASS_TO_PASS": list(entry.PASS_TO_PASS),
            "paths": list(config.modules_in),
            "timeout_s": config.grading_timeout_s,
        },
        reference=reference.files,
        reference_command=["sh", "-c", rest] if (rest := _rest(reference)) else (),
    )
    return task, entry.split


def _rest(patched: PatchResult) -> str:
    """Shell commands for what a patch does besides writing files."""
    commands = [["rm", "-f", "--", *patched.deleted]] if patched.deleted else []
    commands += [["chmod", "a+x", "--", *patched.executable]] if patched.executable else []
    for path, target in patched.links.items():
        commands += [["mkdir", "-p", "--", os.path.dirname(path) or "."], ["ln", "-sfn", "--", target, path]]
    return " && ".join(map(shlex.join, commands))


def _clone(directory: Path, repo: str) -> Path:
    places = [directory / name for name in (repo, repo.replace("/", "__"), repo.rpartition("/")[2])]
    found = next((place for place in [*places, *(Path(f"{place}.git") for place in places)] if place.is_dir()), None)
    if found is None:
        hint = f"clone it: git clone --bare URL {places[1]}"
        raise TaskError(f"repo: {directory} has no clone of {repo!r}", hint=hint)
    return found


def _text(path: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise TaskError(f"test_patch: {path} is not UTF-8", hint="hidden test files are text") from None
