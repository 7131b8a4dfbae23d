"""Harbor and Terminal-Bench task directories: one folder per task.

    Harbor                      Terminal-Bench
    task.toml                   task.yaml                    limits and metadata
    instruction.md              `instruction` of task.yaml
    environment/Dockerfile      Dockerfile                   mapped to a named machine image by `images`; not built
    solution/solve.sh           solution.sh                  the reference: a command
    tests/test.sh               run-tests.sh and tests/      decides, in a clean machine
    reward.txt or reward.json   its exit code                the verdict

The whole diff of the work directory is handed in. Files that the Dockerfile copies into its WORKDIR are the task's
files. In instruction, tests and solution, paths are rewritten: WORKDIR to /work; /tests, /solution and /logs to /tmp.
Tasks whose result is outside the work directory, or whose tests need a network, do not work: `rollmill tasks check`
says so, because their reference fails. Grade with the reward `script`.
"""

from __future__ import annotations

import base64
import json
import re
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, Field

from rollmill.config import Config
from rollmill.environments.task import Task, WholeDiff
from rollmill.environments.tasks.dockerfile import Dockerfile, read_dockerfile
from rollmill.environments.tasks.lines import Parsed, collect, validate
from rollmill.environments.tasks.listed import ListedTasks
from rollmill.environments.tasks.task_directory import folders, read_tree
from rollmill.environments.tasks.task_splits import TaskFileConfig
from rollmill.errors import TaskError
from rollmill.machines.machine import WORK

HARBOR, TERMINAL_BENCH = "task.toml", "task.yaml"
_TESTS, _SOLUTION, _LOGS = "/tmp/tests", "/tmp/solution", "/tmp/logs"  # noqa: S108  in a machine
MOVED = {"/tests": _TESTS, "/solution": _SOLUTION, "/oracle": _SOLUTION, "/logs": _LOGS}
_REWARDS = [f"{_LOGS}/verifier/reward.txt", f"{_LOGS}/verifier/reward.json"]


class HarborConfig(TaskFileConfig):
    images: dict[str, str] = Field(
        {},
        description="Which machine image stands for a Docker image: the name after FROM (or `docker_image`), or the "
        "name of a task, to the name of a machine image. Whatever the Dockerfile runs must be in that image.",
    )


class _Lenient(Config):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore")


class _Limit(_Lenient):
    timeout_sec: float | None = Field(None, gt=0, allow_inf_nan=False, description="Its time limit.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables.")


class _Environment(_Lenient):
    docker_image: str | None = Field(None, description="A prebuilt image, instead of a Dockerfile.")
    workdir: str | None = Field(None, description="The work directory, if no Dockerfile names one.")


class _Solution(_Lenient):
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables.")


class HarborEntry(_Lenient):
    """task.toml, as far as it is used. `metadata` may have anything."""

    metadata: dict[str, Any] = Field(default_factory=dict, description="Anything; difficulty and category become tags.")
    verifier: _Limit = Field(_Limit(), description="The tests.")
    agent: _Limit = Field(_Limit(), description="The agent.")
    environment: _Environment = Field(_Environment(), description="The container.")
    solution: _Solution = Field(_Solution(), description="The reference.")


class TerminalBenchEntry(_Lenient):
    """task.yaml, as far as it is used."""

    instruction: str = Field(min_length=1, description="What is asked.")
    difficulty: str = Field("", description="A tag.")
    category: str = Field("", description="A tag, and the family.")
    max_agent_timeout_sec: float | None = Field(None, gt=0, allow_inf_nan=False, description="Limit of an episode.")
    max_test_timeout_sec: float | None = Field(None, gt=0, allow_inf_nan=False, description="Limit of the tests.")


class HarborTasks(ListedTasks):
    name = "harbor"

    def __init__(self, config: HarborConfig) -> None:
        found = folders(Path(config.path))
        super().__init__(*collect(config, ((str(folder), partial(_read, folder, config.images)) for folder in found)))


def _read(folder: Path, images: Mapping[str, str]) -> Parsed:
    try:
        if (folder / HARBOR).is_file():
            return _read_harbor(folder, images), None
        if (folder / TERMINAL_BENCH).is_file():
            return _read_terminal_bench(folder, images), None
    except OSError as error:
        raise TaskError(f"{error.filename}: {error.strerror}", hint="the file is part of every task") from None
    except UnicodeDecodeError as error:
        raise TaskError(f"not valid: {error}", hint="instructions, settings and scripts are UTF-8") from None
    raise TaskError(f"it has no {HARBOR} and no {TERMINAL_BENCH}", hint="a task is a folder with one of them")


def _read_harbor(folder: Path, images: Mapping[str, str]) -> Task:
    try:
        tree = tomllib.loads((folder / HARBOR).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{HARBOR}: not valid TOML: {error}", hint="correct it") from None
    entry = validate(HarborEntry, json.dumps(tree, default=str))
    if (folder / "steps").is_dir():
        raise TaskError("steps/: tasks of several steps are not supported", hint="make a task of each step")
    docker = _environment(folder / "environment" / "Dockerfile", entry.environment)
    moved = {docker.workdir: WORK, **MOVED}
    tests = _script_of(folder / "tests", "test.sh", moved)
    solution = read_tree(folder / "solution")
    grading = {
        "verdict": "reward_file",
        "command": ["bash", f"{_TESTS}/test.sh"],
        "reward_files": _REWARDS,
        "env": {name: rewrite(value, moved) for name, value in entry.verifier.env.items()},
        "timeout_s": entry.verifier.timeout_sec,
    }
    return _task(
        folder,
        docker,
        images,
        {**grading, "files": {**tests, f"{_LOGS}/verifier/README": "The reward is written here.\n"}},
        instruction=_instruction((folder / "instruction.md").read_text(encoding="utf-8"), moved),
        reference={f"{_SOLUTION}/{path}": rewrite_bytes(data, moved) for path, data in solution.items()},
        reference_command=_solve(entry.solution.env, moved) if "solve.sh" in solution else [],
        tags={name: str(entry.metadata[name]) for name in ("difficulty", "category") if name in entry.metadata},
        timeout_s=entry.agent.timeout_sec,
    )


def _solve(env: Mapping[str, str], moved: Mapping[str, str]) -> list[str]:
    variables = [f"{name}={rewrite(value, moved)}" for name, value in env.items()]
    return [*(["env", *variables] if variables else []), "bash", f"{_SOLUTION}/solve.sh"]


def _read_terminal_bench(folder: Path, images: Mapping[str, str]) -> Task:
    import yaml

    try:
        tree = yaml.safe_load((folder / TERMINAL_BENCH).read_text(encoding="utf-8"))
        entry = validate(TerminalBenchEntry, json.dumps(tree, default=str))
    except yaml.YAMLError as error:
        where = f"{TERMINAL_BENCH}: not valid YAML: {str(error)[:300]}"
        raise TaskError(where, hint="correct it") from None
    docker = _environment(folder / "Dockerfile", _Environment())
    moved = {docker.workdir: WORK, **MOVED}
    tests = _script_of(folder / "tests", None, moved)
    run_tests = rewrite((folder / "run-tests.sh").read_text(encoding="utf-8"), moved)
    grading = {
        "command": ["bash", f"{_TESTS}/run-tests.sh"],
        "files": {**tests, f"{_TESTS}/run-tests.sh": run_tests},
        "env": {"TEST_DIR": _TESTS},
        "timeout_s": entry.max_test_timeout_sec,
    }
    script = folder / "solution.sh"
    solution = {f"{_SOLUTION}/solution.sh": rewrite_bytes(script.read_bytes(), moved)} if script.is_file() else {}
    tags = {"difficulty": entry.difficulty, "category": entry.category}
    return _task(
        folder,
        docker,
        images,
        grading,
        instruction=_instruction(entry.instruction, moved),
        reference=solution,
        reference_command=["bash", *solution] if solution else [],
        tags={name: text for name, text in tags.items() if text},
        timeout_s=entry.max_agent_timeout_sec,
    )


def _task(folder: Path, docker: Dockerfile, images: Mapping[str, str], grading: dict[str, Any], **facts: Any) -> Task:
    """The task of a folder. `facts`: its instruction, reference, reference_command, tags and timeout_s."""
    files, image = _start(folder.name, docker, images)
    return Task(
        id=folder.name,
        family=facts["tags"].get("category", ""),
        image=image,
        files=files,
        submission=WholeDiff(),
        grading={"kind": "script", **{key: value for key, value in grading.items() if value is not None}},
        **facts,
    )


def _environment(path: Path, given: _Environment) -> Dockerfile:
    workdir = given.workdir or "/app"
    if path.is_file():
        return read_dockerfile(path, workdir)
    if given.docker_image is not None:
        return Dockerfile(given.docker_image, workdir)
    raise TaskError(f"{path}: there is none", hint="tasks of several containers (docker-compose) are not supported")


def _start(name: str, docker: Dockerfile, images: Mapping[str, str]) -> tuple[dict[str, bytes], str]:
    """The files in the work directory at the start, and the machine image."""
    image = images.get(name, images.get(docker.base))
    if image is None:
        raise TaskError(
            f"its Dockerfile starts FROM {docker.base!r}, which is mapped to no machine image",
            hint=f'[tasks] images = {{"{docker.base}" = "host-python"}}, or "{name}" for this task alone',
        )
    if docker.outside and name not in images:
        raise TaskError(
            f"its Dockerfile copies files to {docker.outside[0]}, outside of its work directory {docker.workdir}",
            hint=f'put them into a machine image of this task: [tasks] images = {{"{name}" = "NAME"}}',
        )
    return {path: source.read_bytes() for path, source in docker.files.items()}, image


def _script_of(tests: Path, script: str | None, moved: Mapping[str, str]) -> dict[str, Any]:
    """The hidden files, as grading has them: text, or base64."""
    found = read_tree(tests)
    if script is not None and script not in found:
        raise TaskError(f"tests/{script}: there is none", hint="it runs the tests and writes the reward")
    files: dict[str, Any] = {}
    for path, data in found.items():
        try:
            files[f"{_TESTS}/{path}"] = rewrite(data.decode("utf-8"), moved)
        except UnicodeDecodeError:
            files[f"{_TESTS}/{path}"] = {"base64": base64.b64encode(data).decode()}
    return files


def _instruction(text: str, moved: Mapping[str, str]) -> str:
    """Without the canary that datasets put above it."""
    lines = text.splitlines()
    while lines and ("canary" in lines[0].lower() or not lines[0].strip()):
        lines.pop(0)
    if not lines:
        raise TaskError("the instruction is empty", hint="say what the agent is asked")
    return rewrite("\n".join(lines).strip(), moved)


def rewrite(text: str, moved: Mapping[str, str]) -> str:
    """Text with the paths of the container replaced by those of a machine: whole path components only."""
    names = sorted((name for name in moved if name != "/"), key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w/.~$}}-])({'|'.join(map(re.escape, names))})(?![\w-])")
    return pattern.sub(lambda found: moved[found[1]], text)


def rewrite_bytes(data: bytes, moved: Mapping[str, str]) -> bytes:
    try:
        return rewrite(data.decode("utf-8"), moved).encode()
    except UnicodeDecodeError:
        return data
