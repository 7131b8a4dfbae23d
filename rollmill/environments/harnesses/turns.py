"""The loop of a harness with tools:

user prompt ─► answer ─► tool calls run in the machine ─► their results ─► answer ─► …
                                                 until done / no call / max_turns / an answer cut short

With summaries, a context that is nearly full is followed by a fresh one, see summary.py. A summary is an answer too: it
counts as a turn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rollmill.environments.harness import HarnessResult, Progress
from rollmill.environments.harnesses import tools
from rollmill.environments.harnesses.model import Asking
from rollmill.environments.harnesses.summary import Contexts, Messages
from rollmill.environments.task import Task
from rollmill.errors import HarnessError


def start(task: Task, system_prompt: str) -> Messages:
    """The first messages of an episode."""
    return [*([{"role": "system", "content": system_prompt}] if system_prompt else []), *task.messages]


async def run_turns(
    asking: Asking,
    call_tool: Callable[[Any], Awaitable[str | None]],
    contexts: Contexts,
    *,
    max_turns: int,
    max_tool_output: int,
    progress: Progress | None = None,
) -> HarnessResult:
    """`call_tool` returns the text for the model, or None if the episode is done. BadToolCall: the model erred."""
    before, tool_calls, bad_tool_calls = _begin(contexts, progress)
    for turn in range(before + 1, max_turns + 1):
        summary, choice = contexts.asked, await asking.answer(contexts.messages, turn, contexts.headers)
        if summary and choice is not None:
            contexts.take(choice)
            continue
        if choice is None or is_cut(choice):
            if contexts.relieve(choice):
                continue
            return HarnessResult("length", turn, tool_calls, bad_tool_calls)
        calls = choice["message"].get("tool_calls")
        if not calls or not isinstance(calls, list):
            return HarnessResult("answer", turn, tool_calls, bad_tool_calls)
        contexts.add(choice["message"])
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
            contexts.add({"role": "tool", "tool_call_id": _call_id(call), "content": text})
        contexts.check(choice)
        if progress is not None:
            await progress.reached({"counts": [turn, tool_calls, bad_tool_calls], "contexts": contexts.save()})
    return HarnessResult("max_turns", max_turns, tool_calls, bad_tool_calls)


def _begin(contexts: Contexts, progress: Progress | None) -> tuple[int, int, int]:
    """Turns, tool calls and bad ones so far. HarnessError: what was kept of an interrupted episode makes no sense."""
    if progress is None or progress.state is None:
        return 0, 0, 0
    try:
        turn, tool_calls, bad_tool_calls = map(int, progress.state["counts"])
        contexts.restore(progress.state["contexts"])
    except (KeyError, TypeError, ValueError) as error:
        raise HarnessError(f"the checkpoint of an episode is damaged: {error!r}") from None
    return turn, tool_calls, bad_tool_calls


def is_cut(choice: Mapping[str, Any]) -> bool:
    return choice.get("finish_reason") == "length"


def _call_id(call: Any) -> str:
    return str(call.get("id", "")) if isinstance(call, dict) else ""
