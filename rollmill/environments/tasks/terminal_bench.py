"""Task folders of Terminal-Bench 1: task.yaml, Dockerfile, run-tests.sh, tests/, solution.sh. See harbor.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field

from rollmill.environments.task import Needs, Task
from rollmill.environments.tasks.benchmark_folder import (
    TERMINAL_BENCH,
    Environment,
    Lenient,
    hidden_files,
    look_for_processes,
    promise,
    without_canary,
)
from rollmill.environments.tasks.lines import validate
from rollmill.errors import TaskError
from rollmill.machines.oci.build_image import BuildConfig

_COMPOSE = "docker-compose.yaml"


class TerminalBenchEntry(Lenient):
    """task.yaml, as far as it is used."""

    instruction: str = Field(min_length=1, description="What is asked.")
    difficulty: str = Field("", description="A tag.")
    category: str = Field("", description="A tag, and the family.")
    max_agent_timeout_sec: float | None = Field(None, gt=0, allow_inf_nan=False, description="Limit of an episode.")
    max_test_timeout_sec: float = Field(60.0, gt=0, allow_inf_nan=False, description="Limit of the tests.")


def read_terminal_bench(folder: Path, build: BuildConfig) -> Task:
    entry = validate(TerminalBenchEntry, json.dumps(_yaml(folder / TERMINAL_BENCH), default=str))
    services = _yaml(folder / _COMPOSE).get("services", {}) if (folder / _COMPOSE).is_file() else {}
    if len(services) > 1:
        hint = "tasks of several containers are not supported: leave this task out"
        raise TaskError(f"{_COMPOSE}: services: {', '.join(map(str, services))}", hint=hint)
    run_tests = (folder / "run-tests.sh").read_text(encoding="utf-8")
    tests = {**hidden_files(folder / "tests", "/tests"), "/tests/run-tests.sh": run_tests}
    script = folder / "solution.sh"
    tags = {name: text for name, text in {"difficulty": entry.difficulty, "category": entry.category}.items() if text}
    return Task(
        id=folder.name,
        instruction=without_canary(entry.instruction),
        family=entry.category,
        image=promise(folder.name, folder, Environment(), build),
        grading={
            "kind": "harbor",
            "verdict": "exit",
            "files": tests,
            "command": ["bash", "/tests/run-tests.sh"],
            "env": {"TEST_DIR": "/tests"},
            "timeout_s": entry.max_test_timeout_sec,
        },
        reference={"/oracle/solution.sh": script.read_bytes()} if script.is_file() else {},
        reference_command=["bash", "/oracle/solution.sh"] if script.is_file() else [],
        tags=tags,
        timeout_s=entry.max_agent_timeout_sec,
        needs=Needs(file=str(folder / TERMINAL_BENCH)),
        processes=look_for_processes(tests),
    )


def _yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise TaskError(f"{path.name}: not valid YAML: {str(error)[:300]}", hint="correct it") from None
    if not isinstance(tree, dict):
        raise TaskError(f"{path.name}: it is no mapping", hint="correct it")
    return tree
