"""The tools of OpenAI's responses format. The model knows functions only, so the others are written as functions:

    function                            as it is
    namespace mail: function send       mail__send, and the call names both again
    custom patch (a free text)          patch(input: string), and the call has the text as its input

Tools that a server would run (web_search, file_search, …) are left out if the request has other tools. A request that
has no other tool is refused: its answer would only pretend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rollmill.chat.call_family import read_json
from rollmill.chat.format import Tool
from rollmill.chat.openai_messages import parse_tools
from rollmill.errors import GatewayError
from rollmill.gateway.wire.dialects import fields
from rollmill.strict import short

# run by OpenAI's servers, or descriptions of them; the client does nothing for such a tool
SERVED = frozenset(
    "code_interpreter computer_use_preview file_search image_generation mcp tool_search web_search"
    " web_search_2025_08_26 web_search_preview web_search_preview_2025_03_11".split()
)
_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class ResponseTools(NamedTuple):
    tools: list[Tool]
    named: Mapping[str, tuple[str, str | None]]  # name for the model -> the client's name, and its namespace
    custom: frozenset[str]  # names for the model of tools that take a free text
    dropped: tuple[str, ...]


def parse_response_tools(tree: Mapping[str, Any]) -> ResponseTools:
    tools: list[Tool] = []
    named: dict[str, tuple[str, str | None]] = {}
    custom, dropped = set(), []
    for where, tool, space in _listed(fields.field(tree, "tools", list) or []):
        kind = tool.get("type")
        if kind in SERVED:
            dropped.append(str(kind))
            continue
        if kind not in ("function", "custom") or not isinstance(tool.get("name"), str):
            raise GatewayError(f"{where} of type {short(kind)} is not supported", hint="use functions with a name")
        name = flat_name(tool["name"], space)
        function = {field: tool[field] for field in ("description", "parameters") if tool.get(field) is not None}
        if kind == "custom":
            custom.add(name)
            function = {"description": _described(tool), "parameters": _TEXT}
        if space is not None:
            named[name] = tool["name"], space
        tools.append({"type": "function", "function": {"name": name, **function}})
    if dropped and not tools:
        raise GatewayError(f"the tool {dropped[0]} is not supported", hint="tools run at the client: use functions")
    parsed = parse_tools({"tools": tools, "tool_choice": tree.get("tool_choice")})
    return ResponseTools(parsed, named, frozenset(custom), tuple(dropped))


def flat_name(name: str, space: str | None) -> str:
    """The name of a tool for the model. Spaces of MCP servers end in the separator already."""
    return name if not space else f"{space.removesuffix('__')}__{name}"


def call_item(call: Mapping[str, Any], named: Mapping[str, tuple[str, str | None]], custom: Any) -> dict[str, Any]:
    """The call of a model as the client knows its tool."""
    flat, arguments = call["function"]["name"], call["function"]["arguments"]
    name, space = named.get(flat, (flat, None))
    item: dict[str, Any] = {"type": "function_call", "call_id": call["id"], "name": name, "arguments": arguments}
    if flat in custom:
        item["type"] = "custom_tool_call"
        item["input"] = _free_text(item.pop("arguments"))
    return item | ({"namespace": space} if space is not None else {})


def _listed(given: list[Any]) -> Iterator[tuple[str, Mapping[str, Any], str | None]]:
    """Where each tool stands, the tool, and the namespace it is in."""
    for index, tool in enumerate(given):
        where = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise GatewayError(f"{where} must be an object, got {short(tool)}")
        if tool.get("type") != "namespace":
            yield where, tool, None
            continue
        space = tool.get("name")
        if not isinstance(space, str) or not space:
            raise GatewayError(f"{where} is a namespace without a name")
        for number, inner in enumerate(fields.field(tool, "tools", list) or []):
            if not isinstance(inner, dict):
                raise GatewayError(f"{where}.tools[{number}] must be an object, got {short(inner)}")
            yield f"{where}.tools[{number}]", inner, space


def _described(tool: Mapping[str, Any]) -> str:
    """A grammar becomes a part of the description: the model is told of it, and its text is not forced to follow it."""
    form = tool.get("format") or {}
    grammar = form.get("definition") if isinstance(form, dict) else None
    text = str(tool.get("description") or "")
    return f"{text}\n\n`input` follows this grammar:\n{grammar}".lstrip() if grammar else text


def _free_text(arguments: str) -> str:
    try:
        value = read_json(arguments)
    except ValueError:
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
