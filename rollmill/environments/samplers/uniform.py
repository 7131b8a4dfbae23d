"""Every task as often as any other, in the order of the task set's own stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from rollmill.environments.sampler import Draw, Sampler
from rollmill.environments.task import Task, TaskSet
from rollmill.errors import TaskError


class Uniform(Sampler):
    name = "uniform"

    def __init__(self) -> None:
        self._stream: Iterator[Task] = iter(())
        self._latest: tuple[int, Task] | None = None  # the newest index that was asked for

    def choose(self, tasks: TaskSet, draw: Draw) -> Task:
        if self._latest is not None and self._latest[0] == draw.index:
            return self._latest[1]
        if self._latest is None or self._latest[0] > draw.index:
            self._stream, skipped = tasks.train_from(draw.seed, draw.index), 0
        else:
            skipped = draw.index - self._latest[0] - 1
        task = next(itertools.islice(self._stream, skipped, None), None)
        if task is None:
            raise TaskError(f"the stream of tasks of {tasks.name!r} ended", hint="train() must be endless")
        self._latest = draw.index, task
        return task
