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

import random
from array import array
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from pydantic import Field

from rollmill.config import Config
from rollmill.environments.sampler import Draw, Results, Sampler, TaskResults
from rollmill.environments.task import Task, TaskSet
from rollmill.environments.train_index import TrainIndex, index_of
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
        self._index: TrainIndex | None = None
        self._forget({})
        self._progress = -1.0
        self._chances = _Chances(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))

    def check(self, tasks: TaskSet) -> None:
        _train_index(tasks)

    def choose(self, tasks: TaskSet, draw: Draw) -> Task:
        if self._index is None:
            self._index = _train_index(tasks)
        learnt = self._learn(self._index, draw.results)
        if learnt or draw.progress != self._progress:  # once per committed step
            self._chances, self._progress = self._weigh(self._index, draw.progress), draw.progress
        random_ = random.Random(f"frontier {draw.seed} {draw.index}")
        return self._index.task(self._pick(self._index, random_))

    def weight(self, results: TaskResults, progress: float) -> float:
        """Of a task that was tried."""
        mean, spread = _measure(results)
        return float(self._weights(np.array([mean]), np.array([spread]), progress)[0])

    def _forget(self, results: Mapping[str, TaskResults]) -> None:
        self._results, self._seen = results, 0  # entries of their log
        self._places: dict[int, int] = {}  # rank of a task that was tried → its place in the arrays
        self._rank_A, self._mean_A, self._spread_A = array("q"), array("d"), array("d")

    def _learn(self, index: TrainIndex, results: Mapping[str, TaskResults]) -> bool:
        """Measure the tasks whose results are new. Without a log all may be."""
        if results is not self._results:
            self._forget(results)
        changed: Iterable[str] = results
        if isinstance(results, Results):
            changed, self._seen = results.log[self._seen :], len(results.log)
        found = False
        for id in dict.fromkeys(changed):
            rank = index.rank(id) if results[id].recent else None
            if rank is None:
                continue
            found, (mean, spread) = True, _measure(results[id])
            place = self._places.setdefault(rank, len(self._rank_A))
            if place == len(self._rank_A):
                self._rank_A.append(rank)
                self._mean_A.append(mean)
                self._spread_A.append(spread)
            else:
                self._mean_A[place], self._spread_A[place] = mean, spread
        return found

    def _weigh(self, index: TrainIndex, progress: float) -> _Chances:
        rank_A = np.array(self._rank_A, np.int64)
        order_A = np.argsort(rank_A)  # the order in which results came decides nothing
        rank_A = rank_A[order_A]
        weight_A = self._weights(np.array(self._mean_A)[order_A], np.array(self._spread_A)[order_A], progress)
        family_A, families = index.family_T[rank_A], len(index.counts_F)
        tried_F = np.bincount(family_A, minlength=families)
        usual = (float(weight_A.sum()) + 1.0) / (len(weight_A) + 1)
        # with one task that weighs what is usual: few tasks are no certainty
        mean_F = (np.bincount(family_A, weight_A, families) + usual) / (tried_F + 1)
        left_F = index.counts_F - tried_F
        open_F = np.flatnonzero(left_F)
        # one entry for all new tasks of a family: a choice costs what was tried, not what there is
        return _Chances(rank_A, open_F, np.cumsum(np.concatenate([weight_A, (left_F * mean_F)[open_F]])))

    def _pick(self, index: TrainIndex, random_: random.Random) -> int:
        """A rank: of a task that was tried, or of a new one of a family."""
        ranks, families, ends = self._chances
        place = int(np.searchsorted(ends, random_.random() * ends[-1], side="right"))
        place = min(place, len(ends) - 1)
        if place < len(ranks):
            return int(ranks[place])
        family = int(families[place - len(ranks)])
        while True:
            rank = index.member(family, random_.randrange(int(index.counts_F[family])))
            if rank not in self._places:
                return rank

    def _weights(self, mean_A: np.ndarray, spread_A: np.ndarray, progress: float) -> np.ndarray:
        power = self._config.hardness * progress
        best = 1.0 / (2.0 + power)
        weight_A = spread_A * (1 - np.clip(mean_A, 0.0, 1.0)) ** power / (best * (1 - best) ** (1 + power))
        return np.clip(weight_A, self._config.recheck, 1.0)


class _Chances(NamedTuple):
    """The running sum of weights: first of the tasks that were tried, then of the new ones of each family."""

    ranks: np.ndarray
    families: np.ndarray  # that have new tasks
    ends: np.ndarray


def _measure(results: TaskResults) -> tuple[float, float]:
    """Mean and half the mean distance from it of the last rewards."""
    count = len(results.recent) + 2 * _PRIOR
    mean = (sum(results.recent) + _PRIOR) / count
    distances = [abs(reward - mean) for reward in results.recent]
    return mean, (sum(distances) + _PRIOR * (abs(mean) + abs(1 - mean))) / count / 2


def _train_index(tasks: TaskSet) -> TrainIndex:
    index = index_of(tasks)
    if index is None:
        raise ConfigError(
            f'[sampler] kind = "frontier" needs a finite task set, and {tasks.name!r} lists none',
            hint='add `train_ids(self) -> list[str]` to it, or use kind = "uniform"',
        )
    return index
