"""Redaction: private texts are removed from a request before the model sees it and before anything is written.

    [gateway.redaction]
    remove = ["email", "secret"]
    patterns = {ticket = "TICKET-[0-9]+"}

    [gateway.redaction]
    kind = "acme.privacy:Names"         # a class with redact(text) -> text

Recorded tokens are never edited: an answer of the model that a client sends back stays as it was sampled. What cannot
be redacted (a context of token ids) is answered and not stored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field, field_validator

from rollmill.chat.format import Message
from rollmill.config import Config
from rollmill.gateway.wire.answer import same_message
from rollmill.kinds import KindSection, Slot

_BUILT_IN = {
    "email": r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,8}",
    "phone": r"(?<![\w.])\+?\d{1,3}[ ()./-]{1,2}\d{2,4}(?:[ ()./-]{1,2}\d{2,4}){1,4}(?![\w.])",
    "card": r"(?<!\d)(?:\d[ -]?){12,18}\d(?!\d)",
    "ip": r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])",
    "secret": r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[^-]{0,20000}-----END [A-Z ]{0,40}PRIVATE KEY-----"
    r"|\b(?:sk|pk|rk|rmk)-[A-Za-z0-9_-]{16,200}|\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{36,255}\b"
    r"|\bxox[abprs]-[A-Za-z0-9-]{10,200}|\beyJ[\w-]{10,2000}\.[\w-]{10,4000}\.[\w-]{10,1000}",
}
# of a JSON schema: keywords whose values are texts or examples, and those whose keys are names
_SAID = frozenset({"description", "title", "enum", "const", "default", "examples", "$comment"})
_NAMED = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})


class Redactor(Protocol):
    def redact(self, text: str) -> str:
        """The text without what is private. The same text must always give the same result. Large requests are redacted
        in threads."""
        ...


class RedactionSection(KindSection):
    _slot: ClassVar[Slot] = Slot(
        "gateway.redaction", Redactor, {"patterns": f"{__name__}:Patterns"}, "rollmill.redactors", default="patterns"
    )


class PatternSettings(Config):
    remove: tuple[Literal["email", "phone", "card", "ip", "secret"], ...] = Field(
        default=(), description="What is replaced by its name in brackets, such as [email], in requests."
    )
    patterns: dict[str, str] = Field(
        default_factory=dict, description="Regular expressions of your own: name = pattern. A match becomes [name]."
    )

    @field_validator("patterns")
    @classmethod
    def _compiles(cls, patterns: dict[str, str]) -> dict[str, str]:
        for name, pattern in patterns.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{name}: {pattern!r} is not a regular expression: {error}") from None
        return patterns


class Patterns:
    """Replaces matches of patterns. Without any, nothing changes."""

    def __init__(self, config: PatternSettings) -> None:
        chosen = {name: _BUILT_IN[name] for name in config.remove} | config.patterns
        self._patterns = [(f"[{name}]", re.compile(pattern)) for name, pattern in chosen.items()]

    @property
    def is_empty(self) -> bool:
        return not self._patterns

    def redact(self, text: str) -> str:
        for name, pattern in self._patterns:
            text = pattern.sub(name, text)
        return text


def redact_inputs(messages: Sequence[Message], redactor: Redactor) -> list[Message]:
    """Redacts what is not said by the assistant."""
    return [message if message["role"] == "assistant" else _redacted(message, redactor) for message in messages]


def redact_forged(messages: Sequence[Message], sampled: Sequence[Message], redactor: Redactor) -> list[Message]:
    """Redacts answers that the model did not sample in this session."""

    def is_sampled(message: Message) -> bool:
        return any(same_message(answer, message) for answer in sampled)

    return [
        message if message["role"] != "assistant" or is_sampled(message) else _redacted(message, redactor)
        for message in messages
    ]


def redact_schema(tree: Any, redactor: Redactor) -> Any:
    """Redacts the texts and values in a tool or a JSON schema. Names and types stay."""
    if isinstance(tree, list):
        return [redact_schema(item, redactor) for item in tree]
    if not isinstance(tree, dict):
        return tree
    found = {}
    for name, value in tree.items():
        if name in _NAMED and isinstance(value, dict):  # a property may be called "default"
            found[name] = {key: redact_schema(item, redactor) for key, item in value.items()}
        else:
            found[name] = _redact_all(value, redactor) if name in _SAID else redact_schema(value, redactor)
    return found


def _redact_all(tree: Any, redactor: Redactor) -> Any:
    if isinstance(tree, str):
        return redactor.redact(tree)
    if isinstance(tree, list):
        return [_redact_all(item, redactor) for item in tree]
    if isinstance(tree, dict):
        return {name: _redact_all(value, redactor) for name, value in tree.items()}
    return tree


def _redacted(message: Message, redactor: Redactor) -> Message:
    content = message["content"]
    found = {**message, "content": redactor.redact(content) if content else content}
    if "reasoning_content" in message and isinstance(message["reasoning_content"], str):
        found["reasoning_content"] = redactor.redact(message["reasoning_content"])
    if message.get("tool_calls"):
        found["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": redactor.redact(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return found
