"""What an evaluation measures: cells of (split, mode), each some held-out tasks with some attempts a task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from rollmill.config import Config


@dataclass(frozen=True)
class Cell:
    split: str  # heldout | heldout_family
    mode: Literal["sampled", "greedy"]  # temperature 1, or 0
    tasks: int
    attempts: int


class EvalConfig(Config):
    """Sampled attempts give the solve rate that training moves; greedy ones show what the policy thinks best."""

    tasks: int = Field(128, ge=1, description="held-out tasks")
    attempts: int = Field(4, ge=1, description="sampled attempts a task; greedy is one attempt")
    family_tasks: int = Field(64, ge=0, description="tasks of the family that training never sees")
    greedy: bool = True
    concurrency: int = Field(128, ge=1)

    def cells(self) -> list[Cell]:
        cells = [Cell("heldout", "sampled", self.tasks, self.attempts)]
        if self.greedy:
            cells.append(Cell("heldout", "greedy", self.tasks, 1))
        if self.family_tasks:
            cells.append(Cell("heldout_family", "sampled", self.family_tasks, self.attempts))
        return cells
