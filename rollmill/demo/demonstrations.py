"""Transcripts to mid-train on: a scripted agent (the teacher) at work on training tasks, and plain generated code.

The teacher uses its tools without fault but is wrong on purpose: it misreads some operators, mostly in the same way
every time. A model that imitates it perfectly is wrong as often as it is (`teacher_solve_rate`), however long it is
mid-trained. Reinforcement learning finds by trial what the teacher does not know. (Uniform noise would not do: the most
likely answer would already be right.)

Transcripts are rendered with the calls that the gateway makes during a real session, so both have the same tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pydantic import Field

from rollmill.chat.format import ChatFormat, Message, assistant_message
from rollmill.chat.rendered_conversation import render_conversation
from rollmill.chat.tokenizer import Tokenizer
from rollmill.config import Config
from rollmill.demo.coding_tools import OK, render_read, render_run, tool_schemas
from rollmill.demo.functions import NUMBERS, OPERATORS, Function
from rollmill.demo.micro_repos import MAIN, Repository, draw_repository, repository_of
from rollmill.environments.task import Task
from rollmill.training.pretraining.source import Document, Documents, SourceContext


@dataclass(frozen=True)
class Habits:
    """How often the teacher is right, and how it goes wrong. All numbers are probabilities."""

    weak: tuple[str, ...] = ("divide", "remainder", "xor", "and")
    right_when_weak: float = 0.15
    right_otherwise: float = 0.85
    misconception: float = 0.8  # a wrong operator is the confusable one; otherwise it is any other
    right_number: float = 0.97
    runs_tests: float = 0.85
    tries_again: float = 0.3  # after a failing run; otherwise it gives up
    right_again: float = 0.35  # the second try is right; it never repeats the first


PLAIN_CODE_SHARE = 0.1
QUESTION = "which?"


@dataclass
class Transcript:
    """A session as messages, one call after the other."""

    repository: Repository
    messages: list[Message] = field(default_factory=list)

    def call(self, name: str, **arguments: str | int) -> None:
        self.messages.append(assistant_message(None, [(name, json.dumps(arguments))]))

    def result(self, text: str) -> None:
        call_id = self.messages[-1]["tool_calls"][0]["id"]
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def look(self) -> None:
        """Find out what f should do."""
        if self.repository.shape.documented:
            self.call("read", path=MAIN)
            self.result(render_read(self.repository.main))
        else:
            self.call("run")
            self.result(render_run(1, self.repository.failure.encode()))

    def edit(self, attempt: Function) -> None:
        self.call("edit", path=MAIN, line=self.repository.edit_line, text=f"return {attempt.code}")
        self.result(OK)

    def run(self, attempt: Function) -> bool:
        """Whether the visible case passes with `attempt` in place."""
        x = self.repository.visible
        passed = attempt.value(x) == self.repository.function.value(x)
        self.call("run")
        self.result(render_run(0, b"") if passed else render_run(1, self.repository.failure.encode()))
        return passed


def demonstrate(repository: Repository, generator: random.Random, habits: Habits) -> tuple[list[Message], Function]:
    """One session of the teacher, from the prompt to `done`, and the function it hands in."""
    transcript = Transcript(repository, [{"role": "user", "content": repository.shape.prompt}])
    transcript.look()
    attempt = misread(repository.function, generator, habits)
    transcript.edit(attempt)
    runs = generator.random() < habits.runs_tests
    if runs and not transcript.run(attempt) and generator.random() < habits.tries_again:
        attempt = _second_try(repository.function, attempt, generator, habits)
        transcript.edit(attempt)
        transcript.run(attempt)
    transcript.call("done")
    return transcript.messages, attempt


def misread(function: Function, generator: random.Random, habits: Habits) -> Function:
    """The function as the teacher understands it."""
    for index, step in enumerate(function.steps):
        right = habits.right_when_weak if step.operator.name in habits.weak else habits.right_otherwise
        if generator.random() >= right:
            confused = generator.random() < habits.misconception
            other = OPERATORS[step.operator.confusable] if confused else generator.choice(function.rivals(index))
            step = replace(step, operator=other)
        if generator.random() >= habits.right_number:
            step = replace(step, number=generator.choice(NUMBERS))
        function = function.with_step(index, step)
    return function


def _second_try(function: Function, first: Function, generator: random.Random, habits: Habits) -> Function:
    if first != function and generator.random() < habits.right_again:
        return function
    index = generator.randrange(len(first.steps))
    return first.with_step(index, replace(first.steps[index], operator=generator.choice(first.rivals(index))))


def teacher_solve_rate(tasks: Sequence[Task], habits: Habits, attempts: int = 64) -> float:
    """The share of sessions in which the teacher solves these tasks: the ceiling of perfect imitation."""
    solved = 0
    for task in tasks:
        repository, generator = repository_of(task.id), random.Random(f"teacher {task.id}")
        for _ in range(attempts):
            _, handed_in = demonstrate(repository, generator, habits)
            solved += all(handed_in.value(x) == repository.function.value(x) for x in repository.hidden)
    return solved / (attempts * len(tasks))


def ask_back(repository: Repository) -> list[Message]:
    """A session of the teacher that ends with a question instead of an edit."""
    transcript = Transcript(repository, [{"role": "user", "content": repository.shape.prompt}])
    transcript.look()
    return [*transcript.messages, assistant_message(QUESTION, [])]


class DemonstrationConfig(Config):
    asks: float = Field(
        0.0,
        ge=0,
        le=1,
        description="How often the teacher ends with a question instead of an edit: a habit to unlearn.",
    )


class Demonstrations:
    """The source that the demo's mid-training reads: sessions of the teacher, and some plain code."""

    def __init__(self, config: DemonstrationConfig) -> None:
        self._asks = config.asks

    def documents(self, context: SourceContext) -> DemonstrationStream:
        return DemonstrationStream(context.format, context.tokenizer, context.seed, asks=self._asks)


@dataclass(frozen=True)
class DemonstrationStream(Documents):
    """An endless stream of documents per seed. Each depends on its number alone, so a stream can resume anywhere."""

    format: ChatFormat
    tokenizer: Tokenizer
    seed: int
    habits: Habits = Habits()
    asks: float = 0.0
    count: None = None

    def read(self, number: int, epoch: int = 0) -> Document:
        generator = random.Random(f"demonstration {self.seed} {number}")
        repository = draw_repository("train", generator)
        if generator.random() < PLAIN_CODE_SHARE:
            tokens = self.tokenizer.encode(plain_code(repository.function))
            return Document(tokens, [True] * len(tokens))
        if self.asks and generator.random() < self.asks:
            return render_transcript(ask_back(repository), self.format)
        messages, _ = demonstrate(repository, generator, self.habits)
        return render_transcript(messages, self.format)


def plain_code(function: Function) -> str:
    """Code without words: it teaches the language, and nothing about what a phrase means."""
    return f"def f(x):\n    return {function.code}\n"


def render_transcript(messages: list[Message], format: ChatFormat) -> Document:
    """The session's tokens as the gateway makes them. Only answers are learnt."""
    rendered = render_conversation(messages, tool_schemas(), format)
    return Document(rendered.tokens, rendered.learnt)
