"""An answer of the model with the facts about each token, and whether a client's copy of a message is the same."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollmill.chat.format import Message
from rollmill.types import FinishReason, PolicyRef, Span


@dataclass
class Answer:
    """Sampled tokens and the facts about each. `policy` indexes `policies`. Spans and routes count from the start of
    the segment. Facts of tokens become arrays: open sessions hold many, and the garbage collector would visit every
    number of a list."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    policy: Sequence[int]
    policies: list[PolicyRef]
    spans: list[Span]
    routes: list[tuple[int, np.ndarray]]  # (first position, rows)
    finish: FinishReason
    closed: bool  # ended with the token of the chat format that ends answers
    message: Message
    cached_tokens: int = 0
    stop: str | None = None  # the text that ended it, if one of the request did
    # (token, log-prob) of the most likely tokens, per token; empty if the request did not ask. Not in the record
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)  # see GenerateChunk

    def __post_init__(self) -> None:
        self.tokens, self.policy = array("i", self.tokens), array("i", self.policy)
        self.logprobs = array("d", self.logprobs)


def call_id(offset: int, number: int) -> str:
    """Of a call in the answer at this position: unique in its context, and the same after a replay."""
    return f"call_{offset}_{number}"


def same_message(recorded: Message, sent: Message) -> bool:
    """Whether a client's copy of a message equals the recorded one. Ids of calls are ignored, and clients re-format
    answers: arguments are compared as JSON, text without surrounding blanks."""
    if recorded["role"] != sent["role"]:
        return False
    same = recorded["content"] == sent["content"]
    if recorded["role"] != "assistant":
        return bool(same)
    if not same and (recorded["content"] or "").strip() != (sent["content"] or "").strip():
        return False
    mine, theirs = recorded.get("tool_calls") or [], sent.get("tool_calls") or []
    return len(mine) == len(theirs) and all(map(_same_call, mine, theirs))


def _same_call(recorded: dict[str, Any], sent: dict[str, Any]) -> bool:
    mine, theirs = recorded["function"], sent["function"]
    if mine["name"] != theirs["name"]:
        return False
    if mine["arguments"] == theirs["arguments"]:
        return True
    try:
        return bool(json.loads(mine["arguments"]) == json.loads(theirs["arguments"]))
    except (ValueError, RecursionError):
        return False
