"""ChatFormat: messages ↔ tokens. Each message is tokenised once, when it first enters the context.

A conversation grows in two ways only, so nothing in the context is rendered twice:

    render_start([system, user])                     P P P P
                              sampled by the engine          A A A
    render_turn([tool])                                            T T
                              sampled by the engine                    A A

`messages` are OpenAI chat messages with plain text content; `tools` are OpenAI tool definitions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple

from rollmill.chat.tokenizer import TextStream, Tokenizer

Message = dict[str, Any]
Tool = dict[str, Any]

# How llguidance writes JSON: as json.dumps does. With free blanks a small model may go on with blanks for ever.
JSON_STYLE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}


class CallMark(NamedTuple):
    """A text that ends every call of an answer, or one that begins a further call."""

    text: str
    ends: bool = True


class CallPiece(NamedTuple):
    """What is new of a call while it is sampled."""

    number: int  # of the call in its answer, from 0
    name: str
    text: str  # of the arguments
    done: bool  # whether these are all


class DocumentMarks(NamedTuple):
    """The tokens around a document of plain text. None: nothing begins it."""

    begin: int | None
    end: int


class HistoryRewritten(Exception):
    """With the new messages, the template writes earlier messages differently: their tokens cannot be kept."""


class ChatFormat(ABC):
    """`history` is what the context holds so far. A format that writes each message by itself does not need it.

    Rendering raises GatewayError if the model's template refuses the messages.
    """

    name: str
    stop_tokens: tuple[int, ...]
    document: DocumentMarks
    call_mark: CallMark | None = None  # None if calls cannot be separated before the answer has ended
    single_call = False  # whether an answer has at most one call
    text_marks = ("", "")  # rules for what stands before and behind the text of an answer, as llguidance reads them
    reasons_first = False  # whether the generation prompt ends inside reasoning

    @abstractmethod
    def render_start(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """The whole prompt, ending with the generation prompt."""

    @abstractmethod
    def render_turn(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        *,
        answer_closed: bool,
        history: Sequence[Message] = (),
        answer: Sequence[int] = (),
    ) -> list[int]:
        """What follows a sampled answer: its closing token if not sampled, new messages, the generation prompt.

        `history` ends with the answer, and `answer` is its tokens. Raises HistoryRewritten.
        """

    @abstractmethod
    def render_answer(self, message: Message, tools: Sequence[Tool], *, history: Sequence[Message] = ()) -> list[int]:
        """An assistant message as the model would sample it, with its closing token. Training on messages uses it."""

    @abstractmethod
    def parse(self, tokens: Sequence[int], tools: Sequence[Tool]) -> Message:
        """Sampled tokens as an assistant message. Never raises: a malformed call stays a call.

        Reasoning becomes `reasoning_content`, a key that is missing where there is none.
        """

    @abstractmethod
    def content_stream(self, stops: Sequence[str] = ()) -> ContentStream:
        """Streams the text part of an answer while it is sampled, up to the first of `stops`."""

    @abstractmethod
    def call_grammar(self, tools: Sequence[Tool], *, single: bool = False) -> str:
        """Rules for `calls`, as llguidance reads them: one or more calls of these tools, one if `single`."""


class Thinking(NamedTuple):
    """How a model marks its reasoning.

    `opened`: generation prompts end inside it, so the start mark is not sampled. `always`: all of them do; otherwise
    only the end mark tells that there was reasoning.
    """

    start: str
    end: str
    opened: bool = False
    always: bool = True

    def split(self, text: str) -> tuple[str, str]:
        """(reasoning, the rest). Reasoning that was cut off has no rest."""
        head = text.lstrip()
        if head.startswith(self.start):
            text = head[len(self.start) :]
        elif not self.opened or (not self.always and self.end not in text):
            return "", text
        reasoning, _, rest = text.partition(self.end)
        return reasoning.strip("\n"), rest.lstrip("\n")


@dataclass
class ContentStream:
    """Streams the text of an answer: from behind the token `start` up to the first of `ends`.

    It holds back what may still change: half a character, or the beginning of an end mark. The streamed text is
    always a prefix of the content that `ChatFormat.parse` finds in the whole answer, and the streamed reasoning of its
    `reasoning_content`.
    """

    tokenizer: Tokenizer
    _: KW_ONLY
    ends: Sequence[str]
    start: int | None = None
    drop_blank: bool = False  # hold back blanks until text follows, because `parse` drops content that is only blanks
    hold_blank: bool = False  # hold back blanks at the end, because `parse` drops them before calls
    silent: tuple[str, ...] = ()  # an answer that begins with one may be a call as a whole, so nothing is streamed
    thinking: Thinking | None = None
    frames: tuple[str, ...] = ()  # the text is behind one, if there are any; an answer that begins otherwise has none
    read_calls: Callable[[str], list[CallPiece]] | None = None  # reads what follows the text: see call_stream.py
    reasoning: str = field(init=False, default="")  # what the last `push` found of the reasoning
    calls: list[CallPiece] = field(init=False, default_factory=list)  # and of calls

    def __post_init__(self) -> None:
        self._text = TextStream(self.tokenizer)
        self._reasoning = None if self.thinking is None else _ReasoningStream(self.thinking, self.ends)
        self._held = ""
        self._closed = False

    def push(self, tokens: Sequence[int]) -> str:
        """Returns the text that can no longer change."""
        if tokens and self.start is not None:
            self._closed = tokens[0] != self.start  # an answer without a text part
            self.start, tokens = None, tokens[1:]
        self.reasoning, self.calls = "", []
        if self._closed:
            if self.read_calls is not None:
                self.calls = self.read_calls(self._text.push(tokens))
            return ""
        text = self._text.push(tokens)
        if self._reasoning is not None:
            self.reasoning, text = self._reasoning.push(text)
        self._held += text
        text = self._release()
        if self._closed and self.read_calls is not None:
            self.calls = self.read_calls(self._held)
        return text

    def _enter_frame(self) -> bool:
        """Whether the text has begun. Drops the frame before it."""
        begun = self._held.lstrip()
        frame = next((frame for frame in self.frames if begun.startswith(frame)), None)
        if frame is not None:
            self._held, self.frames = begun[len(frame) :], ()
        elif begun and not any(each.startswith(begun) for each in self.frames):
            self._closed = True  # only a call, or a text that is sent at the end
        return frame is not None

    def _release(self) -> str:
        if self.frames and not self._enter_frame():
            return ""
        if self.silent and (begun := self._held.lstrip()):
            self._closed = begun.startswith(self.silent)
            self.silent = ()
            if self._closed:
                return ""
        found = [at for at in (self._held.find(end) for end in self.ends) if at >= 0]
        if found:
            self._closed = True
            cut = min(found)
        else:
            cut = len(self._held) - max((overlap(self._held, end) for end in self.ends), default=0)
        if self.hold_blank:
            cut = len(self._held[:cut].rstrip())
        if (self.drop_blank or self.silent) and not self._held[:cut].strip():
            return ""
        self.drop_blank = False
        text, self._held = self._held[:cut], self._held[cut:]
        return text


class _ReasoningStream:
    """Splits text into reasoning and what follows it, as `Thinking.split` does with the whole text."""

    def __init__(self, thinking: Thinking, ends: Sequence[str]) -> None:
        self._thinking = thinking
        self._ends = (thinking.end, *ends)
        self._phase: Literal["before", "inside", "behind", "text"] = "before"
        self._held = ""
        self._sure = thinking.always  # whether text is reasoning although no end mark was found yet
        self._begun = False  # whether reasoning was returned: line breaks before it are dropped

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, text behind it) that can no longer change."""
        self._held += text
        if self._phase == "before":
            self._begin()
        reasoning = self._inside() if self._phase == "inside" else ""
        if self._phase == "behind":
            self._held = self._held.lstrip("\n")
            self._phase = "text" if self._held else "behind"
        if self._phase != "text":
            return reasoning, ""
        text, self._held = self._held, ""
        return reasoning, text

    def _begin(self) -> None:
        head, start = self._held.lstrip(), self._thinking.start
        if head.startswith(start):
            self._held, self._phase, self._sure = head[len(start) :], "inside", True
        elif not start.startswith(head):
            self._phase = "inside" if self._thinking.opened else "text"

    def _inside(self) -> str:
        if not self._begun:
            self._held = self._held.lstrip("\n")
        at = self._held.find(self._thinking.end)
        if at >= 0:
            self._phase = "behind"
            reasoning, self._held = self._held[:at].rstrip("\n"), self._held[at + len(self._thinking.end) :]
            return reasoning
        if not self._sure:
            return ""
        cut = len(self._held) - max(overlap(self._held, end) for end in self._ends)
        for end in self._ends:  # an answer that ends inside its reasoning
            found = self._held.find(end)
            cut = min(cut, found) if found >= 0 else cut
        cut = len(self._held[:cut].rstrip("\n"))
        reasoning, self._held = self._held[:cut], self._held[cut:]
        self._begun = self._begun or bool(reasoning)
        return reasoning


def assistant_message(content: str | None, calls: Sequence[tuple[str, str]], reasoning: str = "") -> Message:
    """An OpenAI assistant message; calls are (name, arguments text), numbered within the message."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ]
    return message


def message_calls(message: Message) -> list[tuple[str, str]]:
    """The (name, arguments text) of an assistant message's tool calls."""
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]


def overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `mark`."""
    at = text.find(mark[:1], max(0, len(text) - len(mark) + 1))
    while at >= 0:
        if mark.startswith(text[at:]):
            return len(text) - at
        at = text.find(mark[:1], at + 1)
    return 0
