"""The shell harness: one tool, `bash`. The style of mini-swe-agent.

Each call is a bash of its own. The work directory and the exported variables of one call are there in the next one,
because bash writes them to a file in the machine when it ends. A call that was stopped leaves them as they were.
Processes in the background end with their call. The episode ends when the model calls no tool, or when the first line
that a command prints is `done_line`. The image must have bash.
"""

from __future__ import annotations

import contextlib
from typing import Any

from pydantic import Field

from rollmill.environments.harness import HarnessResult, Progress
from rollmill.environments.harnesses import tools
from rollmill.environments.harnesses.model import Asking, ModelClient, ModelSettings
from rollmill.environments.harnesses.summary import Messages
from rollmill.environments.harnesses.turns import run_turns, start
from rollmill.environments.task import Task
from rollmill.machines.machine import Machine
from rollmill.types import Sampling

_TOOLS = {"bash": tools.Tool("bash", "Run a bash command in the work directory.", {"command": str})}
_LONGEST_COMMAND = 100_000  # characters; the kernel allows 128 KiB per argument
# the agent's own state, so it does not matter that the agent can change it
_BASH = """
. /tmp/.shell_variables 2>/dev/null
cd -- "$(cat /tmp/.shell_directory 2>/dev/null)" 2>/dev/null
trap 'code=$?; export -p > /tmp/.shell_variables; pwd > /tmp/.shell_directory; exit $code' EXIT
eval "$1"
"""
_KEPT = ("/tmp/.shell_variables", "/tmp/.shell_directory")  # noqa: S108  of the machine


def bash(command: str) -> list[str]:
    """The command line of one call."""
    return ["bash", "-c", _BASH, "bash", command]


class _ShellProgress:
    """Keeps the directory and the variables of the shell too: a snapshot of files may not have /tmp."""

    def __init__(self, progress: Progress, machine: Machine) -> None:
        self._progress, self._machine = progress, machine
        self.state = progress.state

    @classmethod
    async def begin(cls, progress: Progress, machine: Machine) -> _ShellProgress:
        for path, text in ((progress.state or {}).get("shell") or {}).items():
            if path in _KEPT:
                await machine.write(path, str(text).encode("utf-8", "surrogateescape"))
        return cls(progress, machine)

    async def reached(self, state: dict[str, Any]) -> None:
        kept = {}
        for path in _KEPT:
            with contextlib.suppress(OSError):
                kept[path] = (await self._machine.read(path)).decode("utf-8", "surrogateescape")
        await self._progress.reached({**state, "shell": kept})


class ShellConfig(ModelSettings):
    max_turns: int = Field(
        default=30, ge=1, description="Most answers of the model in one episode. It is graded as it stands after that."
    )
    tool_timeout_s: float = Field(default=30.0, gt=0, description="Seconds one command may run before it is stopped.")
    max_tool_output: int = Field(
        default=10_000, ge=20, description="Most characters of one command's output that the model reads."
    )
    done_line: str = Field(
        "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
        min_length=1,
        description="A command that prints this as its first line ends the episode: `echo` and this text.",
    )
    system_prompt: str = Field(
        "Solve the task with the bash tool. When you are done, run: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
        description="System message before the task. Empty: none.",
    )


class ShellHarness:
    """One per dispatcher: all episodes share its connections."""

    name = "shell"
    resumable = True

    def __init__(self, config: ShellConfig | None = None) -> None:
        self.config = config or ShellConfig()
        self._model = ModelClient(deadline_s=self.config.request_deadline_s)

    def opening(self, task: Task) -> tuple[Messages, list[dict[str, Any]]]:
        return start(task, self.config.system_prompt), [tool.schema() for tool in _TOOLS.values()]

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
        schemas = [tool.schema() for tool in _TOOLS.values()]
        asking = Asking(self._model, base_url, api_key, self.config, sampling, schemas)
        return await run_turns(
            asking,
            lambda call: self._bash(machine, call),
            await asking.contexts(start(task, self.config.system_prompt), self.config.max_tool_output),
            max_turns=self.config.max_turns,
            max_tool_output=self.config.max_tool_output,
            progress=None if progress is None else await _ShellProgress.begin(progress, machine),
        )

    async def close(self) -> None:
        await self._model.close()

    async def _bash(self, machine: Machine, call: Any) -> str | None:
        """Run one command. Returns what the model reads; None if it ends the episode."""
        _, arguments = tools.parse_call(call, _TOOLS)
        command = arguments["command"].encode("utf-8", "replace").decode()
        if "\0" in command or len(command.encode()) > _LONGEST_COMMAND:
            raise tools.BadToolCall(tools.ERROR_ARGUMENTS)
        try:
            result = await machine.exec(
                bash(command),
                timeout_s=self.config.tool_timeout_s * machine.capabilities.slowdown,
                max_output=4 * self.config.max_tool_output,  # a character has at most 4 bytes
            )
        except OSError:
            raise tools.BadToolCall(tools.ERROR_ARGUMENTS) from None
        text = result.output.decode("utf-8", "replace")
        if text.lstrip().split("\n", 1)[0].strip() == self.config.done_line:
            return None
        end = f"stopped: {result.stopped} limit" if result.stopped else f"exit code {result.exit_code}"
        # the end of the call stays readable when the output is cut
        return f"{tools.cut(text, self.config.max_tool_output - len(end) - 1).rstrip()}\n{end}".lstrip()
