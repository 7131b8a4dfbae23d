"""Reads a request of Anthropic's messages format as chat messages.

system "…"                                     {"role": "system", "content": "…"}
user [tool_result, tool_result, text]          {"role": "tool"}, {"role": "tool"}, {"role": "user"}
assistant [thinking, text, tool_use]           {"role": "assistant", reasoning_content, content, tool_calls}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from rollmill.chat.format import Message, Tool
from rollmill.errors import GatewayError
from rollmill.gateway.body import short
from rollmill.gateway.dialects import fields
from rollmill.gateway.dialects.openai_chat import parse_tools

MALFORMED = "malformed_arguments"  # the key of an input that stands for arguments which are not a JSON object


def parse_conversation(tree: Mapping[str, Any], max_messages: int) -> list[Message]:
    given = fields.field(tree, "messages", list)
    if not given or len(given) > max_messages:
        raise GatewayError(f"messages must hold 1 to {max_messages} messages, got {len(given or ())}")
    messages: list[Message] = []
    if tree.get("system"):
        messages.append({"role": "system", "content": _text(tree["system"], "system")})
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role == "assistant":
            messages.append(_answer(message.get("content"), where))
        elif role in ("user", "system"):
            messages += _said(role, message.get("content"), where)
        else:
            raise GatewayError(f"{where} has the role {short(role)}", hint="user or assistant")
    if messages[-1]["role"] == "assistant":
        raise GatewayError(
            "the last message is an answer; continuing a given answer is not supported",
            hint="end with a message of the user",
        )
    return messages


def parse_anthropic_tools(tree: Mapping[str, Any]) -> list[Tool]:
    """As OpenAI tool definitions."""
    tools = []
    for index, tool in enumerate(fields.field(tree, "tools", list) or []):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(tool, dict) or kind not in (None, "custom"):
            raise GatewayError(f"tools[{index}] of type {short(kind)} is not supported", hint="tools run at the client")
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {}}
        if isinstance(tool.get("description"), str):
            function["description"] = tool["description"]
        tools.append({"type": "function", "function": function})
    return parse_tools({"tools": tools})


def _said(role: str, content: Any, where: str) -> list[Message]:
    """A user's message: results of tools, and text. Texts between two results are one message."""
    messages: list[Message] = []
    for index, block in enumerate(_blocks(content, where)):
        place = f"{where}.content[{index}]"
        if block.get("type") == "tool_result":
            result: Message = {"role": "tool", "content": _text(block.get("content") or "", f"{place}.content")}
            if isinstance(block.get("tool_use_id"), str):
                result["tool_call_id"] = block["tool_use_id"]
            messages.append(result)
        elif messages and messages[-1]["role"] == role:
            messages[-1]["content"] += "\n" + _text([block], place)
        else:
            messages.append({"role": role, "content": _text([block], place)})
    return messages or [{"role": role, "content": ""}]


def _answer(content: Any, where: str) -> Message:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(_blocks(content, where)):
        kind = block.get("type")
        if kind == "tool_use":
            calls.append(_call(block, f"{where}.content[{index}]"))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            texts.append(_text([block], f"{where}.content[{index}]"))
    answer: Message = {"role": "assistant", "content": "".join(texts) or None}
    if any(thoughts):
        answer["reasoning_content"] = "".join(thoughts)
    if calls:
        answer["tool_calls"] = calls
    return answer


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    name, given = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(given, dict):
        raise GatewayError(f"{where} is not a call: it needs a name and an object `input`")
    raw = given.get(MALFORMED)
    arguments = raw if isinstance(raw, str) and len(given) == 1 else json.dumps(given, ensure_ascii=False)
    return {"id": str(block.get("id", "")), "type": "function", "function": {"name": name, "arguments": arguments}}


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise GatewayError(f"{where}.content must be a string or a list of blocks, got {short(content)}")
    return content


def _text(content: Any, where: str) -> str:
    """The text of a string or of text blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise GatewayError(f"{where} must be a string or a list of blocks, got {short(content)}")
    for block in content:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            _refuse(block, where)
    return "\n".join(block["text"] for block in content)


def _refuse(block: Any, where: str) -> NoReturn:
    kind = block.get("type") if isinstance(block, dict) else block
    raise GatewayError(
        f"{where} is {short(kind)}, not text", hint="this model reads text only", code="unsupported_content"
    )
