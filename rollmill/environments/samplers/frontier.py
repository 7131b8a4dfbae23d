"""Tasks at the frontier of what the policy can do: those that it solves sometimes teach most.

    weight = p · (1 − p)^(1 + hardness · progress), scaled so that its largest value is 1, and at least `recheck`

p is the solve rate of the last attempts. At the start p = ½ weighs most; at the end of the run p = 1 / (2 + hardness).
So harder tasks come more often later. Tasks that are always or never solved come rarely. They still come: the policy
changes, and only a new attempt shows it. A task without attempts weighs 1. Choices may repeat a task whose group is
still open: open groups depend on timing, and choices must not.
"""

from __future__ import annotations

import random

from pydantic import Field

from rollmill.config import Config
from rollmill.environments.sampler import Draw, TaskResults
from rollmill.environments.task import Task, TaskSet
from rollmill.errors import ConfigError

_PRIOR = 0.25  # attempts of either outcome that are assumed: few attempts are no certainty


class FrontierConfig(Config):
    hardness: float = Field(
        2.0,
        ge=0,
        description="How much the preference moves to harder tasks during the run. 0: solve rates near one half "
        "throughout; 2: near one quarter at the end.",
    )
    recheck: float = Field(
        0.05,
        gt=0,
        le=1,
        description="Weight of tasks that are always or never solved, where the best tasks weigh 1. Larger looks at "
        "them more often; 1 is uniform.",
    )


class Frontier:
    name = "frontier"

    def __init__(self, config: FrontierConfig) -> None:
        self._config = config
        self._ids: list[str] | None = None

    def check(self, tasks: TaskSet) -> None:
        _train_ids(tasks)

    def choose(self, tasks: TaskSet, draw: Draw) -> Task:
        if self._ids is None:
            self._ids = _train_ids(tasks)
        weights = [self.weight(draw.results.get(id), draw.progress) for id in self._ids]
        (chosen,) = random.Random(f"frontier {draw.seed} {draw.index}").choices(self._ids, weights)
        return tasks.get(chosen)

    def weight(self, results: TaskResults | None, progress: float) -> float:
        if results is None or not results.recent:
            return 1.0
        rate = (sum(results.recent) + _PRIOR) / (len(results.recent) + 2 * _PRIOR)
        power = 1.0 + self._config.hardness * progress
        best = 1.0 / (1.0 + power)
        return max(rate * (1 - rate) ** power / (best * (1 - best) ** power), self._config.recheck)


def _train_ids(tasks: TaskSet) -> list[str]:
    """In an order that does not depend on files or memory."""
    listed = getattr(tasks, "train_ids", None)
    if listed is None:
        raise ConfigError(
            f'[sampler] kind = "frontier" needs a finite task set, and {tasks.name!r} has no train_ids()',
            hint='add `train_ids(self) -> list[str]` to it, or use kind = "uniform"',
        )
    return sorted(set(listed()))
