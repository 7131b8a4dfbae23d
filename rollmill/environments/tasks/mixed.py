"""The tasks of several environments as one task set. Task `ID` of the environment `NAME` is called `NAME/ID`, and its
family `F` is called `NAME/F`, so that nothing of two environments is ever compared."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rollmill.environments.task import Task, TaskSet
from rollmill.errors import TaskError

if TYPE_CHECKING:
    from rollmill.environments.train_index import TrainIndex


def turns(weights: Mapping[str, float]) -> Iterator[str]:
    """Endless: the environment of each group. Each comes as often as its weight says, evenly spread."""
    credit, total = dict.fromkeys(weights, 0.0), sum(weights.values())
    while True:
        for name, weight in weights.items():
            credit[name] += weight
        chosen = max(credit, key=lambda name: credit[name])
        credit[chosen] -= total
        yield chosen


class NamedTasks(TaskSet):
    """The tasks of one environment, as the run calls them."""

    def __init__(self, name: str, tasks: TaskSet) -> None:
        self.name, self._tasks = name, tasks

    @property
    def problems(self) -> list[str]:  # type: ignore[override]
        return [f"{self.name}: {problem}" for problem in self._tasks.problems]

    def train(self, seed: int) -> Iterator[Task]:
        return map(self._named, self._tasks.train(seed))

    def train_from(self, seed: int, start: int) -> Iterator[Task]:
        return map(self._named, self._tasks.train_from(seed, start))

    def heldout(self, split: str, count: int) -> list[Task]:
        return [self._named(task) for task in self._tasks.heldout(split, count)]

    def get(self, task_id: str) -> Task:
        return self._named(self._tasks.get(task_id.removeprefix(f"{self.name}/")))

    def train_ids(self) -> list[str] | None:
        ids = self._tasks.train_ids()
        return None if ids is None else [f"{self.name}/{id}" for id in ids]

    def by_rank(self) -> TrainIndex | None:
        from rollmill.environments.train_index import index_of

        index, prefix = index_of(self._tasks), f"{self.name}/"
        if index is None:
            return None
        return replace(
            index,
            task=lambda rank: self._named(index.task(rank)),
            rank=lambda id: index.rank(id.removeprefix(prefix)) if id.startswith(prefix) else None,
        )

    def listed(self) -> Iterable[Task] | None:
        tasks = self._tasks.listed()
        return None if tasks is None else map(self._named, tasks)

    def _named(self, task: Task) -> Task:
        family = f"{self.name}/{task.family}" if task.family else self.name
        return replace(task, id=f"{self.name}/{task.id}", family=family, environment=self.name)


class MixedTasks(TaskSet):
    name = "environments"

    def __init__(self, tasks: Mapping[str, TaskSet], weights: Mapping[str, float]) -> None:
        self.parts = {name: NamedTasks(name, each) for name, each in tasks.items()}
        self.weights = weights

    @property
    def problems(self) -> list[str]:  # type: ignore[override]
        return [problem for each in self.parts.values() for problem in each.problems]

    def train(self, seed: int) -> Iterator[Task]:
        streams = {name: each.train(seed) for name, each in self.parts.items()}
        return (next(streams[name]) for name in turns(self.weights))

    def heldout(self, split: str, count: int) -> list[Task]:
        """As many of each environment, as far as it has them: their results are compared one by one."""
        found, refused = [], []
        for each in self.parts.values():
            try:
                found.append(each.heldout(split, count))
            except TaskError as error:  # a task set of the user that knows its splits
                refused.append(error)
        if not found:
            raise refused[0]
        in_turn = itertools.chain.from_iterable(itertools.zip_longest(*found))
        return [task for task in in_turn if task is not None][:count]

    def get(self, task_id: str) -> Task:
        part = self.parts.get(task_id.partition("/")[0])
        if part is None:
            raise TaskError(
                f"no environment has a task {task_id!r}", hint=f"ENVIRONMENT/ID; environments: {', '.join(self.parts)}"
            )
        return part.get(task_id)

    def train_ids(self) -> list[str] | None:
        ids = [each.train_ids() for each in self.parts.values()]
        return None if None in ids else [id for of in ids for id in of or ()]

    def listed(self) -> Iterable[Task] | None:
        found = [each.listed() for each in self.parts.values()]
        return None if None in found else itertools.chain.from_iterable(each or () for each in found)
