"""Task: what the agent is asked, which machine image it starts on, how it is graded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Task:
    """`grading` never enters a machine that the agent can touch; only the grader reads it."""

    id: str
    family: str
    split: str  # train | heldout | heldout_family
    prompt: str  # the user message
    image: str  # name of a machine image
    files: Mapping[str, str] = field(
        default_factory=dict
    )  # written over the image; paths relative to the work directory
    submission: Sequence[str] = ()  # paths taken out of the machine for grading
    grading: Mapping[str, Any] = field(default_factory=dict)


class TaskSet(Protocol):
    """A named, reproducible source of tasks."""

    name: str

    def train(self, seed: int) -> Iterator[Task]:
        """An endless stream of training tasks; the same seed gives the same stream."""
        ...

    def heldout(self, split: str, count: int) -> list[Task]:
        """Evaluation tasks that share no parameters with any training task."""
        ...

    def get(self, task_id: str) -> Task:
        """The task with this id, rebuilt from the id alone."""
        ...
