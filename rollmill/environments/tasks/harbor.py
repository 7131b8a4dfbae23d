"""Harbor and Terminal-Bench task directories, as they are: one folder per task.

    Harbor                      Terminal-Bench
    task.toml                   task.yaml                    limits and metadata
    instruction.md              `instruction` of task.yaml
    environment/Dockerfile      Dockerfile                   built when the first machine of the task starts
    solution/solve.sh           solution.sh                  the reference: a command
    tests/test.sh               run-tests.sh and tests/      decides
    reward.txt or reward.json   its exit code                the verdict

Nothing is rewritten: the machine is the image, with /app, /tests and /logs where they are. An image is built once for
the same Dockerfile, context and variables. Tests run in the state in which the agent left its machine, files alone. If
the task says `environment_mode = "shared"`, or its tests look for a running process, they run in the agent's machine
with its processes, as Harbor does. With "separate" it is a clean machine with the artifacts. Grade with the reward
`harbor`. terminal_bench.py reads the other format.
"""

from __future__ import annotations

import json
import tomllib
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rollmill.environments.task import Needs, Task
from rollmill.environments.tasks.benchmark_folder import (
    HARBOR,
    TERMINAL_BENCH,
    Environment,
    Lenient,
    Network,
    Positive,
    hidden_files,
    host_values,
    look_for_processes,
    promise,
    without_canary,
)
from rollmill.environments.tasks.lines import Parsed, collect, validate
from rollmill.environments.tasks.listed import ListedTasks
from rollmill.environments.tasks.task_directory import folders, read_tree
from rollmill.environments.tasks.task_splits import TaskFileConfig
from rollmill.environments.tasks.terminal_bench import read_terminal_bench
from rollmill.errors import TaskError
from rollmill.machines.oci.build_image import BuildConfig

_RUN = "chmod +x {0}; exec {0}"
_REWARDS = ["/logs/verifier/reward.json", "/logs/verifier/reward.txt"]


class HarborConfig(TaskFileConfig):
    build: BuildConfig = Field(BuildConfig(), description="How the Dockerfiles are built.")


class _Agent(Network):
    timeout_sec: Positive | None = Field(None, description="Its time limit.")
    user: str | int | None = Field(None, description="Whose commands the agent's are.")


class _Verifier(Network):
    timeout_sec: Positive = Field(600.0, description="Its time limit.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables.")
    user: str | int | None = Field(None, description="Whose commands the tests are.")
    environment_mode: Literal["shared", "separate"] | None = Field(None, description="Where the tests run.")
    environment: Environment | None = Field(None, description="Of a machine of their own.")
    collect: tuple[dict[str, Any], ...] = Field((), description="Not supported.")


class _Solution(Lenient):
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables.")


class HarborEntry(Lenient):
    """task.toml, as far as it is used. `metadata` may have anything."""

    metadata: dict[str, Any] = Field(default_factory=dict, description="Anything; difficulty and category become tags.")
    verifier: _Verifier = Field(_Verifier(), description="The tests.")
    agent: _Agent = Field(_Agent(), description="The agent.")
    environment: Environment = Field(Environment(), description="The container.")
    solution: _Solution = Field(_Solution(), description="The reference.")
    artifacts: tuple[str | dict[str, Any], ...] = Field((), description="What separate tests see of the agent's work.")
    steps: tuple[dict[str, Any], ...] = Field((), description="Not supported.")


class HarborTasks(ListedTasks):
    name = "harbor"

    def __init__(self, config: HarborConfig) -> None:
        found = folders(Path(config.path))
        super().__init__(*collect(config, ((str(folder), partial(_read, folder, config.build)) for folder in found)))


def _read(folder: Path, build: BuildConfig) -> Parsed:
    try:
        if (folder / HARBOR).is_file():
            return _read_harbor(folder.absolute(), build), None
        if (folder / TERMINAL_BENCH).is_file():
            return read_terminal_bench(folder.absolute(), build), None
    except OSError as error:
        raise TaskError(f"{error.filename}: {error.strerror}", hint="the file is part of every task") from None
    except UnicodeDecodeError as error:
        raise TaskError(f"not valid: {error}", hint="instructions, settings and scripts are UTF-8") from None
    raise TaskError(f"it has no {HARBOR} and no {TERMINAL_BENCH}", hint="a task is a folder with one of them")


def _read_harbor(folder: Path, build: BuildConfig) -> Task:
    try:
        tree = tomllib.loads((folder / HARBOR).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{HARBOR}: not valid TOML: {error}", hint="correct it") from None
    entry = validate(HarborEntry, json.dumps(tree, default=str))
    _check_supported(folder, entry)
    tests = hidden_files(folder / "tests", "/tests")
    if "/tests/test.sh" not in tests:
        raise TaskError("tests/test.sh: there is none", hint="it runs the tests and writes the reward")
    solution = read_tree(folder / "solution")
    separate = entry.verifier.environment_mode == "separate" or entry.verifier.environment is not None
    grading = {
        "kind": "harbor",
        "verdict": "reward_file",
        "reward_files": _REWARDS,
        "files": tests,
        "command": ["sh", "-c", _RUN.format("/tests/test.sh")],
        "env": host_values(entry.verifier.env, f"{HARBOR}: verifier.env"),
        "timeout_s": entry.verifier.timeout_sec,
        **({"user": "root"} if entry.verifier.user in ("root", 0) else {}),
        **(_separate(folder, entry, build) if separate else {}),
    }
    solve = [f"{name}={value}" for name, value in host_values(entry.solution.env, f"{HARBOR}: solution.env").items()]
    tags: dict[str, str] = {
        name: str(entry.metadata[name]) for name in ("difficulty", "category") if name in entry.metadata
    }
    return Task(
        id=folder.name,
        instruction=without_canary((folder / "instruction.md").read_text(encoding="utf-8")),
        family=tags.get("category", ""),
        image=promise(folder.name, folder / "environment", entry.environment, build, str(entry.agent.user or "")),
        grading=grading,
        reference={f"/solution/{path}": data for path, data in solution.items()},
        reference_command=["env", *solve, "sh", "-c", _RUN.format("/solution/solve.sh")]
        if "solve.sh" in solution
        else [],
        tags=tags,
        timeout_s=entry.agent.timeout_sec,
        needs=_needs(folder, entry),
        processes=not separate and (entry.verifier.environment_mode == "shared" or look_for_processes(tests)),
    )


def _check_supported(folder: Path, entry: HarborEntry) -> None:
    """TaskError names what the task asks for and machines do not have."""
    its, verifier = entry.environment, entry.verifier
    wanted = {
        "steps": bool(entry.steps) or (folder / "steps").is_dir(),
        "environment.gpus": bool(its.gpus),
        "environment.tpu": bool(its.tpu),
        "environment.os": its.os.lower() != "linux",
        "environment.mcp_servers": bool(its.mcp_servers),
        "verifier.collect": bool(verifier.collect),
        "verifier.user": verifier.user not in (None, "root", 0),
        "verifier.network_mode": verifier.network_mode not in (None, its.network_mode),
        "agent.network_mode": entry.agent.network_mode not in (None, its.network_mode),
    }
    for field, asked in wanted.items():
        if asked:
            raise TaskError(f"{HARBOR}: {field} asks for what machines do not have", hint="leave this task out")
    if (folder / "environment" / "docker-compose.yaml").is_file():
        hint = "tasks of several containers are not supported: leave this task out"
        raise TaskError("environment/docker-compose.yaml: it describes containers beside the agent's", hint=hint)


def _separate(folder: Path, entry: HarborEntry, build: BuildConfig) -> dict[str, Any]:
    """Where tests run that have a machine of their own."""
    paths = [each if isinstance(each, str) else str(each.get("source", "")) for each in entry.artifacts]
    own = entry.verifier.environment or entry.environment
    facts: dict[str, Any] = {"separate": True, "artifacts": ["/logs/artifacts", *paths]}
    if (folder / "tests" / "Dockerfile").is_file():
        facts["image"] = promise(f"{folder.name}-tests", folder / "tests", own, build)
    elif entry.verifier.environment is not None:
        facts["image"] = promise(f"{folder.name}-tests", folder / "environment", own, build)
    return facts


def _needs(folder: Path, entry: HarborEntry) -> Needs:
    its = entry.environment
    mode = its.network_mode or ("no-network" if its.allow_internet is False else "public")
    health = its.healthcheck
    return Needs(
        file=str(folder / HARBOR),
        cpus=its.cpus,
        memory_mb=its.memory_mb,
        storage_mb=its.storage_mb,
        network=None if mode == "public" else tuple(its.allowed_hosts),
        health=None if health is None else health.command,
        health_timeout_s=30.0 if health is None else health.timeout_sec,
        health_tries=1 if health is None else health.retries + int(health.start_period_sec // health.interval_sec),
        health_pause_s=5.0 if health is None else health.interval_sec,
    )
