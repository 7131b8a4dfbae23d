"""Harbor and Terminal-Bench task directories, as they are: one folder per task.

    Harbor                      Terminal-Bench
    task.toml                   task.yaml                    limits and metadata
    instruction.md              `instruction` of task.yaml
    environment/Dockerfile      Dockerfile                   built when the first machine of the task starts
    solution/solve.sh           solution.sh                  the reference: a command
    tests/test.sh               run-tests.sh and tests/      decides
    reward.txt or reward.json   its exit code                the verdict

Nothing is rewritten: the machine is the image, with /app, /tests and /logs where they are. An image is built once for
the same Dockerfile, context and variables. Tests run in the state in which the agent left its machine, files alone, or
as the task says in a clean machine with its artifacts (`environment_mode = "separate"`). Grade with the reward
`harbor`. terminal_bench.py reads the other format.
"""

from __future__ import annotations

import base64
import json
import re
import tomllib
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from rollmill.config import Config
from rollmill.environments.task import Needs, Task
from rollmill.environments.tasks.lines import Parsed, collect, validate
from rollmill.environments.tasks.listed import ListedTasks
from rollmill.environments.tasks.task_directory import folders, read_tree
from rollmill.environments.tasks.task_splits import TaskFileConfig
from rollmill.errors import TaskError
from rollmill.machines.images.image import images_directory
from rollmill.machines.oci.build_image import BuildConfig, Recipe, content_of, read_text
from rollmill.machines.oci.kept_images import Kept

HARBOR, TERMINAL_BENCH = "task.toml", "task.yaml"
_RUN = "chmod +x {0}; exec {0}"
_REWARDS = ["/logs/verifier/reward.json", "/logs/verifier/reward.txt"]
_HOST_VALUE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class HarborConfig(TaskFileConfig):
    build: BuildConfig = Field(BuildConfig(), description="How the Dockerfiles are built.")


class Lenient(Config):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore")


class _Network(Lenient):
    network_mode: Literal["no-network", "public", "allowlist"] | None = Field(None, description="What is reached.")
    allowed_hosts: tuple[str, ...] = Field((), description="Names that may be reached.")


class _Healthcheck(Lenient):
    command: str = Field(description="A shell command that passes when the machine is ready.")
    interval_sec: float = Field(5.0, ge=0, description="Seconds between two tries.")
    timeout_sec: float = Field(30.0, gt=0, description="Seconds of one try.")
    start_period_sec: float = Field(0.0, ge=0, description="Seconds in which failures do not count.")
    retries: int = Field(3, ge=1, description="Failures that count until it is given up.")


class Environment(_Network):
    docker_image: str | None = Field(None, description="A prebuilt image, instead of a Dockerfile.")
    workdir: str | None = Field(None, description="The work directory instead of the image's.")
    build_timeout_sec: _Positive | None = Field(None, description="Limit of building its image.")
    cpus: _Positive | None = Field(None, description="Processors.")
    memory_mb: int | None = Field(None, gt=0, description="Memory.")
    storage_mb: int | None = Field(None, gt=0, description="Disk.")
    gpus: int | None = Field(None, description="GPUs: machines have none.")
    tpu: dict[str, Any] | None = Field(None, description="TPUs: machines have none.")
    os: str = Field("linux", description="The operating system.")
    allow_internet: bool | None = Field(None, description="An older form of network_mode.")
    mcp_servers: tuple[dict[str, Any], ...] = Field((), description="Not supported.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables.")
    healthcheck: _Healthcheck | None = Field(None, description="When the machine is ready.")


class _Agent(_Network):
    timeout_sec: _Positive | None = Field(None, description="Its time limit.")
    user: str | int | None = Field(None, description="Whose commands the agent's are.")


class _Verifier(_Network):
    timeout_sec: _Positive = Field(600.0, description="Its time limit.")
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
    from rollmill.environments.tasks.terminal_bench import read_terminal_bench

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


def promise(name: str, context: Path, its: Environment, build: BuildConfig, user: str = "") -> str:
    """The name of the image that is built from a folder when it is first needed. TaskError: it has no Dockerfile."""
    dockerfile = context / "Dockerfile"
    if dockerfile.is_file():
        text = read_text(dockerfile)
    elif its.docker_image:
        text, dockerfile = f"FROM {its.docker_image}\n", context.parent / HARBOR
    else:
        hint = "it needs a Dockerfile there, or `docker_image` in [environment] of task.toml"
        raise TaskError(f"{dockerfile}: there is none", hint=hint)
    text += f"\nUSER {user}\n" if user else ""
    limit_s = its.build_timeout_sec or build.timeout_s
    recipe = Recipe(
        dockerfile=dockerfile,
        context=context,
        content=content_of(context, text),
        text=text,
        environment=host_values(its.env, f"{HARBOR}: environment.env"),
        directory=its.workdir or "",
        settings=build.model_copy(update={"timeout_s": limit_s}),
    )
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:64].strip("-") or "task"
    image = f"oci:localhost/task/{slug}:{recipe.key[:24]}"
    Kept(images_directory()).promise(image, recipe)
    return image


def host_values(variables: dict[str, str], where: str) -> dict[str, str]:
    """Variables with the default of each `${NAME:-default}`. TaskError for one that needs a value of this host."""

    def value(found: re.Match[str]) -> str:
        if found[2] is None:
            hint = "write the value: secrets of this host enter no machine"
            raise TaskError(f"{where} asks for ${{{found[1]}}} of this host", hint=hint)
        return found[2]

    return {name: _HOST_VALUE.sub(value, text) for name, text in variables.items()}


def hidden_files(folder: Path, inside: str) -> dict[str, Any]:
    """The files below a folder, as grading has them: text, or base64."""
    files: dict[str, Any] = {}
    for path, data in read_tree(folder).items():
        try:
            files[f"{inside}/{path}"] = data.decode("utf-8")
        except UnicodeDecodeError:
            files[f"{inside}/{path}"] = {"base64": base64.b64encode(data).decode()}
    return files


def without_canary(text: str) -> str:
    """An instruction without the canary that datasets put above it."""
    lines = text.splitlines()
    while lines and ("canary" in lines[0].lower() or not lines[0].strip()):
        lines.pop(0)
    if not lines:
        raise TaskError("the instruction is empty", hint="say what the agent is asked")
    return "\n".join(lines).strip()
