"""ToolHarness: a model that calls tools in the machine, turn by turn.

user prompt ─► answer ─► tool calls run in the machine ─► their results ─► answer ─► …
                                                 until done / no call / max_turns / an answer cut short

With summaries, a context that is nearly full is followed by a fresh one, see summary.py. A summary is an answer too: it
counts as a turn.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from rollmill.environments.harness import Harness, HarnessResult, Progress
from rollmill.environments.harnesses.model import Asking, ModelClient, ModelSettings
from rollmill.environments.harnesses.summary import Contexts, Messages
from rollmill.environments.harnesses.tools import BadToolCall, Tool, cut, parse_call
from rollmill.environments.task import Task
from rollmill.errors import HarnessError
from rollmill.machines.machine import ExecResult, Machine
from rollmill.types import Sampling


class ToolSettings(ModelSettings):
    max_turns: int = Field(
        50, ge=1, description="Most answers of the model in one episode. It is graded as it stands after that."
    )
    tool_timeout_s: float = Field(120.0, gt=0, description="Seconds one tool call may run before it is stopped.")
    max_tool_output: int = Field(
        10_000, ge=20, description="Most characters of one tool result that the model reads; the middle is cut."
    )


class ToolHarness(Harness):
    """Base class: a harness names its `tools`, and runs a call. One per dispatcher: all episodes share its
    connections to the model."""

    resumable = True
    tools: ClassVar[Sequence[Tool]]

    def __init__(self, config: ToolSettings) -> None:
        self.config = config
        self._model = ModelClient(deadline_s=config.request_deadline_s)

    @abstractmethod
    async def call(self, machine: Machine, name: str, arguments: dict[str, Any]) -> str | None:
        """Run a tool with checked arguments. The text for the model, or None if the episode is done. BadToolCall: the
        model erred."""

    async def follow(self, progress: Progress, machine: Machine) -> Progress:
        """Called when an episode begins or goes on: a harness with more state than its messages keeps it here."""
        return progress

    def opening(self, task: Task) -> tuple[Messages, list[dict[str, Any]]]:
        return start(task, self.config.system_prompt), [tool.schema() for tool in self.tools]

    async def run(
        self,
        task: Task,
        machine: Machine,
        *,
        base_url: str,
        api_key: str,
        sampling: Sampling,
        progress: Progress | None = None,
    ) -> HarnessResult:
        first, schemas = self.opening(task)
        asking = Asking(self._model, base_url, api_key, self.config, sampling, schemas)
        by_name = {tool.name: tool for tool in self.tools}
        return await run_turns(
            asking,
            lambda call: self.call(machine, *parse_call(call, by_name)),
            await asking.contexts(first, self.config.max_tool_output),
            max_turns=self.config.max_turns,
            max_tool_output=self.config.max_tool_output,
            progress=None if progress is None else await self.follow(progress, machine),
        )

    async def exec(self, machine: Machine, argv: Sequence[str], *, max_output: int = 1 << 16) -> ExecResult:
        """Run a command within the time of a tool call."""
        limit_s = self.config.tool_timeout_s * machine.capabilities.slowdown
        return await machine.exec(argv, timeout_s=limit_s, max_output=max_output)

    async def close(self) -> None:
        await self._model.close()


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
            except BadToolCall as bad:
                bad_tool_calls += 1
                text = bad.text
            if text is None:
                return HarnessResult("done", turn, tool_calls, bad_tool_calls)
            text = cut(text, max_tool_output)
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
