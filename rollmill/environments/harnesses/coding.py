"""The coding harness: a model reads, edits and tests the files of one machine until it says it is done.

It speaks plain OpenAI chat completions with tools, so the model may be anything behind a URL. What the model reads and
which tools it has is in `tools.py`; the loop is in `turns.py`.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from rollmill.environments.harness import HarnessResult, Progress
from rollmill.environments.harnesses import tools
from rollmill.environments.harnesses.model import Asking, ModelClient, ModelSettings
from rollmill.environments.harnesses.summary import Messages
from rollmill.environments.harnesses.turns import run_turns, start
from rollmill.environments.task import Task
from rollmill.machines.machine import ExecResult, Machine
from rollmill.types import Sampling


class HarnessConfig(ModelSettings):
    max_turns: int = Field(
        default=8, ge=1, description="Most answers of the model in one episode. It is graded as it stands after that."
    )
    tool_timeout_s: float = Field(default=5.0, gt=0, description="Seconds one tool call may run before it is stopped.")
    max_tool_output: int = Field(
        default=2000, ge=20, description="Most characters of one tool result that the model reads; the middle is cut."
    )
    full_tracebacks: bool = Field(
        False, description="Show whole tracebacks. Off: an uncaught exception reads `error NameError line 2`."
    )
    test_command: tuple[str, ...] = Field(
        default=("python", "test.py"),
        min_length=1,
        description="What the `run` tool runs in the machine: an argv list.",
    )


_LIST_COMMAND = ("find", ".", "-type", "f", "!", "-path", "*/.*")


class CodingHarness:
    """One per dispatcher: all episodes share its connections."""

    name = "coding"
    resumable = True

    def __init__(self, config: HarnessConfig | None = None) -> None:
        self.config = config or HarnessConfig()
        self._model = ModelClient(deadline_s=self.config.request_deadline_s)
        self._schemas = tools.tool_schemas()

    def opening(self, task: Task) -> tuple[Messages, list[dict[str, Any]]]:
        return start(task, self.config.system_prompt), self._schemas

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
        asking = Asking(self._model, base_url, api_key, self.config, sampling, self._schemas)
        return await run_turns(
            asking,
            lambda call: self._call(machine, call),
            await asking.contexts(start(task, self.config.system_prompt), self.config.max_tool_output),
            max_turns=self.config.max_turns,
            max_tool_output=self.config.max_tool_output,
            progress=progress,
        )

    async def close(self) -> None:
        await self._model.close()

    async def _call(self, machine: Machine, call: Any) -> str | None:
        """Run one tool call. Returns the text for the model, or None if it is done. BadToolCall: the model erred."""
        name, arguments = tools.parse_call(call)
        try:
            match name:
                case "done":
                    return None
                case "run":
                    return await self._run_tests(machine)
                case "list":
                    result = await self._exec(machine, _LIST_COMMAND)
                    paths = result.output.decode("utf-8", "replace").splitlines()
                    return tools.render_list([path.removeprefix("./") for path in paths])
                case "read":
                    return tools.render_read(await self._read(machine, arguments["path"]))
                case "write":
                    await machine.write(arguments["path"], arguments["content"].encode("utf-8", "replace"))
                    return tools.OK
                case _:
                    text = await self._read(machine, arguments["path"])
                    edited = tools.apply_edit(text, arguments["line"], arguments["text"])
                    await machine.write(arguments["path"], edited.encode("utf-8", "replace"))
                    return tools.OK
        except OSError as error:
            raise tools.BadToolCall(_error_text(error)) from None

    async def _read(self, machine: Machine, path: str) -> str:
        return (await machine.read(path)).decode("utf-8", "replace")

    async def _exec(self, machine: Machine, argv: Sequence[str]) -> ExecResult:
        return await machine.exec(argv, timeout_s=self.config.tool_timeout_s * machine.capabilities.slowdown)

    async def _run_tests(self, machine: Machine) -> str:
        result = await self._exec(machine, self.config.test_command)
        return tools.render_run(
            result.exit_code,
            result.output,
            stopped=result.stopped,
            full_tracebacks=self.config.full_tracebacks,
        )


_ERROR_TEXTS = {
    errno.ENOENT: tools.ERROR_NO_FILE,
    errno.ENOTDIR: tools.ERROR_NO_FILE,
    errno.EISDIR: tools.ERROR_DIRECTORY,
    errno.EFBIG: tools.ERROR_TOO_LARGE,
    errno.ENOSPC: tools.ERROR_TOO_LARGE,
}


def _error_text(error: OSError) -> str:
    return _ERROR_TEXTS.get(error.errno or 0, tools.ERROR_DENIED)
