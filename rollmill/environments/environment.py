"""Environment: the parts that an episode needs, built from the sections of a run."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollmill.environments.harness import Harness
from rollmill.environments.part_sections import EnvironmentSection, HarnessSection, RewardSection, TasksSection
from rollmill.environments.reward import Reward
from rollmill.environments.rewards.weighted import add_up
from rollmill.environments.task import TaskSet
from rollmill.errors import ConfigError
from rollmill.kinds import build, resolve_paths, search_also
from rollmill.machines.machine import MachineHost, MachineSection
from rollmill.machines.pool import Pool, PoolConfig

PARTS = ("tasks", "harness", "machine", "pool", "rewards")  # the sections of one environment


class Sections(Protocol):
    """The settings that describe one environment: an EnvironmentSection, or a run that has one environment."""

    @property
    def tasks(self) -> TasksSection | None: ...
    @property
    def machine(self) -> MachineSection: ...
    @property
    def pool(self) -> PoolConfig: ...
    @property
    def harness(self) -> HarnessSection: ...
    @property
    def rewards(self) -> Sequence[RewardSection]: ...


class SeveralSections(Sections, Protocol):
    """The settings of a run: one environment or several."""

    @property
    def environments(self) -> Sequence[EnvironmentSection]: ...


def each_environment(sections: SeveralSections) -> tuple[EnvironmentSection, ...]:
    """The environments of a run. A single one without a name: its tasks keep their ids. None without [tasks]."""
    if sections.environments or sections.tasks is None:
        return tuple(sections.environments)
    return (EnvironmentSection.model_construct(name="", **{part: getattr(sections, part) for part in PARTS}),)


@dataclass(frozen=True)
class Environment:
    machines: MachineHost
    grading_machines: MachineHost  # the same, with a queue of their own
    harness: Harness
    grader: Reward


def find_parts(tree: dict[str, Any]) -> dict[str, Any]:
    """Find the modules and files that a configuration names: they are in `modules`, or in the current directory."""
    directory = Path(tree["modules"]) if isinstance(tree.get("modules"), str) else None
    if directory is not None:
        search_also(directory)
    tables = tree.get("environments")
    if not isinstance(tables, list) or not tables:
        return _find_parts_of(tree, directory or Path.cwd())
    if single := next((name for name in PARTS if name in tree), None):
        raise ConfigError(
            f"[{single}] and [[environments]] are both there: [{single}] describes a run with one environment",
            hint=f"move it into a table of [[environments]]: environments.NAME.{single}",
        )
    return {
        **tree,
        "environments": [
            _find_parts_of(table, directory or Path.cwd()) if isinstance(table, dict) else table for table in tables
        ],
    }


def _find_parts_of(tree: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The same for the sections of one environment."""
    harness = tree.get("harness")
    if isinstance(harness, dict):
        harness = resolve_paths(HarnessSection, harness, directory)
        tree = {**_own_parts(harness), **tree, "harness": harness}
    if "tasks" not in tree:
        return tree
    return {**tree, "tasks": resolve_paths(TasksSection, tree["tasks"], directory)}


def _own_parts(harness: dict[str, Any]) -> dict[str, Any]:
    """[tasks] and [[rewards]], if they come with the harness: its kind is a kind of tasks too."""
    if harness.get("kind") not in HarnessSection._slot.built_in.keys() & TasksSection._slot.built_in.keys():
        return {}
    return {"tasks": harness, "rewards": [{"kind": "reported"}]}


def build_tasks(sections: Sections) -> TaskSet:
    if sections.tasks is None:
        raise ConfigError("there is no [tasks]", hint='[tasks] kind = "jsonl", for example')
    tasks: TaskSet = build(sections.tasks)
    return tasks


def build_grader(rewards: Sequence[RewardSection]) -> Reward:
    return add_up([(section.weight, build(section)) for section in rewards])


@contextlib.asynccontextmanager
async def open_environment(sections: Sections) -> AsyncIterator[Environment]:
    grader = build_grader(sections.rewards)
    harness: Harness = build(sections.harness)
    machines = Pool(build(sections.machine), sections.pool)
    try:
        yield Environment(machines, machines.grading(), harness, grader)
    finally:
        await harness.close()
        await machines.close()
