"""ChatFormat: messages ↔ tokens. Each message is tokenised once, when it first enters the context.

A conversation grows in two ways only, so nothing in the context is rendered twice:

    render_start([system, user])                     P P P P
                              sampled by the engine          A A A
    render_turn([tool])                                            T T
                              sampled by the engine                    A A

`messages` are OpenAI chat messages with plain text content; `tools` are OpenAI tool definitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rollmill.chat.tokenizer import TextStream, Tokenizer

Message = dict[str, Any]
Tool = dict[str, Any]


class ChatFormat(Protocol):
    name: str
    stop_tokens: tuple[int, ...]

    def render_start(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """The whole prompt, ending with the generation prompt."""
        ...

    def render_turn(self, messages: Sequence[Message], tools: Sequence[Tool], *, answer_closed: bool) -> list[int]:
        """What follows a sampled answer: its closing token if not sampled, new messages, the generation prompt."""
        ...

    def render_answer(self, message: Message, tools: Sequence[Tool]) -> list[int]:
        """An assistant message as the model would sample it, with its closing token. Training on messages uses it."""
        ...

    def parse(self, tokens: Sequence[int], tools: Sequence[Tool]) -> Message:
        """Sampled tokens as an assistant message. Never raises: a malformed call stays a call."""
        ...

    def content_stream(self, stops: Sequence[str] = ()) -> ContentStream:
        """Streams the text part of an answer while it is sampled, up to the first of `stops`."""
        ...


class ContentStream:
    """Streams the text of an answer: from behind the token `start` up to the first of `ends`.

    It holds back what may still change: half a character, or the beginning of an end mark. The streamed text is
    always a prefix of the content that `ChatFormat.parse` finds in the whole answer. `drop_blank`: hold back
    blanks until text follows, because `parse` drops content that is only blanks.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, start: int | None = None, ends: Sequence[str], drop_blank: bool = False
    ) -> None:
        self._start = start
        self._ends = ends
        self._drop_blank = drop_blank
        self._text = TextStream(tokenizer)
        self._held = ""
        self._closed = False

    def push(self, tokens: Sequence[int]) -> str:
        """Returns the text that can no longer change."""
        if tokens and self._start is not None:
            self._closed = tokens[0] != self._start  # an answer without a text part
            self._start, tokens = None, tokens[1:]
        if self._closed:
            return ""
        self._held += self._text.push(tokens)
        return self._release()

    def _release(self) -> str:
        found = [at for at in (self._held.find(end) for end in self._ends) if at >= 0]
        if found:
            self._closed = True
            cut = min(found)
        else:
            cut = len(self._held) - max((_overlap(self._held, end) for end in self._ends), default=0)
        if self._drop_blank and not self._held[:cut].strip():
            return ""
        self._drop_blank = False
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
    """Length of the longest suffix of `text` that is a prefix of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
