"""Reading an episode's transcript. A model wrote it: any part of it may be missing or of another type."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rollmill.environments.episode import Episode


def answers(episode: Episode) -> list[Mapping[str, Any]]:
    """The model's own messages."""
    messages = [message for message in episode.messages if isinstance(message, Mapping)]
    return [message for message in messages if message.get("role") == "assistant"]


def calls(message: Mapping[str, Any]) -> list[Any]:
    """The tool calls of a message, well formed or not."""
    found = message.get("tool_calls")
    return found if isinstance(found, list) else []


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message: a string, or the text parts of a list."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def asks(episode: Episode) -> bool:
    """Whether the episode ends with a question instead of work. A question without a question mark is not found."""
    said = answers(episode)
    return bool(said) and not calls(said[-1]) and text_of(said[-1]).strip().endswith("?")


def parsed_calls(episode: Episode) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Name and arguments of every tool call, in order; None for arguments that are not a JSON object."""
    for message in answers(episode):
        yield from calls_of(message)


def calls_of(message: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """The same for one message."""
    for call in calls(message):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            yield "", None
            continue
        yield str(function.get("name")), _object(function.get("arguments"))


def _object(arguments: Any) -> dict[str, Any] | None:
    try:
        value = json.loads(arguments or "{}")
    except (TypeError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
