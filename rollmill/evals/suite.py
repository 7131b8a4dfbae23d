"""What an evaluation measures: cells of (split, mode), each with N held-out tasks and M attempts per task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field

from rollmill.config import Config
from rollmill.environments.task import TaskSet
from rollmill.errors import TaskError

FAMILY = "heldout_family"
_FAMILY_TASKS = 64


@dataclass(frozen=True)
class Cell:
    split: str  # heldout | fresh | heldout_family
    mode: Literal["sampled", "greedy"]
    tasks: int
    attempts: int
    temperature: float = 1.0


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
        return cells

    def _family_tasks(self, tasks: TaskSet) -> int:
        if self.family_tasks is not None:
            return self.family_tasks
        try:
            return min(_FAMILY_TASKS, self.tasks) if tasks.heldout(FAMILY, 1) else 0
        except TaskError:  # a task set of the user that knows its splits
            return 0
