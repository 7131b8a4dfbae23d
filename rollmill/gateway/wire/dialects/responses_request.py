"""Reads the items of OpenAI's responses format as chat messages.

Items of one answer (reasoning, message, function calls) follow each other; together they are one assistant message.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from rollmill.chat.format import Message
from rollmill.errors import GatewayError
from rollmill.gateway.wire.dialects.responses_tools import flat_name
from rollmill.strict import short

_ROLES = {"system": "system", "developer": "system", "user": "user"}
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_CALLS = ("function_call", "custom_tool_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")
_NO_IMAGE = {"type": "input_text", "text": "<image content omitted because you do not support image input>"}
FindItem = Callable[[str], dict[str, Any]]  # an item of a stored response by its id


def referenced(given: Any) -> list[str]:
    """The ids of stored items that stand for themselves in these items."""
    items = given if isinstance(given, list) else []
    return [str(item.get("id")) for item in items if isinstance(item, dict) and _is_reference(item)]


def parse_items(given: Any, max_messages: int, find: FindItem | None = None) -> list[Message]:
    """Without `find`, a reference to a stored item is an answer of which nothing is known."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given or len(given) > max_messages:
        raise GatewayError(f"input must be a text or 1 to {max_messages} items, got {short(given)}")
    messages: list[Message] = []
    for index, item in enumerate(given):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise GatewayError(f"{where} must be an object, got {short(item)}")
        if not _is_reference(item):
            _add(messages, item, where)
        elif find is not None:
            _add(messages, find(str(item.get("id"))), where)
        else:
            _answer(messages)
    return messages


def _is_reference(item: dict[str, Any]) -> bool:
    return item.get("type") == "item_reference" or ("type" not in item and "id" in item and "role" not in item)


def _add(messages: list[Message], item: dict[str, Any], where: str) -> None:
    kind, role = item.get("type", "message"), item.get("role")
    if kind == "message" and role == "assistant":
        answer = _answer(messages)
        answer["content"] = (answer["content"] or "") + _text(item.get("content"), where)
    elif kind == "message" and isinstance(role, str) and role in _ROLES:
        messages.append({"role": _ROLES[role], "content": _text(item.get("content"), where)})
    elif kind in _CALLS:
        _answer(messages).setdefault("tool_calls", []).append(_call(item, where))
    elif kind in _RESULTS:
        result: Message = {"role": "tool", "content": _text(_seen(item.get("output")), f"{where}.output")}
        if isinstance(item.get("call_id"), str):
            result["tool_call_id"] = item["call_id"]
        messages.append(result)
    elif kind == "reasoning":
        thoughts = _text(item.get("content") or item.get("summary") or "", where)
        if thoughts:
            answer = _answer(messages)
            answer["reasoning_content"] = answer.get("reasoning_content", "") + thoughts
    elif kind == "compaction_trigger":
        raise GatewayError(
            "compaction at the server is not supported",
            hint="let the client compact: Codex does if the provider in its configuration is not called OpenAI",
        )
    else:
        raise GatewayError(
            f"{where} of type {short(kind)} and role {short(role)} is not supported",
            hint="messages, function_call, function_call_output and reasoning are",
        )


def _answer(messages: list[Message]) -> Message:
    """The assistant message that the next item of an answer belongs to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _call(item: dict[str, Any], where: str) -> dict[str, Any]:
    name, arguments, space = item.get("name"), item.get("arguments"), item.get("namespace")
    if item.get("type") == "custom_tool_call" and isinstance(item.get("input"), str):
        arguments = json.dumps({"input": item["input"]})
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise GatewayError(f"{where} is not a call: name and arguments are strings")
    return {
        "id": str(item.get("call_id", "")),
        "type": "function",
        "function": {"name": flat_name(name, space if isinstance(space, str) else None), "arguments": arguments},
    }


def _seen(output: Any) -> Any:
    """A result with a text for each image, as Codex itself writes it for models that it knows to read text only: an
    error would end the conversation, because the image stays in its history."""
    return [_NO_IMAGE if _is_image(part) else part for part in output] if isinstance(output, list) else output


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise GatewayError(f"{where} has no text, but {short(content)}")
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else part
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise GatewayError(
                f"{where}.content[{index}] is {short(kind)}, not text",
                hint="this model reads text only",
                code="unsupported_content",
            )
    return "".join(part["text"] for part in content)
