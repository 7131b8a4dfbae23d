"""Dialect: one wire format of the gateway. Everything behind it knows only neutral requests and answers.

    body ─► Dialect.parse ─► ModelRequest ─► completions ─► Reply ─► Dialect.reply ─► body
                                                  └─ Delta ─► StreamWriter ─► events

`messages` and `tools` of a ModelRequest are those of `rollmill.chat.format`: OpenAI chat messages with plain text.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from rollmill.chat.format import Message, Tool
from rollmill.errors import GatewayError
from rollmill.gateway.wire.answer import Answer
from rollmill.types import Sampling

_LARGE = 64 << 10  # characters: they take some milliseconds, and changing threads some tenths of one


@dataclass(frozen=True)
class Limits:
    """What a parser needs to know of the gateway."""

    stop_tokens: tuple[int, ...]
    default_max_tokens: int
    max_messages: int


@dataclass
class ModelRequest:
    """What a client asks the model, in no wire format."""

    messages: list[Message]
    tools: list[Tool]
    sampling: Sampling
    stop: tuple[str, ...] = ()  # texts that end the answer
    stream: bool = False
    model: str = ""  # the name the client gave; "" if it gave none
    user: str = ""
    count: int = 1  # how many answers
    logprobs: bool = False  # whether the client gets log-probs of the tokens
    top_logprobs: int = 0  # how many of the most likely tokens it gets for each one
    schema: dict[str, Any] | None = None  # the JSON schema that the text must follow
    forced: tuple[str, ...] = ()  # one of these tools must be called
    one_call: bool = False  # the answer ends behind its first tool call
    prompt: str | list[int] | None = None  # the context itself, instead of messages
    options: Mapping[str, Any] = field(default_factory=dict)  # read again only by the dialect that parsed the request
    deferred: list[Tool] = field(default_factory=list)  # tools that the prompt does not list, and the model may call
    ignored: tuple[str, ...] = ()  # fields that were accepted without effect
    dropped: tuple[str, ...] = ()  # kinds of tools that cannot be served and were left out
    session: str = ""  # the conversation that the body itself names
    cache_key: str = ""  # groups requests of one conversation, or of several: see sessions/registry.py

    @property
    def is_large(self) -> bool:
        """Whether rendering or redacting it would delay other answers: that then runs in a thread."""
        size = len(self.prompt or ())
        for message in self.messages:
            size += len(message["content"] or "")
            if size > _LARGE:
                return True
        return size > _LARGE


class TokenLogprob(NamedTuple):
    """A sampled token as its text, its log-prob, and the most likely tokens there if the client asked for them."""

    text: str
    logprob: float
    best: Sequence[tuple[str, float]] = ()


class NewCall(NamedTuple):
    """What is new of a tool call."""

    id: str
    number: int  # in its answer
    name: str
    text: str  # of the arguments
    done: bool  # whether these are all; a call is done before the next one begins


@dataclass
class Delta:
    """A piece of a streamed answer. `tokens` are new since the last piece; their text may come later."""

    text: str = ""
    reasoning: str = ""
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()  # one per token, if the client asked for log-probs
    calls: Sequence[NewCall] = ()  # for dialects whose arguments are a text; `finish` tells the rest


@dataclass
class Reply:
    """The answers to one ModelRequest."""

    request: ModelRequest
    identity: Identity
    answers: Sequence[Answer]
    prompt_tokens: int
    about: Mapping[str, Any]  # where the record is: trajectory, segment, policies
    logprobs: Sequence[Sequence[TokenLogprob]] = ()  # per answer, if the client asked for log-probs

    @property
    def sampled_tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def cached_tokens(self) -> int:
        return min((answer.cached_tokens for answer in self.answers), default=0)


@dataclass
class Identity:
    """The id and the time of an answer, and its trajectory. Each dialect has its own prefix for the id."""

    id: str = field(default_factory=lambda: os.urandom(16).hex())
    created: int = field(default_factory=lambda: int(time.time()))
    session: str = ""


@dataclass(frozen=True)
class Stored:
    """A response that a later request can continue by its id."""

    trajectory: str
    messages: list[Message]  # the conversation with the answer, without instructions
    body: dict[str, Any]
    skipped: int = 0  # messages of the request before these: its instructions


class StreamWriter(Protocol):
    """Writes the events of one streamed reply. `index` is the number of the answer."""

    def start(self, prompt_tokens: int) -> bytes: ...

    def delta(self, index: int, delta: Delta) -> bytes: ...

    def heartbeat(self) -> bytes:
        """What tells a waiting client that its answer is still worked on."""
        ...

    def finish(self, reply: Reply) -> bytes:
        """What follows the last delta: what remains of tool calls, the reason of the end, usage."""
        ...

    def error(self, error: GatewayError) -> bytes:
        """The last event of a stream that fails: its status is already sent."""
        ...


class Dialect(ABC):
    name: str

    @abstractmethod
    def parse(self, body: bytes, limits: Limits) -> ModelRequest:
        """Raises GatewayError for anything that is not a request of this format."""

    @abstractmethod
    def reply(self, reply: Reply) -> bytes: ...

    @abstractmethod
    def stream(self, request: ModelRequest, identity: Identity) -> StreamWriter: ...

    @abstractmethod
    def error(self, error: GatewayError) -> dict[str, Any]:
        """The body of an error in this format's own shape."""

    def kept(self, reply: Reply) -> Stored | None:
        """What a later request can continue by the id of this reply; None in formats without stored replies."""
        return None

    def status(self, error: GatewayError) -> int:
        """The HTTP status of an error. A format may have its own."""
        return error.status


def error_text(error: GatewayError) -> str:
    return f"{error.message} (hint: {error.hint})" if error.hint else error.message
