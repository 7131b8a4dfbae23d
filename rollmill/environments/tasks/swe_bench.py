"""SWE-bench-style JSONL: `instance_id`, `repo`, `base_commit`, `problem_statement`, `patch`, `test_patch`,
`FAIL_TO_PASS`, `PASS_TO_PASS`. Other keys are left.

A task starts with the files of `base_commit`, read from a local clone with their executable bits and symbolic links;
without `repositories` the repository is the work directory of the machine image, which the instance may name as `image`
(or `docker_image`). The whole diff is handed in, and the reference is `patch`.

Without a test command the reward `pytest` writes the files of `test_patch` over it and runs the named tests: as
`file.py::test`. It reads verdicts where submitted code cannot write, so prefer it. With a test command, of all
instances or an instance's own (`test_command`, `log_parser`), the reward `logged_tests` runs that, and tests are named
as the tool prints them.
"""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import AliasChoices, ConfigDict, Field, field_validator

from rollmill.config import Config, LocalPath
from rollmill.environments.task import Task, WholeDiff
from rollmill.environments.tasks.git_files import (
    CommitFiles,
    PatchResult,
    apply_patch,
    check_commit,
    modes_of,
    paths_of,
)
from rollmill.environments.tasks.lines import Parsed, read_jsonl, validate
from rollmill.environments.tasks.listed import ListedTasks
from rollmill.environments.tasks.task_splits import TaskFileConfig
from rollmill.errors import TaskError

_REFERENCE = "/tmp/reference.patch"  # noqa: S108  of a machine
_INSTRUCTION = "The work directory holds the repository {repo}. Resolve this issue in it:\n\n{problem}\n"


class SweBenchConfig(TaskFileConfig):
    repositories: LocalPath | None = Field(
        None,
        description="Directory with clones of the repositories, as `owner/name`, `owner__name` or `name`. Not set: the "
        "repository is the work directory of the image.",
    )
    image: str = Field(
        "host-python",
        min_length=1,
        description="The machine image of instances that name none, and are not in `images`. `{instance_id}` and "
        "`{repo}` (as `owner__name`) are replaced: `oci:registry.example/{instance_id}:latest`.",
    )
    images: dict[str, str] = Field(
        {}, description="Machine images by instance or repository: `owner/name` to the name of an image."
    )
    modules_in: tuple[str, ...] = Field(
        (".", "src", "lib"), description="Directories of a repository in which tests find its modules."
    )
    test_command: str = Field(
        "",
        description="Runs the tests, by `sh -c`, for the reward `logged_tests`. `{test_files}` are those of the test "
        "patch. Empty: the reward `pytest`.",
    )
    log_parser: str = Field(
        "pytest",
        description='What reads the output of the test command: "pytest", "unittest", "jest", "go", or a name of '
        "the reward's `log_parsers`.",
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
    image: str | None = Field(
        None, validation_alias=AliasChoices("image", "docker_image"), description="Its machine image."
    )
    test_command: str | None = Field(None, description="Instead of that of all instances.")
    log_parser: str | None = Field(None, description="Instead of that of all instances.")

    @field_validator("FAIL_TO_PASS", "PASS_TO_PASS", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        """The data set has these lists as JSON in a string."""
        listed = json.loads(value) if isinstance(value, str) else value
        return tuple(listed) if isinstance(listed, list) else listed


class SweBenchTasks(ListedTasks):
    name = "swe_bench"

    def __init__(self, config: SweBenchConfig) -> None:
        super().__init__(*read_jsonl(config, partial(_parse, config)))


def _parse(config: SweBenchConfig, line: bytes) -> Parsed:
    entry = validate(SweBenchEntry, line)
    start = _in_image(entry) if config.repositories is None else _in_clone(entry, Path(config.repositories))
    named = {"instance_id": entry.instance_id, "repo": entry.repo.replace("/", "__")}
    image = config.images.get(entry.instance_id, config.images.get(entry.repo, entry.image or config.image))
    for name, value in named.items():
        image = image.replace(f"{{{name}}}", value)
    task = Task(
        id=entry.instance_id,
        instruction=_INSTRUCTION.format(repo=entry.repo, problem=entry.problem_statement.strip()),
        family=entry.repo,
        image=image,
        submission=WholeDiff(),
        **start,
    )
    return replace(task, grading={**task.grading, **_grading(config, entry)}), entry.split


def _in_clone(entry: SweBenchEntry, repositories: Path) -> dict[str, Any]:
    repository = _clone(repositories, entry.repo)
    check_commit(repository, entry.base_commit)
    tests = apply_patch(repository, entry.base_commit, entry.test_patch, "test_patch")
    reference = apply_patch(repository, entry.base_commit, entry.patch, "patch")
    executable, links = modes_of(repository, entry.base_commit)
    return {
        "files": CommitFiles(repository, entry.base_commit),
        "executable": executable,
        "links": links,
        "grading": {"files": {path: _text(path, data) for path, data in tests.files.items()}},
        "reference": reference.files,
        "reference_command": ["sh", "-c", rest] if (rest := _rest(reference)) else (),
    }


def _in_image(entry: SweBenchEntry) -> dict[str, Any]:
    """Patches are applied in machines: the test patch by the reward, and the reference by the image's git."""
    for field, patch in (("test_patch", entry.test_patch), ("patch", entry.patch)):
        paths_of(patch, field)
    return {
        "grading": {"patch": entry.test_patch},
        "reference": {_REFERENCE: entry.patch.encode()},
        "reference_command": ["git", "apply", "--whitespace=nowarn", _REFERENCE],
    }


def _grading(config: SweBenchConfig, entry: SweBenchEntry) -> dict[str, Any]:
    lists = {"FAIL_TO_PASS": list(entry.FAIL_TO_PASS), "PASS_TO_PASS": list(entry.PASS_TO_PASS)}
    command = entry.test_command or config.test_command
    common = {**lists, "timeout_s": config.grading_timeout_s}
    if command:
        files = shlex.join(paths_of(entry.test_patch, "test_patch"))
        argv = ["sh", "-c", command.replace("{test_files}", files)]
        return {"kind": "logged_tests", "command": argv, "log_parser": entry.log_parser or config.log_parser, **common}
    if config.repositories is None:
        raise TaskError("test_command: there is none", hint="a repository in an image needs one; or set `repositories`")
    for field, tests in lists.items():
        strange = next((test for test in tests if "::" not in test), None)
        if strange is not None:
            hint = "tests of other tools need a `test_command`"
            raise TaskError(f"{field}: {strange[:100]!r} is no name of a pytest test, such as file.py::test", hint=hint)
    return {"kind": "pytest", "paths": list(config.modules_in), **common}


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
