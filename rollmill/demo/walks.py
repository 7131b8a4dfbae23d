"""Long tasks for a short window: walk through many small files, and bring back what two of them said.

    task        walk and find red
    file 1      blue31
    file 2      red22        one file has the colour that the task asks for: the key
    file 3      gold38
    …
    file 9      end35        the last file has the end
    answer      key22 end35

The window holds one file at a time, so an episode has one context per file and one for the answer. The key reaches the
answer only if every summary on the way keeps it. What is worth keeping depends on the task: the same file is the key of
one task and nothing to another. Nobody can answer before the last file: the end is not known.

A task's id says everything it is made of: SPLIT/NUMBER is a draw of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from rollmill.environments.episode import Episode
from rollmill.environments.rewards import transcript
from rollmill.environments.task import Task
from rollmill.errors import TaskError
from rollmill.types import Reward

NAME = "walks"
COLOURS = ("red", "blue", "green", "gold")
END = "end"
FILES = 9
NUMBERS = range(20, 40)  # one token each
SPLITS = ("train", "heldout")
_DRAWS = 1_000_000


@dataclass(frozen=True)
class Walk:
    id: str

    @cached_property
    def wanted(self) -> str:
        """The colour that the task asks for."""
        return random.Random(f"{NAME} colour {self.id}").choice(COLOURS)

    @cached_property
    def files(self) -> list[str]:
        """What each file says."""
        draw = random.Random(f"{NAME} {self.id}")
        others = [colour for colour in COLOURS if colour != self.wanted]
        words = [draw.choice(others) for _ in range(FILES - 1)] + [END]
        words[draw.randrange(FILES - 1)] = self.wanted
        return [f"{word}{number}" for word, number in zip(words, draw.sample(NUMBERS, FILES), strict=True)]

    def is_key(self, line: str) -> bool:
        return line.startswith(self.wanted)

    @property
    def instruction(self) -> str:
        return f"walk and find {self.wanted}"

    @property
    def answer(self) -> str:
        """The key and the end."""
        (line,) = filter(self.is_key, self.files)
        return f"{key_of(line)} {self.files[-1]}"

    @property
    def task(self) -> Task:
        return Task(
            id=self.id,
            family=NAME,
            split=self.id.partition("/")[0],
            instruction=self.instruction,
            files={str(number): f"{line}\n".encode() for number, line in enumerate(self.files, 1)},
            grading={"answer": self.answer},
        )


def key_of(line: str) -> str:
    """What a summary or an answer calls the number of this line."""
    return f"key{line[-2:]}"


class Walks:
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


class Found:
    """1 if the last answer is the key and the end."""

    name = "found"
    cannot_protect = "It compares texts: nothing that the agent leaves in its machine can change them."

    async def grade(self, episode: Episode) -> Reward:
        answers = transcript.answers(episode)
        given = transcript.text_of(answers[-1]) if answers else ""
        wanted = str(episode.task.grading["answer"])
        value = float(episode.result is not None and episode.result.stop == "answer" and given.strip() == wanted)
        return Reward(value, evidence={"given": given[:100], "wanted": wanted}, grader=self.name)
