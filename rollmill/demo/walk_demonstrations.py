"""Transcripts of walks to mid-train on: a scripted agent (the teacher) that reads file after file and sums up.

Its tool calls are without fault, its summaries are wrong on purpose. A summary says which file comes next, and the key:

    4 key22                                        short
    4 key22 and the file before it said dust38     wordy; if not `misleads`, "it" instead of the last word

Once it has a key, it mostly takes the newest dust for it (`keeps`). A model that imitates it perfectly solves as few
tasks as it does (`walk_solve_rate`). It is wordy more often than not, which costs tokens and gains nothing.

Some documents show a walk in a context whose older files were cut off instead (`TRUNCATED_SHARE`). So the model also
knows what to do under a harness that cuts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pydantic import Field

from rollmill.chat.format import ChatFormat, Message, assistant_message
from rollmill.chat.formats.compact import SPECIAL_TOKENS
from rollmill.chat.rendered_conversation import render_conversation
from rollmill.chat.tokenizer import Tokenizer, train_tokenizer
from rollmill.config import Config
from rollmill.demo.coding_tools import render_read, tool_schemas
from rollmill.demo.walks import FILES, INSTRUCTION, NAME, Walk
from rollmill.environments.harnesses.summary import resumed
from rollmill.training.pretraining.source import Document, Documents, SourceContext

REQUEST, RESUME = "sum", " {number} {summary}"  # as in walks.toml
NOTHING = "none"
SESSIONS = 400  # that the tokenizer is trained on
TRUNCATED_SHARE = 0.15


class WalkHabits(Config):
    """What is wrong with the teacher. Numbers are probabilities."""

    keeps: float = Field(0.45, ge=0, le=1, description="How often the teacher keeps the key that it has, at each file.")
    wordy: float = Field(0.7, ge=0, le=1, description="How often its summary says more than it needs to.")
    misleads: bool = Field(
        True,
        description="Whether the words that a summary does not need name another number, which is easily taken for the "
        "key. If not, they say nothing: then only a length reward has a reason to leave them out.",
    )


def demonstrate_walk(walk: Walk, draw: random.Random, habits: WalkHabits) -> list[list[Message]]:
    """One session of the teacher: the messages of each context."""
    contexts, summary, known = [], "", NOTHING
    for number, line in enumerate(walk.files, 1):
        known = _remembered(known, line, draw, habits)
        messages = [*start_of(summary, number - 1), *read_file(number, line), {"role": "user", "content": REQUEST}]
        more = f" and the file before it said {line if habits.misleads else 'it'}"
        wordy = more if draw.random() < habits.wordy else ""
        summary = f"{known} {line}" if number == FILES else f"{number + 1} {known}{wordy}"
        contexts.append([*messages, assistant_message(summary, [])])
    return [*contexts, [*start_of(summary, FILES), assistant_message(summary, [])]]


def demonstrate_cut_walk(walk: Walk, last: int) -> list[Message]:
    """A context without summaries, of which all but the file before `last` was cut off; after the last file it ends
    with what is left to answer."""
    messages, files = start_of("", 0), walk.files
    for number in range(max(1, last - 1), last + 1):
        messages += read_file(number, files[number - 1])
    if last < FILES:
        return [*messages, *read_file(last + 1, files[last])[:1]]
    key = files[-2] if files[-2].startswith("key") else NOTHING
    return [*messages, assistant_message(f"{key} {files[-1]}", [])]


def read_file(number: int, line: str) -> list[Message]:
    call = assistant_message(None, [("read", json.dumps({"path": str(number)}))])
    result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": render_read(line)}
    return [call, result]


def start_of(summary: str, number: int) -> list[Message]:
    first = [{"role": "user", "content": INSTRUCTION}]
    return resumed(first, RESUME, summary, number) if number else first


def _remembered(known: str, line: str, draw: random.Random, habits: WalkHabits) -> str:
    """The key as the teacher understands it after a file with this line."""
    if line.startswith("dust") and known != NOTHING:
        return known if draw.random() < habits.keeps else line.replace("dust", "key")
    return line if line.startswith("key") else known


def walk_solve_rate(walks: Sequence[Walk], habits: WalkHabits, attempts: int = 64) -> float:
    """The share of sessions in which the teacher's answer is right: the ceiling of perfect imitation."""
    solved = 0
    for walk in walks:
        draw = random.Random(f"teacher {walk.id}")
        for _ in range(attempts):
            solved += demonstrate_walk(walk, draw, habits)[-1][-1]["content"] == walk.answer
    return solved / (attempts * len(walks))


class WalkDemonstrations:
    """The source that mid-training reads. A document is one context of a session."""

    def __init__(self, config: WalkHabits) -> None:
        self._habits = config

    def documents(self, context: SourceContext) -> WalkStream:
        return WalkStream(context.format, context.seed, self._habits)


@dataclass(frozen=True)
class WalkStream(Documents):
    """An endless stream of documents per seed. Each depends on its number alone, so a stream can resume anywhere."""

    format: ChatFormat
    seed: int
    habits: WalkHabits = field(default_factory=WalkHabits)
    count: None = None

    def read(self, number: int, epoch: int = 0) -> Document:
        draw = random.Random(f"{NAME} demonstration {self.seed} {number}")
        walk, ignored = Walk(f"train/{draw.random()}"), range(0)
        if draw.random() < TRUNCATED_SHARE:
            context = demonstrate_cut_walk(walk, draw.randint(1, FILES))
            ignored = range(len(context) - 1)  # a walk never begins there: only its last answer is learnt
        else:
            context = draw.choice(demonstrate_walk(walk, draw, self.habits))
        rendered = render_conversation(context, tool_schemas(), self.format, ignored)
        return Document(rendered.tokens, rendered.learnt)


def walk_tokenizer(vocab_size: int) -> Tokenizer:
    return Tokenizer(train_tokenizer(walk_texts(SESSIONS), vocab_size, SPECIAL_TOKENS))


def walk_texts(sessions: int) -> Iterator[str]:
    """Every text of `sessions` sessions, in the pieces that a chat format passes to `encode`."""
    for index in range(sessions):
        draw = random.Random(f"{NAME} tokenizer {index}")
        for messages in demonstrate_walk(Walk(f"train/{index}"), draw, WalkHabits()):
            for message in messages:
                yield message["content"] or "read"
