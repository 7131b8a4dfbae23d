"""Why a new context begins: a sub-agent or a summary, as the client declares it or as the texts prove it. And which
answer an episode came to, as far as the client declares it.

    x-rollmill-cause: sub_agent | summary
    x-rollmill-parent: SEGMENT               whose agent called the sub-agent or was summarised; default: the latest
    x-rollmill-outcome: true                 the answer to this request is the outcome: see training/rl/credit.py

Coding agents say in headers of their own that a sub-agent asks; then it is one, unless the texts prove a summary.

Undeclared, only exact containment counts. A fresh context that contains an answer of the session, or what an answer has
between tags (<summary>…</summary>), is a summary of that answer's segment. One that contains a text from the arguments
of a tool call is a sub-agent of the segment that called. Short texts may be equal by chance and do not count.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from rollmill.chat.format import Message
from rollmill.errors import GatewayError
from rollmill.gateway.sessions.segments import OpenSegment

DeclaredCause = Literal["sub_agent", "summary"]
_CAUSE, _PARENT, _OUTCOME = "x-rollmill-cause", "x-rollmill-parent", "x-rollmill-outcome"
_OF_SUB_AGENTS = ("x-claude-code-agent-id", "x-codex-parent-thread-id")
_TAGGED = re.compile(r"<(\w+)>(.*?)</\1>", re.DOTALL)
_SHORTEST = 32  # characters
_MOST_ANSWERS = 256  # the newest ones are compared


@dataclass(frozen=True)
class Declared:
    """What a client says about a request that begins a new context."""

    cause: DeclaredCause
    parent: str | None = None  # segment; None: the latest of the session
    implied: bool = False  # what the texts prove counts more


def read_declared(headers: Mapping[str, str]) -> Declared | None:
    cause, parent = headers.get(_CAUSE), headers.get(_PARENT)
    if cause is None and parent is None:
        of_sub_agent = any(name in headers for name in _OF_SUB_AGENTS)
        return Declared("sub_agent", implied=True) if of_sub_agent else None
    if cause not in get_args(DeclaredCause):
        raise GatewayError(f"{_CAUSE} is {str(cause)[:80]!r}", hint=f"one of {', '.join(get_args(DeclaredCause))}")
    return Declared(cast(DeclaredCause, cause), parent)


def declares_outcome(headers: Mapping[str, str]) -> bool:
    said = headers.get(_OUTCOME, "false")
    if said not in ("true", "false"):
        raise GatewayError(f"{_OUTCOME} is {said[:80]!r}", hint="true or false")
    return said == "true"


def is_within(segment: OpenSegment | None, cause: DeclaredCause) -> bool:
    """Whether a segment belongs to a declared context: it began so, or branched off from one that did."""
    while segment is not None and segment.cause not in ("sub_agent", "summary"):
        segment = segment.parent
    return segment is not None and segment.cause == cause


def proven_cause(
    messages: Sequence[Message], segments: Iterable[OpenSegment]
) -> tuple[DeclaredCause, OpenSegment] | None:
    """The cause of a fresh context by what it contains, and the parent. `segments`: the newest first."""
    text = "\n".join(str(message["content"] or "") for message in messages if message["role"] != "assistant")
    if len(text) < _SHORTEST:
        return None
    answers = ((turn.answer.message, segment) for segment in segments for turn in reversed(segment.turns))
    newest = list(itertools.islice(answers, _MOST_ANSWERS))
    for message, segment in newest:
        if _contains(text, _passages(message["content"] or "")):
            return "summary", segment
    for message, segment in newest:
        if _contains(text, _argument_texts(message)):
            return "sub_agent", segment
    return None


def _passages(answer: str) -> Iterator[str]:
    """An answer, and its parts between tags: programs take the summary out of what a model wrote."""
    yield answer
    for _, inner in _TAGGED.findall(answer) if "</" in answer else ():
        yield inner


def _contains(text: str, parts: Iterable[str]) -> bool:
    return any(len(part.strip()) >= _SHORTEST and part.strip() in text for part in parts)


def _argument_texts(message: Message) -> Iterator[str]:
    for call in message.get("tool_calls") or ():
        try:
            waiting: list[Any] = [json.loads(call["function"]["arguments"])]
        except (ValueError, RecursionError):
            continue
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                yield value
            elif isinstance(value, dict | list):
                waiting += value.values() if isinstance(value, dict) else value
