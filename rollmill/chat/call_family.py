"""CallFamily: how a family of models writes tool calls in the text of an answer.

A malformed call stays a call: its raw text becomes the arguments, which are no JSON then. The harness answers it with
an error, and the record has what the model wrote.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rollmill.chat.format import CallMark, Tool
from rollmill.chat.tokenizer import Tokenizer

Call = tuple[str, str]  # name and arguments; the arguments are JSON if the call is well-formed

_NAME = re.compile(r'"name"\s*:\s*"([^"]*)"')
_KEYS = ("arguments", "parameters")
# what stands before the arguments in the usual layout of a call; its group is the name
CALL_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class CallFamily(ABC):
    name: str
    ends: tuple[str, ...]  # marks that end the text of an answer
    silent: tuple[str, ...] = ()  # an answer that begins with one of these may be a call as a whole
    closings: tuple[str, ...] = ()  # marks that end a call and its answer, if other marks than those of texts do
    call_mark: CallMark | None = None  # None if calls cannot be separated before the answer has ended
    single_call = False  # whether an answer has at most one call
    streamed: tuple[str, str] | None = None  # the marks around a call, if calls are read while they are sampled
    # A family whose models write the text of an answer between marks too. `parse` returns it without them.
    frames: tuple[str, ...] = ()  # what may stand before the text; an answer that begins otherwise has none
    frame_ends: tuple[str, ...] = ()  # marks inside an answer that do not end it

    @abstractmethod
    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[str, list[Call]]:
        """(text before the calls, calls). Never raises."""

    @abstractmethod
    def write(self, calls: Sequence[Call]) -> str:
        """Calls as the family writes them, for templates that have no place for calls."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], tokenizer: Tokenizer, single: bool) -> str:
        """Rules for `calls`, as llguidance reads them: calls of these tools, or one call if `single`."""

    def ids(self, text: str) -> list[str]:
        """The ids that the model gave to its calls, if the family has such: results refer to them."""
        return []

    def text_marks(self, tokenizer: Tokenizer) -> tuple[str, str]:
        """Rules for what stands before and behind the text, as llguidance reads them."""
        return "", ""

    def closing_tokens(self, tokenizer: Tokenizer) -> list[int]:
        return [tokenizer.special[mark] for mark in self.closings if mark in tokenizer.special]


def properties_of(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """The name of each tool → its parameters: their names → their JSON schemas."""
    functions = (tool["function"] for tool in tools)
    found = {each["name"]: (each.get("parameters") or {}).get("properties") for each in functions}
    return {name: each if isinstance(each, Mapping) else {} for name, each in found.items()}


def read_json(text: str) -> Any:
    """The value of a JSON text; ValueError if it is none."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def call_of(value: Any) -> Call | None:
    """The call that a JSON value describes: {"name": …, "arguments": {…}}, or with "parameters"."""
    if not isinstance(value, dict):
        return None
    value = value["function"] if isinstance(value.get("function"), dict) else value
    arguments = next((value[key] for key in _KEYS if key in value), None)
    if not isinstance(value.get("name"), str) or not isinstance(arguments, dict | str):
        return None
    return value["name"], arguments if isinstance(arguments, str) else to_json(arguments)


def parse_call(body: str) -> Call:
    """A call from its JSON text, with its arguments as the model wrote them. A malformed one keeps its raw text, from
    the arguments on if they can be found."""
    begun = CALL_HEAD.match(body)
    try:
        value = read_json(body)
        if begun is None:
            return call_of(value) or malformed(body)
        _, end = json.JSONDecoder().raw_decode(body, begun.end())
    except ValueError:
        return malformed(body) if begun is None else (begun[1], body[begun.end() :])
    return begun[1], body[begun.end() : end]


def malformed(body: str) -> Call:
    named = _NAME.search(body)
    return named.group(1) if named else "invalid", body


def write_call(name: str, arguments: str, key: str = "arguments") -> str:
    """A call as JSON text. Arguments stay as they are."""
    return f'{{"name": {to_json(name)}, "{key}": {arguments}}}'


def json_prefix(text: str) -> tuple[Any, str]:
    """The JSON value at the start of `text`, and what follows it. ValueError if there is none."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value, text[end:]
