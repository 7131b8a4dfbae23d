"""The command harness: any agent program, unmodified, runs inside the machine.

The program gets the task as an argument (`{instruction}` in `argv`), as a file (`{instruction_file}`) or, if `argv` has
neither, on its standard input. It finds the model at OPENAI_BASE_URL with the key in OPENAI_API_KEY, or at
ANTHROPIC_BASE_URL with the key in ANTHROPIC_API_KEY. It has no other way out of the machine (see `proxy.py`).
The files in the work directory are graded when it ends, however it ends.
"""

from __future__ import annotations

import socket

from pydantic import Field

from rollmill.environments.harnesses.proxied import NOTE, ProgramEnd, ProxiedConfig, ProxiedHarness
from rollmill.environments.task import Task
from rollmill.errors import HarnessError, TaskError
from rollmill.machines.machine import Machine

INSTRUCTION_FILE = "/tmp/instruction.txt"  # noqa: S108  inside the machine
_LONGEST_ARGUMENT = 100_000  # bytes; the kernel allows 128 KiB per argument
_LONGEST_RUN_S = 7 * 86400.0  # the rollout's own time limit is shorter


class CommandConfig(ProxiedConfig):
    argv: tuple[str, ...] = Field(
        min_length=1,
        description="The agent program and its arguments: a list, not a shell line. `{instruction}` becomes the task's "
        "text, `{instruction_file}` the path of a file with it. Without either the text is on standard input.",
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="More environment variables for the program, for example to configure it."
    )


class CommandHarness(ProxiedHarness):
    name = "command"

    def __init__(self, config: CommandConfig) -> None:
        super().__init__(config)
        self.config = config

    async def listen(self, machine: Machine) -> tuple[socket.socket, int]:
        if not machine.capabilities.listen:
            raise HarnessError(
                "this kind of machine cannot lead a program to its model",
                hint='[machine] kind = "namespace", "qemu", "remote" can; docs/reference/python.md: Machine.listen',
            )
        return await machine.listen()

    async def run_program(self, task: Task, machine: Machine, url: str, api_key: str) -> ProgramEnd:
        text = instruction_text(task)
        data = text.encode("utf-8", "replace")
        if by_file := any("{instruction_file}" in argument for argument in self.config.argv):
            await machine.write(INSTRUCTION_FILE, data)
        by_argument = any("{instruction}" in argument for argument in self.config.argv)
        # OPENAI_API_BASE is the name that older clients read; Anthropic's clients add /v1 themselves
        model = {"OPENAI_BASE_URL": url, "OPENAI_API_BASE": url, "OPENAI_API_KEY": api_key}
        model |= {"ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "ANTHROPIC_API_KEY": api_key}
        result = await machine.exec(
            fill(self.config.argv, text),
            env={**model, **self.config.env},
            stdin=b"" if by_file or by_argument else data,
            timeout_s=_LONGEST_RUN_S,
            max_output=4 * NOTE,
        )
        why = f"stopped: {result.stopped} limit" if result.stopped is not None else f"exit code {result.exit_code}"
        failed = result.stopped is not None or result.exit_code != 0
        return ProgramEnd(failed, why, result.output.decode("utf-8", "replace").strip())


def instruction_text(task: Task) -> str:
    """The instruction as one text: messages are separated by an empty line."""
    return "\n\n".join(str(message.get("content") or "") for message in task.messages)


def fill(argv: tuple[str, ...], text: str) -> list[str]:
    """`argv` with the instruction in it. TaskError if the instruction cannot be an argument."""
    if any("{instruction}" in argument for argument in argv) and (
        "\0" in text or len(text.encode("utf-8", "replace")) > _LONGEST_ARGUMENT
    ):
        raise TaskError(
            "the instruction is too long for an argument, or has a NUL character",
            hint="`{instruction_file}` in harness.argv gives it as a file",
        )
    text = text.encode("utf-8", "replace").decode()  # half a surrogate pair cannot be passed
    return [each.replace("{instruction_file}", INSTRUCTION_FILE).replace("{instruction}", text) for each in argv]
