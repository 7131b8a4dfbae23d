"""The demo's agent: a tiny model reads, edits and tests the files of one machine until it says it is done.

Its tools and every text that the model reads are in coding_tools.py. A run names it as any class of one's own:
`kind = "rollmill.demo.coding:CodingHarness"`.
"""

from __future__ import annotations

import errno
from typing import Any

from pydantic import Field

from rollmill.demo import coding_tools
from rollmill.environments.harnesses.tools import BadToolCall
from rollmill.environments.harnesses.turns import ToolHarness, ToolSettings
from rollmill.machines.machine import Machine

_LIST_COMMAND = ("find", ".", "-type", "f", "!", "-path", "*/.*")


class CodingConfig(ToolSettings):
    max_turns: int = Field(8, ge=1, description="Most answers of the model in one episode.")
    tool_timeout_s: float = Field(5.0, gt=0, description="Seconds one tool call may run before it is stopped.")
    max_tool_output: int = Field(2000, ge=20, description="Most characters of one tool result that the model reads.")
    test_command: tuple[str, ...] = Field(
        ("python", "test.py"), min_length=1, description="What the `run` tool runs in the machine: an argv list."
    )


class CodingHarness(ToolHarness):
    name = "coding"
    tools = coding_tools.TOOLS
    config: CodingConfig

    def __init__(self, config: CodingConfig | None = None) -> None:
        super().__init__(config or CodingConfig())

    async def call(self, machine: Machine, name: str, arguments: dict[str, Any]) -> str | None:
        try:
            match name:
                case "done":
                    return None
                case "run":
                    return await self._run_tests(machine)
                case "list":
                    result = await self.exec(machine, _LIST_COMMAND)
                    paths = result.output.decode("utf-8", "replace").splitlines()
                    return coding_tools.render_list([path.removeprefix("./") for path in paths])
                case "read":
                    return coding_tools.render_read(await self._read(machine, arguments["path"]))
                case "write":
                    await machine.write(arguments["path"], arguments["content"].encode("utf-8", "replace"))
                    return coding_tools.OK
                case _:
                    text = await self._read(machine, arguments["path"])
                    edited = coding_tools.apply_edit(text, arguments["line"], arguments["text"])
                    await machine.write(arguments["path"], edited.encode("utf-8", "replace"))
                    return coding_tools.OK
        except OSError as error:
            raise BadToolCall(_error_text(error)) from None

    async def _read(self, machine: Machine, path: str) -> str:
        return (await machine.read(path)).decode("utf-8", "replace")

    async def _run_tests(self, machine: Machine) -> str:
        result = await self.exec(machine, self.config.test_command)
        return coding_tools.render_run(result.exit_code, result.output, stopped=result.stopped)


_ERROR_TEXTS = {
    errno.ENOENT: coding_tools.ERROR_NO_FILE,
    errno.ENOTDIR: coding_tools.ERROR_NO_FILE,
    errno.EISDIR: coding_tools.ERROR_DIRECTORY,
    errno.EFBIG: coding_tools.ERROR_TOO_LARGE,
    errno.ENOSPC: coding_tools.ERROR_TOO_LARGE,
}


def _error_text(error: OSError) -> str:
    return _ERROR_TEXTS.get(error.errno or 0, coding_tools.ERROR_DENIED)
