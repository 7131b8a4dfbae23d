"""Compact: a format for very small models. One special token per role; an answer has as few sampled tokens as possible.

    <user>Fix add.<agent>read<arg>add.py<end><tool>def add(a, b): …<agent>run<end><tool>ok<agent><text>Fixed.<end>
                         └── sampled ──────┘                     └ sampled ┘         └─── sampled ────┘

An answer is a call unless it begins with <text>; further calls follow behind <call>:

    answer = first { "<call>" call } "<end>"        first = call | "<text>" text        call = name { "<arg>" argument }

Arguments are positional, in the order of the tool's JSON schema properties, each as plain text (strings as they are,
other types as JSON). Tool definitions are not part of the prompt: such a model has learnt its tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollmill.chat.call_family import properties_of
from rollmill.chat.format import (
    CallMark,
    ChatFormat,
    ContentStream,
    DocumentMarks,
    Message,
    Tool,
    assistant_message,
    message_calls,
)
from rollmill.chat.tokenizer import Tokenizer

SPECIAL_TOKENS = ("<end>", "<agent>", "<user>", "<tool>", "<system>", "<text>", "<call>", "<arg>")


class CompactFormat(ChatFormat):
    name = "compact"
    text_marks = ("<text>", "")
    call_mark = CallMark("<call>", ends=False)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._end, self._agent, user, tool, system, self._text, self._call, self._arg = (
            tokenizer.token_id(token) for token in SPECIAL_TOKENS
        )
        self._roles = {"user": user, "tool": tool, "system": system}
        self.stop_tokens = (self._end,)
        self.document = DocumentMarks(None, self._end)

    def call_grammar(self, tools: Sequence[Tool], *, single: bool = False) -> str:
        calls = []
        for name, properties in properties_of(tools).items():
            calls.append(json.dumps(name) + " <arg> value" * len(properties))
        several = "" if single else " (<call> call)*"
        return f"calls: call{several}\ncall: {' | '.join(calls)}\nvalue: /(?s:.)*/\n"

    def render_start(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        return [*self._render(messages, tools), self._agent]

    def render_turn(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        *,
        answer_closed: bool,
        history: Sequence[Message] = (),
        answer: Sequence[int] = (),
    ) -> list[int]:
        closing = [] if answer_closed else [self._end]
        return [*closing, *self._render(messages, tools), self._agent]

    def render_answer(self, message: Message, tools: Sequence[Tool], *, history: Sequence[Message] = ()) -> list[int]:
        return self._encode(self._answer_pieces(message, tools))

    def parse(self, tokens: Sequence[int], tools: Sequence[Tool]) -> Message:
        if tokens and tokens[-1] == self._end:
            tokens = tokens[:-1]
        elif not tokens:
            return assistant_message("", [])  # cut off before it began
        parts = _split(tokens, self._call)
        content = None
        if parts[0][:1] == [self._text]:
            content = self._tokenizer.decode(parts.pop(0)[1:])
        schemas = properties_of(tools)
        return assistant_message(content, [self._parse_call(part, schemas) for part in parts])

    def content_stream(self, stops: Sequence[str] = ()) -> ContentStream:
        return ContentStream(self._tokenizer, start=self._text, ends=("<call>", "<end>", *stops))

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        pieces: list[str | int] = []
        for message in messages:
            if message["role"] == "assistant":
                pieces += [self._agent, *self._answer_pieces(message, tools)]
            else:
                pieces += [self._roles[message["role"]], message["content"]]
        return self._encode(pieces)

    def _answer_pieces(self, message: Message, tools: Sequence[Tool]) -> list[str | int]:
        parts: list[list[str | int]] = []
        if message.get("content") or not message.get("tool_calls"):
            parts.append([self._text, message.get("content") or ""])
        schemas = properties_of(tools)
        for name, arguments in message_calls(message):
            part: list[str | int] = [name]
            for argument in _positional(arguments, schemas.get(name)):
                part += [self._arg, argument]
            parts.append(part)
        return [*_joined(parts, self._call), self._end]

    def _encode(self, pieces: Sequence[str | int]) -> list[int]:
        """Texts and special tokens as tokens. All texts are encoded in one call, which uses several cores."""
        encoded = iter(self._tokenizer.encode_many([piece for piece in pieces if isinstance(piece, str)]))
        tokens: list[int] = []
        for piece in pieces:
            tokens += next(encoded) if isinstance(piece, str) else (piece,)
        return tokens

    def _parse_call(self, tokens: list[int], schemas: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
        name_tokens, *arguments = _split(tokens, self._arg)
        name = self._tokenizer.decode(name_tokens).strip()
        properties = schemas.get(name)
        if properties is None or len(arguments) > len(properties):
            # The tool does not take such a call. Its raw text is no JSON object, so the harness answers with an error.
            return name, self._tokenizer.decode(tokens[len(name_tokens) :])
        values = {
            key: _typed(self._tokenizer.decode(argument), schema)
            for (key, schema), argument in zip(properties.items(), arguments, strict=False)
        }
        return name, json.dumps(values, ensure_ascii=False)


def _positional(arguments: str, properties: Mapping[str, Any] | None) -> list[str]:
    """Arguments in the order of the schema. Arguments that do not fit the schema stay one raw text."""
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return [arguments] if arguments else []
    if not isinstance(values, dict) or properties is None or set(values) != set(list(properties)[: len(values)]):
        return [arguments] if arguments else []
    ordered = (values[key] for key in list(properties)[: len(values)])
    return [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in ordered]


def _typed(text: str, schema: Any) -> Any:
    """The argument with the type of its schema. Text that does not fit stays text; the harness refuses it."""
    kind = schema.get("type", "string") if isinstance(schema, Mapping) else "string"
    if "string" in kind:  # one type, or a list of them
        return text
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _split(tokens: Sequence[int], mark: int) -> list[list[int]]:
    parts: list[list[int]] = []
    whole, begin = list(tokens), 0
    for _ in range(whole.count(mark)):  # a model may sample nothing but marks: each is looked at once
        end = whole.index(mark, begin)
        parts.append(whole[begin:end])
        begin = end + 1
    return [*parts, whole[begin:]]


def _joined(parts: Sequence[list[str | int]], mark: int) -> list[str | int]:
    pieces = list(parts[0])
    for part in parts[1:]:
        pieces += [mark, *part]
    return pieces
