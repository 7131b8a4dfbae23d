"""One sampler per environment. Which environment has its turn follows from the weights alone, never from results."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from rollmill.environments.sampler import Draw, Results, Sampler, TaskResults
from rollmill.environments.task import Task, TaskSet
from rollmill.environments.tasks.mixed import MixedTasks, turns


class MixedSampler(Sampler):
    def __init__(self, samplers: Mapping[str, Sampler]) -> None:
        self.name = next(iter(samplers.values())).name
        self._samplers = samplers
        self._turns: Iterator[str] = iter(())
        self._groups = Counter[str]()  # that each environment had, up to the latest index
        self._latest = -1, ""  # the newest index that was asked for, and its environment
        self._results: Mapping[str, TaskResults] = {}
        self._read = 0  # entries of their log that are divided
        self._divided: dict[str, Results] = {}

    def check(self, tasks: TaskSet) -> None:
        assert isinstance(tasks, MixedTasks)
        for name, sampler in self._samplers.items():
            sampler.check(tasks.parts[name])

    def choose(self, tasks: TaskSet, draw: Draw) -> Task:
        assert isinstance(tasks, MixedTasks)
        name = self._environment(tasks.weights, draw.index)
        own = replace(draw, index=self._groups[name] - 1, results=self._of(name, draw.results))
        return self._samplers[name].choose(tasks.parts[name], own)

    def _environment(self, weights: Mapping[str, float], index: int) -> str:
        if self._latest[0] > index or self._latest[0] < 0:
            self._turns, self._latest = turns(weights), (-1, "")
            self._groups.clear()
        for name in itertools.islice(self._turns, index - self._latest[0]):
            self._groups[name] += 1
            self._latest = index, name
        return self._latest[1]

    def _of(self, name: str, results: Mapping[str, TaskResults]) -> Results:
        """The results of an environment. They change in place; without a log all may have changed."""
        log = results.log if isinstance(results, Results) else None
        if results is not self._results or log is None:
            self._results, self._read, self._divided = results, 0, {}
        for id in itertools.islice(results if log is None else log, self._read, None):
            own = self._divided.setdefault(id.partition("/")[0], Results())
            own[id] = results[id]
            own.log.append(id)
        self._read = 0 if log is None else len(log)
        return self._divided.setdefault(name, Results())
