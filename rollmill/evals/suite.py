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

    tasks: int = Field(
        128, ge=1, description="Held-out tasks. More give narrower confidence intervals and take longer."
    )
    attempts: int = Field(
        4, ge=1, description="Sampled attempts per task, at temperature 1. Greedy decoding is one attempt per task."
    )
    family_tasks: int = Field(
        64, ge=0, description="Tasks of the family that training never sees. 0 leaves this measurement out."
    )
    greedy: bool = Field(True, description="Also measure greedy decoding (temperature 0).")
    concurrency: int = Field(
        128, ge=1, description="Most attempts in progress at once. More keep the engines busier and take more memory."
    )

    def cells(self) -> list[Cell]:
        cells = [Cell("heldout", "sampled", self.tasks, self.attempts)]
        if self.greedy:
            cells.append(Cell("heldout", "greedy", self.tasks, 1))
        if self.family_tasks:
            cells.append(Cell("heldout_family", "sampled", self.family_tasks, self.attempts))
        return cells
