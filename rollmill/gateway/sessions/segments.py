"""A segment while it grows. Turns are appended to it, and another segment can branch off between any two turns.

A Turn is what one request adds: the messages that were new, their tokens, and the answer with all its facts. It is also
the unit of the gateway's log, so live recording and the replay after a crash run through the same `append`.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, overload

import numpy as np
from pydantic_core import to_json

from rollmill.chat.format import Message, Tool
from rollmill.gateway.wire.answer import Answer, same_message
from rollmill.trajectories.allowed_tokens import join_kept
from rollmill.types import Cause, Segment, Span

_CARRIED_S = 5.0  # after which an answer has left the worker that it went through


@dataclass
class Turn:
    segment: str
    messages: list[Message]  # new in this turn, without the answer
    prompt: Sequence[int]  # their tokens
    answer: Answer
    # of the first turn of a segment only
    tools: list[Tool] = field(default_factory=list)
    parent: tuple[str, int] | None = None
    cause: Cause = "start"
    inherited: int = 0  # number of the parent's messages that come before `messages`

    def __post_init__(self) -> None:
        self.prompt = array("i", self.prompt)


class Mark(NamedTuple):
    """A place between two turns: the number of messages and of tokens before it."""

    messages: int
    tokens: int
    kind: Literal["start", "prompt", "answer"]  # what is before it: nothing, a generation prompt, an answer
    closed: bool = False


class OpenSegment:
    def __init__(self, first: Turn, parent: OpenSegment | None) -> None:
        self.id = first.segment
        self.cause = first.cause
        self.tools = first.tools
        self.parent = parent
        self.offset = first.parent[1] if first.parent else 0
        self._own = array("i")  # its tokens without those that it shares with its parent
        self.messages: list[Message] = parent.messages[: first.inherited] if parent else []
        # A mark of the parent is valid here if its messages and its tokens are both shared.
        self.marks: list[Mark] = [
            mark
            for mark in (parent.marks if parent else [Mark(0, 0, "start")])
            if mark.messages <= first.inherited and mark.tokens <= self.offset
        ]
        self.turns: list[Turn] = []
        self.delivered = False
        self._carrier: asyncio.BaseTransport | None = None  # see `carried_by`
        self.digested: tuple[int, hashlib.blake2b] | None = None  # (number of messages, their digest)
        self._encoded = (b"", 0)  # JSON of tokens without brackets, and their number: see `encoded_with`

    def append(self, turn: Turn) -> None:
        self.turns.append(turn)
        self.messages += turn.messages
        self._own.extend(turn.prompt)
        self._mark(Mark(len(self.messages), self.length, "prompt"))
        self.messages.append(turn.answer.message)
        self._own.extend(turn.answer.tokens)
        self._mark(Mark(len(self.messages), self.length, "answer", turn.answer.closed))
        # Replayed turns count as not delivered: the log knows that an answer was recorded, not that it arrived.
        self.delivered = False
        self._carrier = None

    def carried_by(self, transport: asyncio.BaseTransport | None) -> None:
        """The last answer went to its client through another worker. If that worker dies, the connection breaks, and
        the answer may not have arrived."""
        self._carrier = transport
        asyncio.get_running_loop().call_later(_CARRIED_S, self._forget_carrier, transport)

    def _forget_carrier(self, transport: asyncio.BaseTransport | None) -> None:
        if self._carrier is transport:
            self.delivered = self.has_arrived
            self._carrier = None

    @property
    def has_arrived(self) -> bool:
        """Whether its client has the last answer, as far as is known."""
        return self.delivered and (self._carrier is None or not self._carrier.is_closing())

    def number_of(self, answer: Answer) -> int:
        """The number of an answer among those of the segment, from 0."""
        return next(number for number, turn in enumerate(self.turns) if turn.answer is answer)

    def messages_up_to(self, number: int) -> list[Message]:
        """The conversation up to the answer with this number, which is the last of them."""
        later = sum(len(turn.messages) + 1 for turn in self.turns[number + 1 :])
        return self.messages[: len(self.messages) - later]

    @property
    def length(self) -> int:
        return self.offset + len(self._own)

    @property
    def tokens(self) -> list[int]:
        """All tokens, those shared with the parent included. A new list each time."""
        return self.slice(0, self.length)

    def slice(self, start: int, end: int) -> list[int]:
        """tokens[start:end], without a list of all. A chain of summaries may be long: only the tokens asked for are
        copied from its ancestors."""
        parts: list[array[int]] = []
        segment: OpenSegment | None = self
        while segment is not None and start < end:
            if end > segment.offset:
                parts.append(segment._own[max(start - segment.offset, 0) : end - segment.offset])
                end = segment.offset
            segment = segment.parent
        tokens: list[int] = []
        for part in reversed(parts):
            tokens += part.tolist()
        return tokens

    def encoded_with(self, prompt: Sequence[int]) -> bytes | None:
        """JSON of all tokens and `prompt`, for engines. Only tokens that are new since the last call are encoded. None
        for a branch: it would hold the tokens of its parent once more."""
        if self.parent is not None or not prompt:
            return None
        encoded, count = self._encoded
        length = self.length
        if count < length:
            encoded += (b"," if encoded else b"") + to_json(self.slice(count, length))[1:-1]
            self._encoded = encoded, length  # as one: requests are planned in threads too
        return b"[%b,%b" % (encoded, to_json(list(prompt))[1:])

    @property
    def closed(self) -> bool:
        return self.marks[-1].closed

    def shared_messages(self, messages: Sequence[Message]) -> int:
        """The number of leading messages that are equal in both."""
        count = 0
        for mine, theirs in zip(self.messages, messages, strict=False):
            if mine != theirs and not same_message(mine, theirs):
                break
            count += 1
        return count

    def build(self) -> Segment:
        """The finished record, without expert routes. Tokens shared with the parent belong to the parent: here they are
        not sampled."""
        length = self.length
        segment = Segment(
            id=self.id,
            tokens=np.array(self.tokens, np.int32),
            sampled=np.zeros(length, np.bool_),
            logprobs=np.full(length, np.nan, np.float32),
            policy=np.full(length, -1, np.int16),
            policies=[],
            spans=[],
            parent=(self.parent.id, self.offset) if self.parent else None,
            cause=self.cause,
        )
        at, inherited = self.offset, self.turns[0].inherited if self.turns else 0
        for number, turn in enumerate(self.turns):
            at += len(turn.prompt)
            asked = turn.messages or self.messages[max(0, inherited - 1) : inherited]  # a retry brings no messages
            _put_answer(segment, at, turn.answer, answer=number, after_tools=_has_results(asked))
            at += len(turn.answer.tokens)
        _put_kept(segment, [turn.answer for turn in self.turns])
        return segment

    def _mark(self, mark: Mark) -> None:
        if self.marks[-1][:3] != mark[:3]:  # a repeated request starts at an existing mark
            self.marks.append(mark)


class Continued(Sequence[int]):
    """The tokens that a segment has now, and a prompt behind them. The list of all is made only for who reads it: most
    engines get JSON that is kept (`encoded_with`), and a conversation may be long."""

    def __init__(self, segment: OpenSegment, prompt: list[int]) -> None:
        self._segment, self._prompt, self._shared = segment, prompt, segment.length

    def __len__(self) -> int:
        return self._shared + len(self._prompt)

    def __iter__(self) -> Iterator[int]:
        return iter(self._segment.slice(0, self._shared) + self._prompt)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return list(self)[index]


def _has_results(asked: Sequence[Message]) -> bool:
    """Whether there are tool results since the last answer: a fresh context may bring a whole conversation."""
    newest = itertools.takewhile(lambda message: message["role"] != "assistant", reversed(asked))
    return any(message["role"] == "tool" for message in newest)


def _put_answer(segment: Segment, start: int, given: Answer, **facts: Any) -> None:
    """`facts`: of each of its spans."""
    numbers = []
    for policy in given.policies:
        if policy not in segment.policies:
            segment.policies.append(policy)
        numbers.append(segment.policies.index(policy))
    end = start + len(given.tokens)
    segment.sampled[start:end] = True
    segment.logprobs[start:end] = given.logprobs
    segment.policy[start:end] = [numbers[index] for index in given.policy]
    for span in given.spans:
        oldest = numbers[span.oldest_kv_policy] if span.oldest_kv_policy >= 0 else -1
        segment.spans.append(Span(**{**vars(span), "oldest_kv_policy": oldest, **facts}))


def _put_kept(segment: Segment, answers: Sequence[Answer]) -> None:
    """`answers`: all of the segment, whose tokens are the sampled ones in order."""
    sets = [kept for answer in answers for kept in answer.kept or [b""] * len(answer.tokens)]
    if any(sets):
        joined = join_kept(sets)
        segment.kept_sizes, segment.kept = np.zeros(len(segment.tokens), np.int32), joined["kept"]
        segment.kept_sizes[segment.sampled] = joined["kept_sizes"]
