"""Environment: the parts that an episode needs, built from the sections of a run."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollmill.environments.harness import Harness
from rollmill.environments.part_sections import HarnessSection, RewardSection, TasksSection
from rollmill.environments.reward import Reward
from rollmill.environments.rewards.weighted import add_up
from rollmill.environments.task import TaskSet
from rollmill.errors import ConfigError
from rollmill.kinds import build, resolve_paths, search_also
from rollmill.machines.machine import MachineHost, MachineSection
from rollmill.machines.pool import Pool, PoolConfig


class Sections(Protocol):
    """The settings that describe an environment: those of a run have them."""

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
    harness = tree.get("harness")
    if isinstance(harness, dict):
        harness = resolve_paths(HarnessSection, harness, directory or Path.cwd())
        tree = {**_own_parts(harness), **tree, "harness": harness}
    if "tasks" not in tree:
        return tree
    return {**tree, "tasks": resolve_paths(TasksSection, tree["tasks"], directory or Path.cwd())}


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
