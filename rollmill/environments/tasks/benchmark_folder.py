"""What folders of Harbor and of Terminal-Bench have in common: the image they are played in, and their hidden files."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from rollmill.config import Config
from rollmill.environments.tasks.task_directory import read_tree
from rollmill.errors import TaskError
from rollmill.machines.images.image import images_directory
from rollmill.machines.oci.build_image import BuildConfig, Recipe, content_of, read_text
from rollmill.machines.oci.kept_images import Kept

HARBOR, TERMINAL_BENCH = "task.toml", "task.yaml"
_HOST_VALUE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")
_PROCESSES = re.compile(r"\b(127\.0\.0\.1|0\.0\.0\.0|localhost|pgrep|pidof|psutil|tmux|systemctl|ps -?[aex]\w*)\b")
_CANARY = re.compile(r"\s*(<!--|#).*canary|.*canary guid|.*benchmark data should never appear", re.IGNORECASE)
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Lenient(Config):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore")


class Network(Lenient):
    network_mode: Literal["no-network", "public", "allowlist"] | None = Field(None, description="What is reached.")
    allowed_hosts: tuple[str, ...] = Field((), description="Names that may be reached.")


class _Healthcheck(Lenient):
    command: str = Field(description="A shell command that passes when the machine is ready.")
    interval_sec: float = Field(5.0, ge=0, description="Seconds between two tries.")
    timeout_sec: float = Field(30.0, gt=0, description="Seconds of one try.")
    start_period_sec: float = Field(0.0, ge=0, description="Seconds in which failures do not count.")
    retries: int = Field(3, ge=1, description="Failures that count until it is given up.")


class Environment(Network):
    docker_image: str | None = Field(None, description="A prebuilt image, instead of a Dockerfile.")
    workdir: str | None = Field(None, description="The work directory instead of the image's.")
    build_timeout_sec: Positive | None = Field(None, description="Limit of building its image.")
    cpus: Positive | None = Field(None, description="Processors.")
    memory_mb: int | None = Field(None, gt=0, description="Memory.")
    storage_mb: int | None = Field(None, gt=0, description="Disk.")
    gpus: int | None = Field(None, description="GPUs: machines have none.")
    tpu: dict[str, Any] | None = Field(None, description="TPUs: machines have none.")
    os: str = Field("linux", description="The operating system.")
    allow_internet: bool | None = Field(None, description="An older form of network_mode.")
    mcp_servers: tuple[dict[str, Any], ...] = Field((), description="Not supported.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables.")
    healthcheck: _Healthcheck | None = Field(None, description="When the machine is ready.")


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


def look_for_processes(tests: Mapping[str, Any]) -> bool:
    """Whether the files of tests name an address of their own computer, or a program that lists processes."""
    return any(isinstance(text, str) and _PROCESSES.search(text) for text in tests.values())


def without_canary(text: str) -> str:
    """An instruction without the canary that datasets put above it."""
    lines = text.splitlines()
    while lines and (_CANARY.match(lines[0]) or not lines[0].strip()):
        lines.pop(0)
    if not lines:
        raise TaskError("the instruction is empty", hint="say what the agent is asked")
    return "\n".join(lines).strip()
