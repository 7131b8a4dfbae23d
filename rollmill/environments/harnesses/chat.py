"""The chat harness: one question, one answer, no tools.

With summaries, an answer that is cut short is not the last one: the model summarises it, and goes on in a fresh
context.

The answer is handed in as a file. `answer.txt` gets its whole text; any other path that the task's `submission` names
first gets the first fenced code block of the answer, or the whole text if it has none. Nothing runs before grading, so
the harness gets a folder in memory instead of a machine.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from typing import Any

from rollmill.environments.harness import Harness, HarnessResult
from rollmill.environments.harnesses.model import Asking, ModelClient, ModelSettings
from rollmill.environments.harnesses.summary import Messages
from rollmill.environments.harnesses.turns import is_cut, start
from rollmill.environments.task import Task
from rollmill.machines.machine import Machine
from rollmill.types import Sampling

ANSWER = "answer.txt"
_FENCE = re.compile(r"^```[^\n`]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


class ChatConfig(ModelSettings):
    """One answer needs no more."""


class ChatHarness(Harness):
    """One per dispatcher: all episodes share its connections."""

    name = "chat"
    wants_machine = False

    def __init__(self, config: ChatConfig | None = None) -> None:
        self.config = config or ChatConfig()
        self._model = ModelClient(deadline_s=self.config.request_deadline_s)

    def opening(self, task: Task) -> tuple[Messages, list[dict[str, Any]]]:
        return start(task, self.config.system_prompt), []

    async def run(
        self, task: Task, machine: Machine, *, base_url: str, api_key: str, sampling: Sampling
    ) -> HarnessResult:
        asking = Asking(self._model, base_url, api_key, self.config, sampling)
        contexts = await asking.contexts(start(task, self.config.system_prompt))
        for turn in itertools.count(1):
            summary, choice = contexts.asked, await asking.answer(contexts.messages, turn, contexts.headers)
            if choice is None:
                return HarnessResult("length", turns=turn, tool_calls=0)
            if summary:
                contexts.take(choice)
            elif not (is_cut(choice) and contexts.go_on(choice)):
                await self._hand_in(choice["message"].get("content"), task, machine)
                return HarnessResult("length" if is_cut(choice) else "answer", turns=turn, tool_calls=0)
        raise AssertionError("counting does not end")

    async def _hand_in(self, content: Any, task: Task, machine: Machine) -> None:
        for path, text in files_of(content if isinstance(content, str) else "", task).items():
            with contextlib.suppress(OSError):  # an answer that does not fit is not handed in
                await machine.write(path, text.encode("utf-8", "replace"))

    async def close(self) -> None:
        await self._model.close()


def files_of(answer: str, task: Task) -> dict[str, str]:
    """The files that an answer is handed in as."""
    files = {ANSWER: answer}
    if code_path := next((path for path in task.paths if path != ANSWER), None):
        block = _FENCE.search(answer)
        files[code_path] = block.group(1) if block else answer
    return files
