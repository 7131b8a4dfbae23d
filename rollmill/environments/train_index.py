"""TrainIndex: the training tasks of a finite set as samplers see them, a few bytes for each. A task is named by its
rank: its place in the order of the ids, which depends neither on files nor on memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np

from rollmill.environments.task import Task, TaskSet


@dataclass(frozen=True)
class TrainIndex:
    family_T: np.ndarray  # the number of the family of each task
    task: Callable[[int], Task]  # by rank
    rank: Callable[[str], int | None]  # by id; None: it is no training task

    @classmethod
    def of(cls, ids: Iterable[str], get: Callable[[str], Task]) -> TrainIndex:
        """Of tasks that are held in memory anyway."""
        ordered = sorted(set(ids))
        ranks, numbers = {id: rank for rank, id in enumerate(ordered)}, dict[str, int]()
        families = [numbers.setdefault(get(id).family, len(numbers)) for id in ordered]
        return cls(np.array(families, np.int32), lambda rank: get(ordered[rank]), ranks.get)

    @cached_property
    def counts_F(self) -> np.ndarray:
        """Tasks of each family."""
        return np.bincount(self.family_T)

    def member(self, family: int, place: int) -> int:
        """The rank of a family's task."""
        return int(self._by_family_T[self._starts_F[family] + place])

    @cached_property
    def _by_family_T(self) -> np.ndarray:
        return np.argsort(self.family_T, kind="stable").astype(np.int32)

    @cached_property
    def _starts_F(self) -> np.ndarray:
        return np.cumsum(self.counts_F) - self.counts_F


@runtime_checkable
class Indexed(Protocol):
    """A task set that has an index anyway."""

    def by_rank(self) -> TrainIndex | None: ...


def index_of(tasks: TaskSet) -> TrainIndex | None:
    """The training tasks of a set by rank; None: they are endless."""
    if isinstance(tasks, Indexed):
        return tasks.by_rank()
    ids = tasks.train_ids()
    return None if ids is None else TrainIndex.of(ids, tasks.get)
