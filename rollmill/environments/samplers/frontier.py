"""Tasks at the frontier of what the policy can do: those whose attempts earn different rewards teach most.

    weight = d/2 · (1 − m)^(hardness · progress), scaled so that its largest value for rewards of 0 and 1 is 1, and at
             least `recheck`

m is the mean reward of the last attempts and d their mean distance from it. With rewards of 0 and 1 and a solve rate p,
d/2 = p · (1 − p): at the start p = ½ weighs most, at the end of the run p = 1 / (2 + hardness). So harder tasks come
more often later. Tasks whose attempts all earn the same come rarely. They still come: the policy changes, and only a
new attempt shows it.

A task without attempts weighs what tasks of its family weigh on average, and a family without attempts what all do;
before there are any results every task weighs 1. Choices may repeat a task whose group is still open: open groups
depend on timing, and choices must not.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Collection, Mapping

from pydantic import Field

from rollmill.config import Config
from rollmill.environments.sampler import Draw, Sampler, TaskResults
from rollmill.environments.task import Task, TaskSet
from rollmill.errors import ConfigError

_PRIOR = 0.25  # attempts with reward 0 and with reward 1 that are assumed: few attempts are no certainty


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


class Frontier(Sampler):
    name = "frontier"

    def __init__(self, config: FrontierConfig) -> None:
        self._config = config
        self._families: dict[str, list[str]] = {}  # the ids of each family's tasks
        self._family: dict[str, str] = {}  # of each task

    def check(self, tasks: TaskSet) -> None:
        _train_ids(tasks)

    def choose(self, tasks: TaskSet, draw: Draw) -> Task:
        if not self._family:
            self._family = {id: tasks.get(id).family for id in _train_ids(tasks)}
            for id, family in self._family.items():
                self._families.setdefault(family, []).append(id)
        tried = {
            id: self.weight(results, draw.progress)
            for id, results in sorted(draw.results.items())
            if results.recent and id in self._family
        }
        untried = self._untried(tried)
        random_ = random.Random(f"frontier {draw.seed} {draw.index}")
        # one entry for all new tasks of a family: a choice costs what was tried, not what there is
        entries: list[tuple[str | None, str | None]] = [(id, None) for id in tried]
        entries += [(None, family) for family in untried]
        ((chosen, of_family),) = random_.choices(entries, [*tried.values(), *untried.values()])
        while chosen is None or (of_family is not None and chosen in tried):
            chosen = random_.choice(self._families[of_family or ""])
        return tasks.get(chosen)

    def weight(self, results: TaskResults, progress: float) -> float:
        """Of a task that was tried."""
        count = len(results.recent) + 2 * _PRIOR
        mean = (sum(results.recent) + _PRIOR) / count
        distances = [abs(reward - mean) for reward in results.recent]
        spread = (sum(distances) + _PRIOR * (abs(mean) + abs(1 - mean))) / count / 2
        power = self._config.hardness * progress
        best = 1.0 / (2.0 + power)
        weight = spread * (1 - min(max(mean, 0.0), 1.0)) ** power / (best * (1 - best) ** (1 + power))
        return max(min(weight, 1.0), self._config.recheck)

    def _untried(self, tried: Mapping[str, float]) -> dict[str, float]:
        """What the tasks without attempts weigh together, by family."""
        found: collections.defaultdict[str, list[float]] = collections.defaultdict(list)
        for id, weight in tried.items():
            found[self._family[id]].append(weight)
        usual = _mean(tried.values(), 1.0)
        left = {family: len(ids) - len(found[family]) for family, ids in self._families.items()}
        return {family: count * _mean(found[family], usual) for family, count in left.items() if count}


def _mean(weights: Collection[float], expected: float) -> float:
    """With one task that weighs `expected`: few tasks are no certainty."""
    return (sum(weights) + expected) / (len(weights) + 1)


def _train_ids(tasks: TaskSet) -> list[str]:
    """In an order that does not depend on files or memory."""
    listed = tasks.train_ids()
    if listed is None:
        raise ConfigError(
            f'[sampler] kind = "frontier" needs a finite task set, and {tasks.name!r} lists none',
            hint='add `train_ids(self) -> list[str]` to it, or use kind = "uniform"',
        )
    return sorted(set(listed))
