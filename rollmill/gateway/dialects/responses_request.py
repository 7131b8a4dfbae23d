"""Reads the items of OpenAI's responses format as chat messages.

Items of one answer (reasoning, message, function calls) follow each other; together they are one assistant message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmill.chat.format import Message, Tool
from rollmill.errors import GatewayError
from rollmill.gateway.body import short
from rollmill.gateway.dialects import fields
from rollmill.gateway.dialects.openai_chat import parse_tools

_ROLES = {"system": "system", "developer": "system", "user": "user"}
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def parse_items(given: Any, max_messages: int) -> list[Message]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given or len(given) > max_messages:
        raise GatewayError(f"input must be a text or 1 to {max_messages} items, got {short(given)}")
    messages: list[Message] = []
    for index, item in enumerate(given):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise GatewayError(f"{where} must be an object, got {short(item)}")
        _add(messages, item, where)
    return messages


def parse_response_tools(tree: Mapping[str, Any]) -> list[Tool]:
    """As OpenAI tool definitions of chat completions."""
    tools = []
    for index, tool in enumerate(fields.field(tree, "tools", list) or []):
        kind = tool.get("type") if isinstance(tool, dict) else tool
        if kind != "function":
            raise GatewayError(f"tools[{index}] of type {short(kind)} is not supported", hint="use functions")
        function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    return parse_tools({"tools": tools, "tool_choice": tree.get("tool_choice")})


def _add(messages: list[Message], item: dict[str, Any], where: str) -> None:
    kind, role = item.get("type", "message"), item.get("role")
    if kind == "message" and role == "assistant":
        answer = _answer(messages)
        answer["content"] = (answer["content"] or "") + _text(item.get("content"), where)
    elif kind == "message" and isinstance(role, str) and role in _ROLES:
        messages.append({"role": _ROLES[role], "content": _text(item.get("content"), where)})
    elif kind == "function_call":
        _answer(messages).setdefault("tool_calls", []).append(_call(item, where))
    elif kind == "function_call_output":
        result: Message = {"role": "tool", "content": _text(item.get("output"), f"{where}.output")}
        if isinstance(item.get("call_id"), str):
            result["tool_call_id"] = item["call_id"]
        messages.append(result)
    elif kind == "reasoning":
        thoughts = _text(item.get("content") or item.get("summary") or "", where)
        if thoughts:
            answer = _answer(messages)
            answer["reasoning_content"] = answer.get("reasoning_content", "") + thoughts
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
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise GatewayError(f"{where} is not a call: name and arguments are strings")
    return {
        "id": str(item.get("call_id", "")),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


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
