"""Conversations: JSONL in OpenAI's form. Only the assistant's tokens are learnt.

    {"messages": [{"role": "user", "content": "Fix add."},
                  {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function",
                    "function": {"name": "read", "arguments": "{\\"path\\": \\"add.py\\"}"}}]},
                  {"role": "tool", "tool_call_id": "1", "content": "def add…"},
                  {"role": "assistant", "content": "Fixed."}],
     "tools": [{"type": "function", "function": {"name": "read", "parameters": {…}}}]}

`rollmill trajectories export --format openai` writes it. An answer with "weight": 0 is context only. Other fields are
ignored. A conversation longer than the context is cut after the last answer that fits, and counted; one without an
answer that fits is left out of its step, and counted. So is one that the model's chat template refuses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import Field, TypeAdapter

from rollmill.chat.format import Message, Tool
from rollmill.chat.openai_messages import parse_messages, parse_tools
from rollmill.chat.rendered_conversation import render_conversation
from rollmill.config import Config, LocalPath
from rollmill.errors import GatewayError
from rollmill.strict import FreeJson, parse_json
from rollmill.training.pretraining.source import Document, SourceContext
from rollmill.training.pretraining.sources.files import (
    MAX_LINE,
    Index,
    IndexedDocuments,
    IndexRow,
    SkippedRecord,
    digest,
    lines,
    open_index,
)

MOST_MESSAGES = 100_000
_OBJECT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, FreeJson])


class ConversationSettings(Config):
    path: LocalPath = Field(
        description="A JSONL file, a directory of them or a glob such as `chats/*.jsonl`; "
        "`.gz`, `.zst` and `.parquet` too. Or hf://datasets/OWNER/NAME@COMMIT/GLOB, or s3://BUCKET/FILE."
    )


class Conversation(NamedTuple):
    messages: list[Message]
    tools: list[Tool]
    ignored: list[int]  # places of answers that are not learnt


class Conversations:
    def __init__(self, config: ConversationSettings) -> None:
        self._config = config

    def documents(self, context: SourceContext) -> ConversationDocuments:
        return ConversationDocuments(open_index(context.directory, self._config.path, "openai", _scan), context)


class ConversationDocuments(IndexedDocuments):
    def __init__(self, index: Index, context: SourceContext) -> None:
        super().__init__(index)
        self._context = context

    def read(self, number: int, epoch: int) -> Document:
        found = parse_conversation(self._index.bytes(self._index.row(number)))
        longest = self._context.max_context
        try:
            rendered = render_conversation(found.messages, found.tools, self._context.format, found.ignored, longest)
        except GatewayError:
            return Document([], [], ["conversation left out: the chat template refuses it"])
        if len(rendered.tokens) <= longest:
            if rendered.rewritten:
                note = "answers not learnt: the chat template rewrites them"
                return Document(rendered.tokens, rendered.learnt, [note])
            return Document(rendered.tokens, rendered.learnt)
        cut = rendered.cut(longest)
        note = "conversation cut" if any(cut.learnt) else "conversation left out: no answer fits into the context"
        return Document(cut.tokens, cut.learnt, [note])


def _scan(number: int, path: str) -> Iterator[IndexRow | SkippedRecord]:
    for line in lines(path):
        place = f"{path}:{line.number}"
        if line.data is None:
            yield SkippedRecord("line too long", place, f"over {MAX_LINE} bytes")
            continue
        try:
            found = parse_conversation(line.data)
        except ValueError as error:
            yield SkippedRecord("malformed conversation", place, str(error))
            continue
        high, low = digest(json.dumps(found, sort_keys=True).encode())
        yield IndexRow(number, line.offset, len(line.data), digest=high, part=low)


def parse_conversation(line: bytes) -> Conversation:
    """ValueError says which field is wrong, and the remedy."""
    try:
        tree = parse_json(line, _OBJECT)
    except ValueError as error:
        raise ValueError(f"the line is not JSON: {error}") from None
    try:
        messages, tools = parse_messages(tree, MOST_MESSAGES), parse_tools(tree)
    except GatewayError as error:
        raise ValueError(f"{error.message}; {error.hint}" if error.hint else error.message) from None
    ignored = []
    for place, message in enumerate(tree["messages"]):
        weight = message.get("weight")
        if weight not in (None, 0, 1) or (weight is not None and message["role"] != "assistant"):
            raise ValueError(f"messages[{place}].weight is {weight!r}; only answers have one, 0 or 1")
        if weight == 0:
            ignored.append(place)
    learnt = [place for place, each in enumerate(messages) if each["role"] == "assistant"]
    if not set(learnt) - set(ignored):
        raise ValueError("messages has no answer to learn from; add a message with the role assistant")
    return Conversation(messages, tools, ignored)
