"""ListedTasks: a finite set of tasks, held in memory. The kinds that read files derive from it, and yours may too:

class Greetings(ListedTasks):
    name = "greetings"

    def __init__(self) -> None:
        super().__init__([Task("hello", "Write `hello` into out.txt.", submission=("out.txt",))])
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import random
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

from rollmill.environments.task import Task, TaskSet
from rollmill.errors import TaskError

log = logging.getLogger(__name__)
TRAIN = "train"
_LOGGED = 10  # problems that are logged one by one


class FiniteTasks(TaskSet):
    """What all finite sets have in common: base class. `problems` are the tasks that could not be read."""

    name = "tasks"
    problems: list[str]

    def _tell(self, problems: Sequence[str], tasks: int) -> None:
        """Keep and log the problems. TaskError if there is no task."""
        self.problems = list(problems)
        if not tasks:
            first = f", the first problem: {self.problems[0]}" if self.problems else ""
            raise TaskError(f"the task set {self.name!r} has no task{first}", hint="every line or folder is one task")
        for problem in self.problems[:_LOGGED]:
            log.warning("task left out: %s", problem)
        if len(self.problems) > _LOGGED:
            log.warning("and %d more; `rollmill tasks check` shows all", len(self.problems) - _LOGGED)

    def _epochs(self, count: int, task: Callable[[int], Task], seed: int, start: int = 0) -> Iterator[Task]:
        """Endless. Each epoch has every training task once, in an order drawn from seed and epoch. `task` gives each of
        the `count` training tasks by its place in the order of ids. The first `start` are left out."""
        if not count:
            hint = f"splits: {', '.join(sorted(self.splits()))}; training uses the split `{TRAIN}`"
            raise TaskError(f"the task set {self.name!r} has no training task", hint=hint)
        return _shuffled(count, task, seed, *divmod(start, count))

    def heldout(self, split: str, count: int) -> list[Task]:
        """The first `count` tasks of a split, in an order that does not change when tasks are added or moved."""
        if split == TRAIN:
            raise TaskError(f"the split `{TRAIN}` is not held out", hint="name another split")
        return self._held(split, count)

    @abstractmethod
    def _held(self, split: str, count: int) -> list[Task]: ...

    @abstractmethod
    def splits(self) -> dict[str, int]:
        """How many tasks each split has."""

    def _unknown(self, task_id: str) -> TaskError:
        hint = "`rollmill tasks list RUN.toml` lists all ids"
        return TaskError(f"the task set {self.name!r} has no task {task_id!r}", hint=hint)


class ListedTasks(FiniteTasks):
    """Tasks by id. `problems` are logged, and the other tasks are used."""

    def __init__(self, tasks: Iterable[Task], problems: Sequence[str] = ()) -> None:
        self.tasks: dict[str, Task] = {}
        problems = list(problems)
        for task in tasks:
            if task.id in self.tasks:
                problems.append(f"task {task.id!r}: another task has the same id; rename one of them")
            else:
                self.tasks[task.id] = task
        self._tell(problems, len(self.tasks))

    def train(self, seed: int) -> Iterator[Task]:
        ids = self.train_ids()
        return self._epochs(len(ids), lambda place: self.tasks[ids[place]], seed)

    def train_ids(self) -> list[str]:
        return sorted(task.id for task in self.tasks.values() if task.split == TRAIN)

    def listed(self) -> Iterable[Task]:
        return self.tasks.values()

    def _held(self, split: str, count: int) -> list[Task]:
        found = [task for task in self.tasks.values() if task.split == split]
        return sorted(found, key=lambda task: (digest("order", task.id), task.id))[:count]

    def get(self, task_id: str) -> Task:
        try:
            return self.tasks[task_id]
        except KeyError:
            raise self._unknown(task_id) from None

    def splits(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for task in self.tasks.values():
            counts[task.split] = counts.get(task.split, 0) + 1
        return counts


def _shuffled(count: int, task: Callable[[int], Task], seed: int, epoch: int, start: int) -> Iterator[Task]:
    while True:
        order = array("I", range(count))
        random.Random(f"{seed} {epoch}").shuffle(order)
        yield from map(task, itertools.islice(order, start, None))
        epoch, start = epoch + 1, 0


def digest(purpose: str, task_id: str) -> float:
    """A number from 0 to 1 that follows from an id. Another purpose gives another number."""
    drawn = hashlib.blake2b(f"{purpose} {task_id}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(drawn) / 2**64
