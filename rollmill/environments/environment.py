"""Environment: the parts that an episode needs, built from the sections of a run."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollmill.environments.harness import Harness
from rollmill.environments.mixed_sampler import MixedSampler
from rollmill.environments.part_sections import (
    EnvironmentSection,
    HarnessSection,
    RewardSection,
    SamplerSection,
    TasksSection,
)
from rollmill.environments.reward import Reward
from rollmill.environments.rewards.weighted import add_up
from rollmill.environments.sampler import Sampler
from rollmill.environments.task import Task, TaskSet
from rollmill.environments.tasks.mixed import MixedTasks
from rollmill.errors import ConfigError, TaskError
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


def environment_of(sections: SeveralSections, task: Task) -> EnvironmentSection:
    """The settings of the environment that a task of the run is of."""
    return next(each for each in each_environment(sections) if each.name == task.environment)


@dataclass(frozen=True)
class Environment:
    settings: EnvironmentSection
    machines: MachineHost
    grading_machines: MachineHost  # the same, with a queue of their own
    harness: Harness
    grader: Reward


class Environments:
    """The environments of a run, by name. Whoever plays or grades a task asks here what with."""

    def __init__(self, opened: Iterable[Environment]) -> None:
        self._by_name = {each.settings.name: each for each in opened}

    @property
    def first(self) -> Environment:
        return next(iter(self._by_name.values()))

    @property
    def longest_s(self) -> float:
        """The longest time limit that an environment sets; 0 if none does."""
        return max((each.settings.timeout_s or 0.0 for each in self._by_name.values()), default=0.0)

    def of(self, task: Task) -> Environment:
        try:
            return self._by_name[task.environment]
        except KeyError:
            raise TaskError(
                f"task {task.id!r} is of the environment {task.environment!r}, which this run does not have",
                hint=f"it has {', '.join(map(repr, self._by_name)) or 'none'}",
            ) from None


def find_parts(tree: dict[str, Any]) -> dict[str, Any]:
    """Find the modules and files that a configuration names: they are in `modules`, or in the current directory."""
    directory = Path(tree["modules"]) if isinstance(tree.get("modules"), str) else None
    if directory is not None:
        search_also(directory)
    tables = tree.get("environments")
    tree = _find_suites(tree, directory or Path.cwd())
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


def _find_suites(tree: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The same for the tasks of [[evals.suites]]."""
    evals = tree.get("evals")
    if not isinstance(evals, dict) or not isinstance(evals.get("suites"), list):
        return tree
    tables = [
        {**table, "tasks": resolve_paths(TasksSection, table["tasks"], directory)}
        if isinstance(table, dict) and "tasks" in table
        else table
        for table in evals["suites"]
    ]
    return {**tree, "evals": {**evals, "suites": tables}}


def _own_parts(harness: dict[str, Any]) -> dict[str, Any]:
    """[tasks] and [[rewards]], if they come with the harness: its kind is a kind of tasks too."""
    if harness.get("kind") not in HarnessSection._slot.built_in.keys() & TasksSection._slot.built_in.keys():
        return {}
    return {"tasks": harness, "rewards": [{"kind": "reported"}]}


def build_tasks(sections: SeveralSections) -> TaskSet:
    """The task set of a run: of all its environments, mixed by weight."""
    found = each_environment(sections)
    if not found:
        raise ConfigError("there is no [tasks]", hint='[tasks] kind = "jsonl", for example')
    tasks: dict[str, TaskSet] = {each.name: build(each.tasks) for each in found}
    return tasks[""] if "" in tasks else MixedTasks(tasks, {each.name: each.weight for each in found})


def build_sampler(section: SamplerSection, sections: SeveralSections) -> Sampler:
    """The sampler of a run; of each environment, if they have names."""
    samplers: dict[str, Sampler] = {each.name: build(section) for each in sections.environments}
    alone: Sampler = MixedSampler(samplers) if samplers else build(section)
    return alone


def build_grader(rewards: Sequence[RewardSection]) -> Reward:
    return add_up([(section.weight, build(section)) for section in rewards])


@contextlib.asynccontextmanager
async def open_environments(
    sections: SeveralSections, rewards: Sequence[RewardSection] | None = None
) -> AsyncIterator[Environments]:
    """`rewards`: those that grade instead of each environment's own."""
    opened: list[Environment] = []
    pools: list[tuple[MachineSection, PoolConfig, Pool]] = []
    async with contextlib.AsyncExitStack() as closing:
        for each in each_environment(sections):
            grader = build_grader(each.rewards if rewards is None else rewards)
            harness: Harness = build(each.harness)
            machines = next((pool for *alike, pool in pools if alike == [each.machine, each.pool]), None)
            if machines is None:
                machines = Pool(build(each.machine), each.pool)
                pools.append((each.machine, each.pool, machines))
                closing.push_async_callback(machines.close)
            closing.push_async_callback(harness.close)
            opened.append(Environment(each, machines, machines.grading(), harness, grader))
        yield Environments(opened)
