"""What learned summaries are compared with: harnesses that do something else when the context is nearly full.

    Truncating   keeps the task and the newest tool calls with their results, as many as the window holds
    FixedNote    writes the summary itself, by a fixed rule that does not know what matters: the number of the next
                 file, and what the newest files said, as many as a summary may hold

Both are kinds for [harness], with the settings of the coding harness. `BaselineWalks` is a source of documents: walks
under these harnesses, by a teacher without fault. So the model knows them before RL. `reachable` tells what no model
could exceed under them but by guessing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rollmill.chat.format import ChatFormat, Message, assistant_message
from rollmill.chat.rendered_conversation import render_conversation
from rollmill.demo.walk_demonstrations import NOTHING, read_file, start_of
from rollmill.demo.walks import FILES, Walk
from rollmill.environments.harness import HarnessResult
from rollmill.environments.harnesses.coding import CodingHarness, HarnessConfig
from rollmill.environments.harnesses.model import Asking
from rollmill.environments.harnesses.summary import Contexts, resumed
from rollmill.environments.harnesses.tools import tool_schemas
from rollmill.environments.harnesses.turns import run_turns, start
from rollmill.environments.task import Task
from rollmill.machines.machine import Machine
from rollmill.training.pretraining.source import Document, SourceContext
from rollmill.types import Sampling

# a call and its result have 9 tokens, of a window of 44 with an answer of 6. A note has what a summary of the model may
# have, 14 tokens: five files and the number of the next one
KEPT_CALLS, NOTED_FILES = 3, 5
LAST_NOTE = NOTED_FILES + 1  # needs no number


def reachable(walk: Walk, files: int) -> bool:
    """Whether the key is among the last `files` files: before them, neither harness has it at the end."""
    return any(line.startswith("key") for line in walk.files[-files:])


def note_of(said: Sequence[str]) -> str:
    """The fixed note after these files."""
    if said[-1].startswith("end"):
        return " ".join(said[-LAST_NOTE:])
    return " ".join([str(len(said) + 1), *said[-NOTED_FILES:]])


class TruncatedContexts(Contexts):
    def _ask(self) -> None:
        calls = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        if len(calls) > KEPT_CALLS:
            self.messages = [*self._first, *self.messages[calls[-KEPT_CALLS] :]]
            self._fresh = True  # a chain, so that every call learns


class NotedContexts(Contexts):
    said: tuple[str, ...] = ()

    def _ask(self) -> None:
        assert self._config is not None
        newest = " ".join(line.partition(" ")[2] for line in self.messages[-1]["content"].splitlines())
        self.said = (*self.said, newest)
        self.summaries += 1
        self.messages = resumed(self._first, self._config.resume, note_of(self.said), self.summaries)
        self._fresh = True


class Truncating(CodingHarness):
    name = "truncating"
    made: type[Contexts] = TruncatedContexts

    def __init__(self, config: HarnessConfig) -> None:
        super().__init__(config)

    async def run(
        self, task: Task, machine: Machine, *, base_url: str, api_key: str, sampling: Sampling
    ) -> HarnessResult:
        asking = Asking(self._model, base_url, api_key, self.config, sampling, self._schemas)
        contexts = await asking.contexts(start(task, self.config.system_prompt), self.config.max_tool_output)
        return await run_turns(
            asking,
            lambda call: self._call(machine, call),
            self.made(contexts._config, contexts._first, contexts._at, sampling.max_tokens),
            max_turns=self.config.max_turns,
            max_tool_output=self.config.max_tool_output,
        )


class FixedNote(Truncating):
    name = "fixed_note"
    made = NotedContexts


def demonstrate_note(walk: Walk, read: int) -> list[Message]:
    """The context after `read` files under the fixed note, with the next answer."""
    return [*start_of(note_of(walk.files[:read]), read), _next(walk, read, LAST_NOTE)]


def demonstrate_truncation(walk: Walk, read: int) -> list[Message]:
    """The context after `read` files under truncation, with the next answer."""
    messages = start_of("", 0)
    for number in range(max(1, read - KEPT_CALLS + 1), read + 1):
        messages += read_file(number, walk.files[number - 1])
    return [*messages, _next(walk, read, KEPT_CALLS)]


def _next(walk: Walk, read: int, files: int) -> Message:
    if read < FILES:
        return read_file(read + 1, walk.files[read])[0]
    return assistant_message(walk.answer if reachable(walk, files) else f"{NOTHING} {walk.files[-1]}", [])


class BaselineWalks:
    """A document is one context under one of the two harnesses; only its last answer is learnt."""

    def documents(self, context: SourceContext) -> BaselineStream:
        return BaselineStream(context.format, context.seed)


@dataclass(frozen=True)
class BaselineStream:
    """An endless stream of documents per seed. Each depends on its number alone."""

    format: ChatFormat
    seed: int
    count: None = None

    def digests(self) -> None:
        return None

    def read(self, number: int, epoch: int = 0) -> Document:
        draw = random.Random(f"baselines {self.seed} {number}")
        walk = Walk(f"train/{draw.random()}")
        read = FILES if draw.random() < 0.5 else draw.randint(1, FILES - 1)  # the last answer is the hard one
        context = draw.choice((demonstrate_note, demonstrate_truncation))(walk, read)
        rendered = render_conversation(context, tool_schemas(), self.format, range(len(context) - 1))
        return Document(rendered.tokens, rendered.learnt)
