"""The command harness: any agent program, unmodified, runs inside the machine.

The program gets the task as an argument (`{instruction}` in `argv`), as a file (`{instruction_file}`) or, if `argv` has
neither, on its standard input. It finds the model at OPENAI_BASE_URL with the key in OPENAI_API_KEY, or at
ANTHROPIC_BASE_URL with the key in ANTHROPIC_API_KEY. It has no other way out of the machine (see `proxy.py`).
The files in the work directory are graded when it ends, however it ends.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Literal

import aiohttp
from pydantic import Field

from rollmill.config import Config
from rollmill.environments.harness import Harness, HarnessResult
from rollmill.environments.harnesses.proxy import ModelProxy
from rollmill.environments.task import Task
from rollmill.errors import HarnessError, TaskError
from rollmill.keepalive import keepalive_connector
from rollmill.machines.machine import ExecResult, Machine
from rollmill.types import Sampling

INSTRUCTION_FILE = "/tmp/instruction.txt"  # noqa: S108  inside the machine
_LONGEST_ARGUMENT = 100_000  # bytes; the kernel allows 128 KiB per argument
_LONGEST_RUN_S = 7 * 86400.0  # the rollout's own time limit is shorter
_NOTE = 600  # characters


class CommandConfig(Config):
    argv: tuple[str, ...] = Field(
        min_length=1,
        description="The agent program and its arguments: a list, not a shell line. `{instruction}` becomes the task's "
        "text, `{instruction_file}` the path of a file with it. Without either the text is on standard input.",
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="More environment variables for the program, for example to configure it."
    )
    model: str = Field(
        default="rollmill",
        description="Model name in requests to the gateway. It replaces the name that the program uses.",
    )
    max_turns: int = Field(
        default=200, ge=1, description="Most answers of the model in one episode; the program is stopped after that."
    )
    max_request_bytes: int = Field(
        default=4 << 20, ge=1024, description="Largest request of the program to the model in bytes."
    )
    request_deadline_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds to wait for a model that cannot be reached or has no engine, per answer. An answer that "
        "is being sampled may take longer: only the episode's time limits it.",
    )


class CommandHarness(Harness):
    """One per dispatcher: all episodes share its connections to the gateway."""

    name = "command"

    def __init__(self, config: CommandConfig) -> None:
        self.config = config
        self._session: aiohttp.ClientSession | None = None

    async def run(
        self, task: Task, machine: Machine, *, base_url: str, api_key: str, sampling: Sampling
    ) -> HarnessResult:
        proxy = self._proxy(base_url, api_key, sampling)
        listener, port = await _listen(machine)
        async with proxy.serve(listener):
            try:
                result = await self._run_program(task, machine, proxy, port, api_key)
            except asyncio.CancelledError:  # its time is over
                if proxy.problem is not None:
                    raise HarnessError(proxy.problem) from None
                raise
        if proxy.problem is not None:
            raise HarnessError(proxy.problem, hint="is the gateway running? its log says more")
        return _describe(result, proxy)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _proxy(self, base_url: str, api_key: str, sampling: Sampling) -> ModelProxy:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=keepalive_connector())
        return ModelProxy(
            self._session,
            base_url,
            api_key,
            sampling,
            model=self.config.model,
            deadline_s=self.config.request_deadline_s,
            max_requests=self.config.max_turns,
            max_bytes=self.config.max_request_bytes,
        )

    async def _run_program(
        self, task: Task, machine: Machine, proxy: ModelProxy, port: int, api_key: str
    ) -> ExecResult | None:
        """Run the program until it ends; None if it was stopped because the proxy ended the episode."""
        text = instruction_text(task)
        data = text.encode("utf-8", "replace")
        if by_file := any("{instruction_file}" in argument for argument in self.config.argv):
            await machine.write(INSTRUCTION_FILE, data)
        by_argument = any("{instruction}" in argument for argument in self.config.argv)
        url = f"http://127.0.0.1:{port}/v1"
        # OPENAI_API_BASE is the name that older clients read; Anthropic's clients add /v1 themselves
        model = {"OPENAI_BASE_URL": url, "OPENAI_API_BASE": url, "OPENAI_API_KEY": api_key}
        model |= {"ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "ANTHROPIC_API_KEY": api_key}
        program = machine.exec(
            fill(self.config.argv, text),
            env={**model, **self.config.env},
            stdin=b"" if by_file or by_argument else data,
            timeout_s=_LONGEST_RUN_S,
            max_output=4 * _NOTE,
        )
        running, ended = asyncio.ensure_future(program), asyncio.ensure_future(proxy.ended.wait())
        try:
            await asyncio.wait([running, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            running.cancel()  # without effect if it has ended
            await asyncio.wait([running, ended])
        return None if running.cancelled() else running.result()


async def _listen(machine: Machine) -> tuple[socket.socket, int]:
    if not machine.capabilities.listen:
        raise HarnessError(
            "this kind of machine cannot lead a program to its model",
            hint='[machine] kind = "namespace", "qemu", "remote" can; see Machine.listen in docs/reference/python.md',
        )
    return await machine.listen()


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


def _describe(result: ExecResult | None, proxy: ModelProxy) -> HarnessResult:
    """However the program ended, its work is graded as it stands."""
    stop: Literal["done", "max_turns", "error"]
    if result is None:
        stop, why = "max_turns", "stopped: too many requests to the model"
    elif result.stopped is not None:
        stop, why = "error", f"stopped: {result.stopped} limit"
    else:
        stop, why = ("done" if result.exit_code == 0 else "error"), f"exit code {result.exit_code}"
    if proxy.turns == 0:
        why += "; it never got an answer of the model"
    output = result.output.decode("utf-8", "replace").strip() if result else ""
    note = f"{why}; its output ends: {output[-_NOTE:]}" if output else why
    return HarnessResult(stop, turns=proxy.turns, tool_calls=0, note=note)
