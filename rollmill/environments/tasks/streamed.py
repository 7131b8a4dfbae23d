"""StreamedTasks: a file with one task per line, of which only an index is in memory, 44 bytes per task. One pass
over the file makes it; a task is read when it is asked for.

The first `CHECKED` lines are read as tasks in this pass, so that a file of the wrong kind is told at once. Of the lines
after them it looks at what the index needs. What else is wrong with such a line is a TaskError with the file and the
line, when the task is asked for. `listed` reads all of them and adds what is wrong to `problems`.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from rollmill.environments.task import Task
from rollmill.environments.tasks.lines import Parsed, bounded, lines_of, open_lines, problem_at
from rollmill.environments.tasks.listed import TRAIN, FiniteTasks, digest
from rollmill.environments.tasks.task_splits import Splits, TaskFileConfig
from rollmill.environments.train_index import TrainIndex
from rollmill.errors import TaskError
from rollmill.storage.fetched import local_path

CHECKED = 10_000


class Head(NamedTuple):
    """What the index needs of a line."""

    id: str
    split: str | None  # that the line names itself
    family: str

    @classmethod
    def of(cls, parsed: Parsed) -> Head:
        task, own = parsed
        return cls(task.id, own, task.family)


class StreamedTasks(FiniteTasks):
    """`parse` reads a whole line. `glance` reads no more of it than the index needs, or raises what `parse` would."""

    def __init__(
        self, config: TaskFileConfig, parse: Callable[[bytes], Parsed], glance: Callable[[bytes], Head]
    ) -> None:
        self._path, self._parse = Path(local_path(config.path)), parse
        self._file = open_lines(self._path)  # stays open: a file that is replaced can be read on
        weakref.finalize(self, self._file.close)
        found = _Pass(Splits(config))
        found.read(self._path, self._file, lambda line, few: Head.of(parse(line)) if few else glance(line))
        kept_T, by_id_T = found.ordered(self._path)
        self._index(found, kept_T, by_id_T)
        self._tell([text for _, text in sorted(found.problems)] + list(found.rule.unmet()), len(kept_T))

    def _index(self, found: _Pass, kept_T: np.ndarray, by_id_T: np.ndarray) -> None:
        """Keep what is needed to find and read a task. T: in the order of the file; `by_id_T`: in that of their ids."""
        self._line_T, self._start_T, self._size_T = (
            np.array(column)[kept_T] for column in (found.line, found.start, found.size)
        )
        self._split_T, self._names = np.array(found.split)[kept_T], list(found.splits)
        order_T, split_T = np.array(found.order)[kept_T], self._split_T[by_id_T]
        self._by_split = {}
        for number, name in enumerate(self._names):
            own_T = by_id_T[split_T == number]
            if name != TRAIN:  # an order that does not change when tasks are added
                own_T = own_T[np.argsort(order_T[own_T], kind="stable")]
            self._by_split[name] = own_T
        self._train_T = self._by_split.get(TRAIN, by_id_T[:0])
        self._family_T = _by_appearance(np.array(found.family)[kept_T][self._train_T])
        self._rank_T = np.full(len(self._line_T), -1, np.int32)
        self._rank_T[self._train_T] = np.arange(len(self._train_T), dtype=np.int32)
        digest_T = np.array(found.digest)[kept_T]
        self._by_digest_T = np.argsort(digest_T).astype(np.int32)
        self._digests = digest_T[self._by_digest_T]

    def train(self, seed: int) -> Iterator[Task]:
        return self.train_from(seed, 0)

    def train_from(self, seed: int, start: int) -> Iterator[Task]:
        return self._epochs(len(self._train_T), self._train, seed, start)

    def train_ids(self) -> list[str]:
        """Reads every training task: samplers that need no ids ask `by_rank`."""
        return [self._train(rank).id for rank in range(len(self._train_T))]

    def by_rank(self) -> TrainIndex:
        return TrainIndex(self._family_T, self._train, self._rank)

    def listed(self) -> Iterator[Task]:
        """In the order of the file. Tasks that cannot be read are left out and told in `problems`."""
        for place in range(len(self._line_T)):
            try:
                yield self._read(place)
            except TaskError as error:
                if (text := problem_at("", error)) not in self.problems:
                    self.problems.append(text)

    def _held(self, split: str, count: int) -> list[Task]:
        return [self._read(place) for place in self._by_split.get(split, ())[:count]]

    def get(self, task_id: str) -> Task:
        for place in self._places(task_id):
            if (task := self._read(place)).id == task_id:
                return task
        raise self._unknown(task_id)

    def splits(self) -> dict[str, int]:
        return {name: len(own_T) for name, own_T in self._by_split.items() if len(own_T)}

    def _places(self, task_id: str) -> list[int]:
        """Where a task with this id can be: at one place, or at none."""
        wanted = np.uint64(_digest(task_id))
        first, end = (int(np.searchsorted(self._digests, wanted, side)) for side in ("left", "right"))
        return [int(place) for place in self._by_digest_T[first:end]]

    def _rank(self, task_id: str) -> int | None:
        places = self._places(task_id)
        if len(places) > 1:  # two ids with one digest
            places = [place for place in places if self._read(place).id == task_id]
        return int(self._rank_T[places[0]]) if places and self._rank_T[places[0]] >= 0 else None

    def _train(self, rank: int) -> Task:
        return self._read(int(self._train_T[rank]))

    def _read(self, place: int) -> Task:
        line = os.pread(self._file.fileno(), int(self._size_T[place]), int(self._start_T[place]))
        where = f"{self._path}:{self._line_T[place]}"
        try:
            task, _ = self._parse(line)
        except TaskError as error:
            raise TaskError(f"{where}: {error.message}", hint=error.hint) from None
        if place not in self._places(task.id):
            hint = "the file was changed while it was in use; write a new file and move it to its place"
            raise TaskError(f"{where} has become another task, {task.id!r}", hint=hint)
        return replace(task, split=self._names[self._split_T[place]])


class _Pass:
    """The one pass over a file. Ids are in memory while it runs, to put them in order."""

    def __init__(self, rule: Splits) -> None:
        self.rule, self.problems = rule, list[tuple[int, str]]()
        self.ids: list[str] = []
        self.line, self.start, self.size = array("I"), array("Q"), array("I")
        self.split, self.family, self.digest, self.order = array("I"), array("I"), array("Q"), array("d")
        self.splits, self._families = dict[str, int](), dict[str, int]()

    def read(self, path: Path, file: BinaryIO, head: Callable[[bytes, bool], Head]) -> None:
        for number, start, line in lines_of(file):
            try:
                found = head(bounded(line), number <= CHECKED)
                split = self.rule.split_of(found.id, found.split)
            except TaskError as error:
                self.problems.append((number, problem_at(f"{path}:{number}: ", error)))
                continue
            assert line is not None
            self.ids.append(found.id)
            self.line.append(number)
            self.start.append(start)
            self.size.append(len(line))
            self.split.append(self.splits.setdefault(split, len(self.splits)))
            self.family.append(self._families.setdefault(found.family, len(self._families)))
            self.digest.append(_digest(found.id))
            self.order.append(digest("order", found.id))

    def ordered(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        """What is kept, which is the first of several tasks with one id; and its order by id."""
        kept = array("i")
        for place in sorted(range(len(self.ids)), key=self.ids.__getitem__):
            if kept and self.ids[kept[-1]] == self.ids[place]:
                text = f"task {self.ids[place]!r} is also at {path}:{self.line[kept[-1]]}"
                error = TaskError(text, hint="give one of them another id")
                self.problems.append((self.line[place], problem_at(f"{path}:{self.line[place]}: ", error)))
            else:
                kept.append(place)
        self.ids.clear()
        kept_T = np.sort(np.array(kept, np.int32))
        return kept_T, np.searchsorted(kept_T, np.array(kept, np.int32)).astype(np.int32)


def _digest(task_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(task_id.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def _by_appearance(family_T: np.ndarray) -> np.ndarray:
    """The same families, numbered by where each comes first."""
    _, first_F, number_T = np.unique(family_T, return_index=True, return_inverse=True)
    renamed_F = np.empty(len(first_F), np.int32)
    renamed_F[np.argsort(first_F)] = np.arange(len(first_F), dtype=np.int32)
    return renamed_F[number_T]
