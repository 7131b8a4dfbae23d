"""The chat harness: one question, one answer, no tools.

The answer is handed in as a file. `answer.txt` gets its whole text; any other path that the task's `submission` names
first gets the first fenced code block of the answer, or the whole text if it has none. The machine only carries the
file to the hand-in.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

from rollmill.environments.harness import HarnessResult
from rollmill.environments.harnesses.model import ModelClient, ModelSettings, sampling_fields
from rollmill.environments.harnesses.turns import start
from rollmill.environments.machine import Machine
from rollmill.environments.task import Task
from rollmill.types import Sampling

ANSWER = "answer.txt"
_FENCE = re.compile(r"^```[^\n`]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


class ChatConfig(ModelSettings):
    """One answer needs no more."""


class ChatHarness:
    """One per dispatcher: all episodes share its connections."""

    name = "chat"

    def __init__(self, config: ChatConfig | None = None) -> None:
        self.config = config or ChatConfig()
        self._model = ModelClient(deadline_s=self.config.request_deadline_s)

    async def run(
        self, task: Task, machine: Machine, *, base_url: str, api_key: str, sampling: Sampling
    ) -> HarnessResult:
        body = {"model": self.config.model, "messages": start(task, self.config.system_prompt)}
        choice = await self._model.answer(base_url, api_key, body | sampling_fields(sampling, 1))
        if choice is None:
            return HarnessResult("length", turns=1, tool_calls=0)
        content = choice["message"].get("content")
        for path, text in files_of(content if isinstance(content, str) else "", task).items():
            with contextlib.suppress(OSError):  # an answer that does not fit is not handed in
                await machine.write(path, text.encode("utf-8", "replace"))
        stop: Any = "length" if choice.get("finish_reason") == "length" else "answer"
        return HarnessResult(stop, turns=1, tool_calls=0)

    async def close(self) -> None:
        await self._model.close()


def files_of(answer: str, task: Task) -> dict[str, str]:
    """The files that an answer is handed in as."""
    files = {ANSWER: answer}
    if code_path := next((path for path in task.paths if path != ANSWER), None):
        block = _FENCE.search(answer)
        files[code_path] = block.group(1) if block else answer
    return files
