"""The loop of a harness with tools:

user prompt ─► answer ─► tool calls run in the machine ─► their results ─► answer ─► …
                                                 until done / no call / max_turns / an answer cut short
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from rollmill.environments.harness import HarnessResult
from rollmill.environments.harnesses import tools
from rollmill.environments.task import Task

Messages = list[dict[str, Any]]


def start(task: Task, system_prompt: str) -> Messages:
    """The first messages of an episode."""
    return [*([{"role": "system", "content": system_prompt}] if system_prompt else []), *task.messages]


async def run_turns(
    ask: Callable[[Messages, int], Awaitable[dict[str, Any] | None]],
    call_tool: Callable[[Any], Awaitable[str | None]],
    messages: Messages,
    *,
    max_turns: int,
    max_tool_output: int,
) -> HarnessResult:
    """`ask` returns the model's next choice, or None if the context is full.

    `call_tool` returns the text for the model, or None if the episode is done. BadToolCall: the model erred.
    """
    tool_calls = bad_tool_calls = 0
    for turn in range(1, max_turns + 1):
        choice = await ask(messages, turn)
        if choice is None or choice.get("finish_reason") == "length":
            return HarnessResult("length", turn, tool_calls, bad_tool_calls)
        message = choice["message"]
        calls = message.get("tool_calls")
        if not calls or not isinstance(calls, list):
            return HarnessResult("answer", turn, tool_calls, bad_tool_calls)
        messages.append(message)
        for call in calls:
            tool_calls += 1
            try:
                text = await call_tool(call)
            except tools.BadToolCall as bad:
                bad_tool_calls += 1
                text = bad.text
            if text is None:
                return HarnessResult("done", turn, tool_calls, bad_tool_calls)
            text = tools.cut(text, max_tool_output)
            messages.append({"role": "tool", "tool_call_id": _call_id(call), "content": text})
    return HarnessResult("max_turns", max_turns, tool_calls, bad_tool_calls)


def _call_id(call: Any) -> str:
    return str(call.get("id", "")) if isinstance(call, dict) else ""
