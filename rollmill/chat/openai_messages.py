"""Messages and tools as OpenAI's chat completions have them: in requests, and in files of conversations.

Every refusal is a GatewayError that names the field and the value.
"""

from __future__ import annotations

from typing import Any

from rollmill.chat.format import Message, Tool
from rollmill.errors import GatewayError
from rollmill.strict import short

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_PLAIN = ("user", "assistant", "system", "tool")  # a role may be any JSON, so no set


def parse_messages(tree: dict[str, Any], max_messages: int) -> list[Message]:
    """The field `messages`, without what no template reads."""
    messages = _list(tree, "messages")
    if not messages or len(messages) > max_messages:
        raise GatewayError(f"messages must hold 1 to {max_messages} messages, got {len(messages)}")
    return [
        # nearly all messages are these two fields: there is nothing to drop
        message
        if type(message) is dict
        and len(message) == 2
        and message.get("role") in _PLAIN
        and type(message.get("content")) is str
        else _message(message, index)
        for index, message in enumerate(messages)
    ]


def parse_tools(tree: dict[str, Any]) -> list[Tool]:
    """The field `tools`; none if `tool_choice` is "none"."""
    tools = _list(tree, "tools")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise GatewayError(f"tools[{index}] is not a function with a name")
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, dict) or not isinstance(parameters.get("properties") or {}, dict):
            raise GatewayError(f"tools[{index}].function.parameters is not a JSON schema of an object")
    return [] if tree.get("tool_choice") == "none" else tools


def _list(tree: dict[str, Any], name: str) -> list[Any]:
    value = tree.get(name)
    if value is not None and not isinstance(value, list):
        raise GatewayError(f"{name} must be of type list, got {short(value)}")
    return value or []


def _message(message: Any, index: int) -> Message:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise GatewayError(f"{where} must be an object, got {short(message)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise GatewayError(f"{where}.role is {short(role)}", hint=f"one of {', '.join(_ROLES)}")
    content = _text(message.get("content"), where)
    if role == "assistant":
        return _answer(message, content, where)
    if content is None:
        raise GatewayError(f"{where}.content is missing")
    clean: Message = {"role": _ROLES[role], "content": content}
    if role == "tool" and isinstance(message.get("tool_call_id"), str):
        clean["tool_call_id"] = message["tool_call_id"]
    return clean


def _answer(message: dict[str, Any], content: str | None, where: str) -> Message:
    clean: Message = {"role": "assistant", "content": content}
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning:
        clean["reasoning_content"] = reasoning
    calls = message.get("tool_calls") or []
    if calls:
        clean["tool_calls"] = _calls(calls, where)
    return clean


def _text(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise GatewayError(f"{where}.content must be a string, got {short(content)}")
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise GatewayError(
                f"{where}.content[{index}] is {short(kind)}, not text",
                hint="this model reads text only",
                code="unsupported_content",
            )
    return "".join(part["text"] for part in content)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    clean = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not isinstance(function.get("arguments"), str)
        ):
            raise GatewayError(
                f"{where}.tool_calls: {short(call)} is not a call",
                hint="function.name and function.arguments are strings",
            )
        named = {"name": function["name"], "arguments": function["arguments"]}
        clean.append({"id": str(call.get("id", "")), "type": "function", "function": named})
    return clean
