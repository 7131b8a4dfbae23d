"""ChatFormat: messages ↔ tokens. Each message is tokenised once, when it first enters the context.

A conversation grows by two moves only, so nothing already in the context is ever rendered again:

    render_start([system, user])                     P P P P
                              sampled by the engine          A A A
    render_turn([tool])                                            T T
                              sampled by the engine                    A A

`messages` are OpenAI chat messages with plain text content; `tools` are OpenAI tool definitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rollmill.chat.tokenizer import Tokenizer

Message = dict[str, Any]
Tool = dict[str, Any]
_LONGEST_WAIT = 64  # tokens to wait for the rest of a character; what is still no text then never will be


class ChatFormat(Protocol):
    name: str
    stop_tokens: tuple[int, ...]

    def render_start(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """The whole prompt, ending with the generation prompt."""
        ...

    def render_turn(self, messages: Sequence[Message], tools: Sequence[Tool], *, answer_closed: bool) -> list[int]:
        """What follows a sampled answer: its closing token if that was not sampled, new messages, generation prompt."""
        ...

    def render_answer(self, message: Message, tools: Sequence[Tool]) -> list[int]:
        """An assistant message as the model would have sampled it, closing token included: to learn from."""
        ...

    def parse(self, tokens: Sequence[int], tools: Sequence[Tool]) -> Message:
        """Sampled tokens as an assistant message. Never fails: a malformed call is a call the harness can answer."""
        ...

    def content_stream(self, stops: Sequence[str] = ()) -> ContentStream:
        """Shows the text part of an answer while it is being sampled, up to the first of `stops`."""
        ...


class ContentStream:
    """Text of an answer as its tokens arrive: what lies between `start` and the first of `ends`.

    Holds back what may still change: half a character, or the beginning of an end mark.
    """

    def __init__(self, tokenizer: Tokenizer, *, start: str, ends: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._start = start
        self._ends = ends
        self._undecoded: list[int] = []
        self._held = ""
        self._open = not start
        self._closed = False

    def push(self, tokens: Sequence[int]) -> str:
        """The text these tokens make certain."""
        if self._closed:
            return ""
        self._undecoded.extend(tokens)
        text = self._tokenizer.decode(self._undecoded)
        if text.endswith("\ufffd") and len(self._undecoded) < _LONGEST_WAIT:
            return ""
        self._undecoded = []
        self._held += text
        if not self._open and not self._begin():
            return ""
        return self._release()

    def _begin(self) -> bool:
        if self._held.startswith(self._start):
            self._held = self._held[len(self._start) :]
            self._open = True
        elif not self._start.startswith(self._held):
            self._closed = True  # an answer without a text part
        return self._open

    def _release(self) -> str:
        found = [at for at in (self._held.find(end) for end in self._ends) if at >= 0]
        if found:
            self._closed = True
            return self._held[: min(found)]
        keep = max((_overlap(self._held, end) for end in self._ends), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def assistant_message(content: str | None, calls: Sequence[tuple[str, str]]) -> Message:
    """An OpenAI assistant message; calls are (name, arguments text), numbered within the message."""
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ]
    return message


def message_calls(message: Message) -> list[tuple[str, str]]:
    """The (name, arguments text) of an assistant message's tool calls."""
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
