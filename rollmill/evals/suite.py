"""What an evaluation measures: cells, each with N held-out tasks and M attempts per task. The run's own are cells of
(split, mode); each table of [[evals.suites]] is one more, with its own tasks and bounds."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field

from rollmill.config import NAME, Config
from rollmill.environments.part_sections import TasksSection
from rollmill.environments.task import Task, TaskSet
from rollmill.environments.tasks.mixed import MixedTasks, NamedTasks
from rollmill.errors import ConfigError, TaskError
from rollmill.evals.gate_config import BOUNDS, GateConfig
from rollmill.kinds import build

FAMILY = "heldout_family"
SPLITS = ("heldout", "fresh", FAMILY)  # of the cells that are no suite of [[evals.suites]]
_FAMILY_TASKS = 64


@dataclass(frozen=True)
class Cell:
    split: str
    mode: Literal["sampled", "greedy"]
    tasks: int
    attempts: int
    temperature: float = 1.0
    suite: str = ""  # of [[evals.suites]]
    source: TaskSet | None = None  # of its tasks; None: those of the run
    first: int = 0  # the number of the first attempt, if earlier ones are made already

    @property
    def name(self) -> str:
        """What its results are called."""
        return self.suite or self.split

    def repeated(self, rounds: range) -> Cell:
        """The attempts of these rounds; round 0 is the cell as it is configured."""
        return replace(self, attempts=self.attempts * len(rounds), first=self.attempts * rounds.start)

    def held(self, tasks: TaskSet) -> list[Task]:
        """Its tasks, if the run has `tasks`."""
        return (self.source or tasks).heldout(self.split, self.tasks)

    def chosen(self, tasks: TaskSet) -> list[Task]:
        """The same. TaskError if there are none."""
        if found := self.held(tasks):
            return found
        if self.suite:
            hint = "name another `split`; `heldout_share = 1.0` in the suite's own `tasks` takes all of them"
            raise TaskError(f"evals.suites.{self.suite}: there are no tasks in the split {self.split!r}", hint=hint)
        hint = "give tasks this split; `evals.family_tasks = 0` and `evals.fresh_tasks = 0` leave splits out"
        raise TaskError(f"there are no tasks in the split {self.split!r}, which [evals] measures", hint=hint)


def _check_name(name: str) -> str:
    if name in SPLITS:
        raise ValueError("results of [evals] are called so already: give the suite another name")
    return name


def _check_bounds(bounds: dict[str, int | float]) -> dict[str, int | float]:
    for name in bounds:
        if name not in BOUNDS:
            near = difflib.get_close_matches(name, BOUNDS, n=1, cutoff=0.5)
            raise ValueError(f"{name!r} is no bound; {f'did you mean {near[0]!r}?' if near else ', '.join(BOUNDS)}")
    GateConfig.model_validate(bounds)
    return bounds


class SuiteConfig(Config):
    """Tasks that every evaluation of the run measures too, before, while and after it trains, with results apart."""

    name: Annotated[str, AfterValidator(_check_name)] = Field(
        pattern=NAME, description="The suite's name: its results stand under it."
    )
    tasks: TasksSection | None = Field(
        None, description="Tasks of its own, from another file for example. Not set: those of `environment`."
    )
    environment: str | None = Field(
        None,
        description="The one of [[environments]] whose tasks it takes, or that plays and grades its own `tasks`. Not "
        "set: all tasks of the run; with `tasks` of its own, the run's only environment.",
    )
    split: str = Field("heldout", min_length=1, description="Split of the tasks that are measured.")
    count: int = Field(128, ge=1, description="At most this many tasks.")
    attempts: int | None = Field(None, ge=1, description="Attempts per task. Not set: `evals.attempts`.")
    temperature: float | None = Field(None, ge=0, description="Sampling temperature. Not set: `evals.temperature`.")
    bounds: Annotated[dict[str, int | float], AfterValidator(_check_bounds)] | None = Field(
        None,
        description="Bounds that a version must keep on this suite to become `live`, such as {max_quality_loss = 0.02}."
        f" Names: {', '.join(BOUNDS)}. What is left out is as in [gate]. Not set: the gate does not measure the suite.",
    )

    def cell(self, evals: EvalConfig, tasks: TaskSet) -> Cell:
        """`tasks`: those of the run."""
        temperature = evals.temperature if self.temperature is None else self.temperature
        made = self.attempts or evals.attempts
        return Cell(self.split, "sampled", self.count, made, temperature, self.name, self._source(tasks))

    def _source(self, tasks: TaskSet) -> TaskSet | None:
        parts = tasks.parts if isinstance(tasks, MixedTasks) else {}
        if self.environment is not None and self.environment not in parts:
            raise ConfigError(
                f"evals.suites.{self.name}: environment = {self.environment!r} is none of the run",
                hint=f"[[environments]]: {', '.join(parts) or 'there are none, so leave it out'}",
            )
        if self.tasks is None:
            return None if self.environment is None else parts[self.environment]
        if self.environment is not None:
            return NamedTasks(self.environment, build(self.tasks))
        if parts:
            raise ConfigError(
                f"evals.suites.{self.name}: the run has several environments, and `tasks` says not which one plays it",
                hint=f"set `environment` to one of {', '.join(parts)}",
            )
        own: TaskSet = build(self.tasks)
        return own


def _have_names_of_their_own(suites: tuple[SuiteConfig, ...]) -> tuple[SuiteConfig, ...]:
    names = [each.name for each in suites]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two suites are called {twice!r}: give each its own `name`")
    return suites


class EvalConfig(Config):
    """Sampled attempts give the solve rate that training improves; greedy ones show the policy's best guess."""

    tasks: int = Field(
        128, ge=1, description="Held-out tasks. More give narrower confidence intervals and take longer."
    )
    attempts: int = Field(4, ge=1, description="Sampled attempts per task. Greedy decoding is one attempt per task.")
    temperature: float = Field(
        1.0,
        ge=0,
        description="Sampling temperature of the sampled attempts. Set the one that your product serves with.",
    )
    family_tasks: int | None = Field(
        None,
        ge=0,
        description="Tasks of the split `heldout_family`: families that training never sees. 0 leaves this measurement "
        "out. Not set: at most 64, if the task set has such a split.",
    )
    fresh_tasks: int = Field(
        0,
        ge=0,
        description="Tasks of the split `fresh`, on which no setting was tuned, for task sets that have one. "
        "0 leaves this measurement out.",
    )
    greedy: bool = Field(True, description="Also measure greedy decoding (temperature 0).")
    concurrency: int = Field(
        128, ge=1, description="Most attempts in progress at once. More keep the engines busier and take more memory."
    )
    every: int = Field(
        0,
        ge=0,
        description="Each Nth version of an RL stage is also evaluated while training goes on, sampled: a curve over "
        "versions. 0: only before and after.",
    )
    engines: Literal["run", "own"] = Field(
        "run",
        description="Who answers the evaluations of `every`. `run`: the engines of the run. They move on during an "
        "evaluation, so each attempt records the oldest and the newest version that sampled it. `own`: one more engine "
        "that is started for each evaluation and serves exactly that version; it needs memory beside the others.",
    )
    every_concurrency: int = Field(
        8,
        ge=1,
        description="Most attempts of an evaluation of `every` in progress at once. Few leave the engines to rollouts.",
    )
    suites: Annotated[tuple[SuiteConfig, ...], AfterValidator(_have_names_of_their_own)] = Field(
        (), description="Further tasks that every evaluation measures, each with results and bounds of its own."
    )

    def while_training(self) -> Self:
        """What `every` measures: less, so that it is done when the next version is due."""
        less = {"greedy": False, "fresh_tasks": 0, "family_tasks": 0, "concurrency": self.every_concurrency}
        return self.model_copy(update=less)

    def cells(self, tasks: TaskSet) -> list[Cell]:
        cells = [Cell("heldout", "sampled", self.tasks, self.attempts, self.temperature)]
        if self.greedy:
            cells.append(Cell("heldout", "greedy", self.tasks, 1, 0.0))
        if self.fresh_tasks:
            cells.append(Cell("fresh", "sampled", self.fresh_tasks, self.attempts, self.temperature))
        if family_tasks := self._family_tasks(tasks):
            cells.append(Cell(FAMILY, "sampled", family_tasks, self.attempts, self.temperature))
        return [*cells, *(suite.cell(self, tasks) for suite in self.suites)]

    def _family_tasks(self, tasks: TaskSet) -> int:
        if self.family_tasks is not None:
            return self.family_tasks
        try:
            return min(_FAMILY_TASKS, self.tasks) if tasks.heldout(FAMILY, 1) else 0
        except TaskError:  # a task set of the user that knows its splits
            return 0
