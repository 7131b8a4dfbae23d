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

from rollmill.environments.harness import Progress
from rollmill.environments.harnesses.tools import ERROR_ARGUMENTS, BadToolCall, Tool, cut
from rollmill.environments.harnesses.turns import ToolHarness, ToolSettings
from rollmill.machines.machine import Machine

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


class ShellConfig(ToolSettings):
    done_line: str = Field(
        "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
        min_length=1,
        description="A command that prints this as its first line ends the episode: `echo` and this text.",
    )
    system_prompt: str = Field(
        "Solve the task with the bash tool. When you are done, run: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
        description="System message before the task. Empty: none.",
    )


class ShellHarness(ToolHarness):
    name = "shell"
    tools = (Tool("bash", "Run a bash command in the work directory.", {"command": str}),)
    config: ShellConfig

    def __init__(self, config: ShellConfig | None = None) -> None:
        super().__init__(config or ShellConfig())

    async def follow(self, progress: Progress, machine: Machine) -> Progress:
        return await _ShellProgress.begin(progress, machine)

    async def call(self, machine: Machine, name: str, arguments: dict[str, Any]) -> str | None:
        """Run one command. Returns what the model reads; None if it ends the episode."""
        command = arguments["command"].encode("utf-8", "replace").decode()
        if "\0" in command or len(command.encode()) > _LONGEST_COMMAND:
            raise BadToolCall(ERROR_ARGUMENTS)
        try:  # a character has at most 4 bytes
            result = await self.exec(machine, bash(command), max_output=4 * self.config.max_tool_output)
        except OSError:
            raise BadToolCall(ERROR_ARGUMENTS) from None
        text = result.output.decode("utf-8", "replace")
        if text.lstrip().split("\n", 1)[0].strip() == self.config.done_line:
            return None
        end = f"stopped: {result.stopped} limit" if result.stopped else f"exit code {result.exit_code}"
        # the end of the call stays readable when the output is cut
        return f"{cut(text, self.config.max_tool_output - len(end) - 1).rstrip()}\n{end}".lstrip()
