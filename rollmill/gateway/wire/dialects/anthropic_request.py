"""Reads a request of Anthropic's messages format as chat messages.

system "…"                                     {"role": "system", "content": "…"}
user [tool_result, tool_result, text]          {"role": "tool"}, {"role": "tool"}, {"role": "user"}
assistant [thinking, text, tool_use]           {"role": "assistant", reasoning_content, content, tool_calls}

A tool with `defer_loading` is not listed in the prompt. Where a result has a `tool_reference`, its definition stands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from rollmill.chat.format import Message, Tool
from rollmill.chat.openai_messages import parse_tools
from rollmill.errors import GatewayError
from rollmill.gateway.wire.dialects import fields
from rollmill.strict import short

_BILLING = "x-anthropic-billing-header:"  # Claude Code's first line of `system`, which is no part of a prompt
# what LiteLLM sends for an answer without text
_FILLER = "[System: Empty message content sanitised to satisfy protocol]"
_SERVED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset", "advisor_")
MALFORMED = "malformed_arguments"  # the key of an input that stands for arguments which are not a JSON object


class AnthropicTools(NamedTuple):
    """Tools as OpenAI tool definitions."""

    tools: list[Tool]
    deferred: list[Tool]
    dropped: tuple[str, ...]  # kinds of tools that only a server could run


def parse_user(tree: Mapping[str, Any]) -> tuple[str, str]:
    """The user of a request, and its conversation if `metadata.user_id` names it too, as Claude Code's does."""
    user = (fields.field(tree, "metadata", dict) or {}).get("user_id")
    if not isinstance(user, str):
        return "", ""
    try:
        facts = json.loads(user)
    except (ValueError, RecursionError):
        who, _, session = user.rpartition("_session_")  # of older versions
        return (who, session) if who else (user, "")
    if not isinstance(facts, dict) or not isinstance(facts.get("session_id"), str):
        return user, ""
    return str(facts.get("account_uuid") or facts.get("device_id") or ""), facts["session_id"]


def parse_conversation(tree: Mapping[str, Any], max_messages: int, deferred: list[Tool]) -> list[Message]:
    given = fields.field(tree, "messages", list)
    if not given or len(given) > max_messages:
        raise GatewayError(f"messages must hold 1 to {max_messages} messages, got {len(given or ())}")
    messages: list[Message] = []
    if system := _blocks(tree.get("system") or [], "system"):
        if str(system[0].get("text")).startswith(_BILLING):
            system = system[1:]
        messages.append({"role": "system", "content": _text(system, "system")})
    definitions = {tool["function"]["name"]: tool for tool in deferred}
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role == "assistant":
            messages.append(_answer(message.get("content"), where))
        elif role in ("user", "system"):
            messages += _said(role, message.get("content"), where, definitions)
        else:
            raise GatewayError(f"{where} has the role {short(role)}", hint="user or assistant")
    if messages[-1]["role"] == "assistant":
        raise GatewayError(
            "the last message is an answer; continuing a given answer is not supported",
            hint="end with a message of the user",
        )
    return messages


def parse_anthropic_tools(tree: Mapping[str, Any]) -> AnthropicTools:
    """A request whose tools only a server could run is refused: its answer would only pretend."""
    tools: list[Tool] = []
    deferred: list[Tool] = []
    dropped: list[str] = []
    for index, tool in enumerate(fields.field(tree, "tools", list) or []):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind.startswith(_SERVED):
            dropped.append(next(served for served in _SERVED if kind.startswith(served)).rstrip("_"))
            continue
        if not isinstance(tool, dict) or kind not in (None, "custom"):
            raise GatewayError(
                f"tools[{index}] of type {short(kind)} is not supported", hint="give it a name and an input_schema"
            )
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {}}
        if isinstance(tool.get("description"), str):
            function["description"] = tool["description"]
        (deferred if tool.get("defer_loading") is True else tools).append({"type": "function", "function": function})
    if dropped and not tools and not deferred:
        raise GatewayError(f"the tool {dropped[0]} is not supported", hint="tools run at the client")
    return AnthropicTools(parse_tools({"tools": tools}), parse_tools({"tools": deferred}), tuple(dropped))


def _said(role: str, content: Any, where: str, definitions: Mapping[str, Tool]) -> list[Message]:
    """A user's message: results of tools, and text. Texts between two results are one message."""
    messages: list[Message] = []
    for index, block in enumerate(_blocks(content, where)):
        place = f"{where}.content[{index}]"
        if block.get("type") == "tool_result":
            given = block.get("content") or ""
            parts = [_defined(part, definitions) for part in given] if isinstance(given, list) else given
            result: Message = {"role": "tool", "content": _text(parts, f"{place}.content")}
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
        elif kind != "redacted_thinking" and block.get("text") != _FILLER:
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


def _defined(part: Any, definitions: Mapping[str, Tool]) -> Any:
    """A reference to a tool as a text: its definition."""
    if not isinstance(part, dict) or part.get("type") != "tool_reference":
        return part
    name = str(part.get("tool_name"))
    known = name in definitions
    return {"type": "text", "text": json.dumps(definitions[name]) if known else f"there is no tool {name}"}


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
    # clients look for these words of Anthropic's API: they take the image out and go on
    words = {"image": "Could not process image: ", "document": "Could not process PDF: "}
    raise GatewayError(
        f"{words.get(str(kind), '')}{where} is {short(kind)}, not text",
        hint="this model reads text only",
        code="unsupported_content",
    )
