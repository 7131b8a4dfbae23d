"""Sampler: chooses the task of the next group. It sees the results of committed steps only, so that the same seed gives
the same choices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollmill.environments.task import Task, TaskSet

RECENT = 16  # attempts


@dataclass
class TaskResults:
    """What came of the attempts at one task so far."""

    attempts: int = 0  # that were graded
    solved: int = 0
    turns: int = 0  # answers of the model, in all attempts
    tokens: int = 0  # sampled, in all attempts
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))  # rewards, the newest last

    def add(self, *, reward: float, solved: bool, turns: int, tokens: int) -> None:
        self.attempts += 1
        self.solved += solved
        self.turns += turns
        self.tokens += tokens
        self.recent.append(reward)


class Results(dict[str, TaskResults]):
    """Results by task id. `log` has the ids in the order in which results came, so that a sampler looks at new ones
    only."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def of(self, id: str) -> TaskResults:
        """Where to add a result of this task."""
        self.log.append(id)
        return self.setdefault(id, TaskResults())


@dataclass(frozen=True)
class Draw:
    """What a choice may depend on."""

    index: int  # of the group in its stage, from 0
    seed: int  # of the run
    progress: float  # the share of the stage's steps that are committed, 0 to 1; 0 if it has no end
    results: Mapping[str, TaskResults]  # task id → results; tasks without any are absent


class Sampler(ABC):
    """Base class of samplers: `name` and `choose` are needed."""

    name: str

    def check(self, tasks: TaskSet) -> None:
        """Called before a run starts. ConfigError if it cannot choose from these tasks."""

    @abstractmethod
    def choose(self, tasks: TaskSet, draw: Draw) -> Task:
        """The task of group `draw.index`. The same `draw` gives the same task, in any process. It should take
        milliseconds: the run is locked meanwhile, so that no other dispatcher starts the same group."""
