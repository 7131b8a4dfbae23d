"""Summaries: long work in a short window.

When a context is nearly full, the harness asks the model to summarise its own work. The episode goes on in a fresh
context that begins with the task, the number of summaries so far, and the summary:

    [task | answer, result, … | request | summary]
    [task, summary 1 | answer, result, … | request | summary]
    [task, summary 2 | answer, result, … ]

The first request of a fresh context declares its cause to the gateway, which records a chain of segments. The reward of
the episode reaches every summary of the chain (training/rl/credit.py), so the model learns what to keep.

A tool result may fill the window at once. Then the last results are cut, and the summary is asked for in their place.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from rollmill.config import Config
from rollmill.environments.harnesses import tools

Messages = list[dict[str, Any]]
CAUSE = {"x-rollmill-cause": "summary"}
_CUT_RESULT = 100  # characters that are left of a tool result that did not fit
_CHARACTERS_PER_TOKEN = 3  # of tool results, which no answer has counted yet; an estimate on the safe side


class SummaryConfig(Config):
    """How an episode goes on when its context is nearly full."""

    at: int = Field(
        0,
        ge=0,
        description="Tokens of context from which on the model is asked for a summary. 0 derives it from the model's "
        "window: what leaves room for one more tool result, one more answer and the summary, but at least a quarter.",
    )
    most: int = Field(1000, ge=1, description="Most summaries in one episode. After that it ends when its context is.")
    request: str = Field(
        "Please summarise your work so far: what you found, what you changed, your plan, and what remains to be done. "
        "Your next context begins with the task and this summary, and nothing else.",
        min_length=1,
        description="The message that asks the model for a summary.",
    )
    resume: str = Field(
        "\n\nYou have worked on this before. This is your summary number {number}:\n\n{summary}",
        min_length=1,
        description="What is added to the task when a fresh context begins. `{summary}` and `{number}` are replaced.",
    )


class Contexts:
    """The contexts of one episode. With `config` None there is one, and it ends the episode when it is full."""

    def __init__(self, config: SummaryConfig | None, first: Messages, at: int | None, max_tokens: int) -> None:
        """`first`: the messages that every context begins with. `at`: tokens from which on a summary is asked for;
        None: only when the context is full. `max_tokens`: of one answer."""
        self._config = config
        self._first = first
        self._max_tokens = max_tokens
        self._at = at
        self.messages: Messages = list(first)
        self.summaries = 0
        self.asked = False  # the next answer is a summary
        self._fresh = False

    def save(self) -> dict[str, Any]:
        """What `restore` needs in another process."""
        kept = {"messages": self.messages, "summaries": self.summaries}
        return {**kept, "asked": self.asked, "fresh": self._fresh}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.messages, self.summaries = list(state["messages"]), int(state["summaries"])
        self.asked, self._fresh = bool(state["asked"]), bool(state["fresh"])

    @property
    def headers(self) -> Mapping[str, str]:
        """What the next request has to declare."""
        return CAUSE if self._fresh else {}

    def take(self, choice: Mapping[str, Any]) -> None:
        """Begin a fresh context with this summary. Whatever the model wrote is its summary, also nothing."""
        assert self._config is not None and self.asked
        content = choice["message"].get("content")
        self.summaries += 1
        self.asked, self._fresh = False, True
        text = content if isinstance(content, str) else ""
        self.messages = resumed(self._first, self._config.resume, text, self.summaries)

    def add(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self._fresh = False

    def check(self, choice: Mapping[str, Any]) -> None:
        """Ask for a summary if the context has reached the threshold with `choice` and its tool results."""
        tokens = _count(choice, "total_tokens")
        if self._config is None or self._at is None or tokens is None:
            return
        results = itertools.takewhile(lambda message: message.get("role") == "tool", reversed(self.messages))
        tokens += sum(len(message["content"]) for message in results) // _CHARACTERS_PER_TOKEN
        if tokens >= self._at:
            self._ask()

    def relieve(self, choice: Mapping[str, Any] | None) -> bool:
        """Ask for a summary after the context turned out to be full. False if that cannot help.

        `choice` is an answer that was cut short, or None if there was no room for any. A cut answer is dropped.
        """
        if self._config is None or self.summaries >= self._config.most:
            return False
        if choice is not None and (_count(choice, "completion_tokens") or self._max_tokens) >= self._max_tokens:
            return False  # the answer itself was too long
        if self.asked:
            self.messages.pop()
        if not self._cut_results() and choice is None:
            return False
        self._ask()
        return self.asked

    def go_on(self, choice: Mapping[str, Any]) -> bool:
        """Ask for a summary of an answer that was cut short. False if there may be none."""
        if self._config is None or self.summaries >= self._config.most:
            return False
        self.add(choice["message"])
        self._ask()
        return True

    def _ask(self) -> None:
        assert self._config is not None
        if self.summaries < self._config.most:
            self.add({"role": "user", "content": self._config.request})
            self.asked = True

    def _cut_results(self) -> bool:
        """Cut the tool results that follow the last answer. True if one became shorter."""
        shorter = False
        for index in reversed(range(len(self._first), len(self.messages))):
            message = self.messages[index]
            if message.get("role") != "tool":
                break
            text = tools.cut(message["content"], _CUT_RESULT)
            shorter |= len(text) < len(message["content"])
            self.messages[index] = {**message, "content": text}
        return shorter


def derived_threshold(window: int | None, max_tokens: int, max_result: int) -> int | None:
    """Leaves room for one more tool result of `max_result` characters, one more answer and the summary. Uses at least a
    quarter of the window. None if the window is not known."""
    if window is None:
        return None
    return max(window // 4, window - 2 * max_tokens - max_result // _CHARACTERS_PER_TOKEN)


def resumed(first: Messages, resume: str, summary: str, number: int) -> Messages:
    """The first messages of a fresh context. The summary is part of the last user message: many chat templates
    refuse two user messages in a row."""
    text = resume.replace("{number}", str(number)).replace("{summary}", summary)
    *before, last = first
    if last["role"] == "user" and isinstance(last["content"], str):
        return [*before, {**last, "content": last["content"] + text}]
    return [*first, {"role": "user", "content": text.lstrip()}]


def _count(choice: Mapping[str, Any], name: str) -> int | None:
    usage = choice.get("usage")
    count = usage.get(name) if isinstance(usage, Mapping) else None
    return count if isinstance(count, int) else None
