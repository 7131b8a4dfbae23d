"""Long tasks for a short window: walk through many small files, and bring back what two of them said.

    file 1      dust31
    file 2      key22        one file has the key
    file 3      dust38
    …
    file 9      end35        the last file has the end
    answer      key22 end35

The window holds one file at a time, so an episode has one context per file and one for the answer. The key reaches the
answer only if every summary on the way keeps it. Nobody can answer before the last file: the end is not known.

A task's id says everything it is made of: SPLIT/NUMBER is a draw of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from rollmill.environments.episode import Episode
from rollmill.environments.reward import Reward
from rollmill.environments.rewards import transcript
from rollmill.environments.task import Task, TaskSet
from rollmill.errors import TaskError
from rollmill.types import Grade

NAME = "walks"
INSTRUCTION = "walk and find"
FILES = 9
NUMBERS = range(20, 40)  # of dust, keys and ends; one token each
SPLITS = ("train", "heldout")
_DRAWS = 1_000_000


@dataclass(frozen=True)
class Walk:
    id: str

    @cached_property
    def files(self) -> list[str]:
        """What each file says."""
        draw = random.Random(f"{NAME} {self.id}")
        numbers = draw.sample(NUMBERS, FILES)
        kinds = ["dust"] * (FILES - 1) + ["end"]
        kinds[draw.randrange(FILES - 1)] = "key"
        return [f"{kind}{number}" for kind, number in zip(kinds, numbers, strict=True)]

    @property
    def answer(self) -> str:
        """The key and the end."""
        return " ".join(line for line in self.files if not line.startswith("dust"))

    @property
    def task(self) -> Task:
        return Task(
            id=self.id,
            family=NAME,
            split=self.id.partition("/")[0],
            instruction=INSTRUCTION,
            files={str(number): f"{line}\n".encode() for number, line in enumerate(self.files, 1)},
            grading={"answer": self.answer},
        )


class Walks(TaskSet):
    """The task set. It has no state: tasks follow from seeds and ids."""

    name = NAME

    def train(self, seed: int) -> Iterator[Task]:
        draw = random.Random(f"{NAME} {seed}")
        while True:
            yield Walk(f"train/{draw.randrange(_DRAWS)}").task

    def heldout(self, split: str, count: int) -> list[Task]:
        if split != "heldout":
            raise TaskError(f"no held-out split {split!r}", hint="there is heldout")
        return [Walk(f"heldout/{number}").task for number in range(count)]

    def get(self, task_id: str) -> Task:
        split, _, number = task_id.partition("/")
        if split not in SPLITS or not (number.isascii() and number.isdecimal()):
            raise TaskError(f"{task_id!r} names no task of {NAME}", hint="a task is SPLIT/NUMBER, for example train/7")
        return Walk(task_id).task


class KeyAndEnd(Reward):
    """1 if the last answer is the key and the end."""

    name = "found"
    cannot_protect = "It compares texts: nothing that the agent leaves in its machine can change them."

    async def grade(self, episode: Episode) -> Grade:
        answers = transcript.answers(episode)
        given = transcript.text_of(answers[-1]) if answers else ""
        wanted = str(episode.task.grading["answer"])
        value = float(episode.result is not None and episode.result.stop == "answer" and given.strip() == wanted)
        return Grade(value, evidence={"given": given[:100], "wanted": wanted}, grader=self.name)
