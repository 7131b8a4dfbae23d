"""Agents of Harbor play in our machines: Harbor's code runs in a process of this host, its commands in the machine.

Each episode has a process of its own, so an agent finds its model in environment variables and hangs for itself alone.
What the process asks for is untrusted, and so checked and bounded: it reaches the machine of its episode and its model,
by the proxy that the harness `command` has too.
"""

from __future__ import annotations

import base64
import socket
import tempfile
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from rollmill.environments.harnesses.command import instruction_text
from rollmill.environments.harnesses.proxied import ProgramEnd, ProxiedConfig, ProxiedHarness
from rollmill.environments.packages.package_process import InterpreterConfig, PackageProcess
from rollmill.environments.task import Task
from rollmill.errors import HarnessError
from rollmill.machines.background_shell import BackgroundShell
from rollmill.machines.machine import Machine
from rollmill.strict import StrictModel

_LARGEST = 16 << 20  # bytes of a file or a tree
_LONGEST = 1 << 20  # characters of a command
_SHORT_S = 60.0
_PREPARE = "mkdir -p /logs/agent && chmod 777 /logs /logs/agent; pwd -P"


class HarborAgentConfig(ProxiedConfig, InterpreterConfig):
    agent: str = Field(
        "terminus-2",
        description="Agent of Harbor: a name, or `module:Class`. It has to ask the model itself, as `terminus-2` does; "
        "agents that Harbor installs in the container find no model there.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the agent, as `kwargs` in a job of Harbor."
    )


class _Exec(StrictModel):
    exec: str = Field(max_length=_LONGEST)
    cwd: str | None
    env: dict[Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")], str]
    timeout_s: Annotated[float, Field(gt=0, le=7 * 86400)] | None


class _Write(StrictModel):
    write: str
    data: str = Field(max_length=2 * _LARGEST)
    executable: bool


class _Read(StrictModel):
    read: str


class _Pack(StrictModel):
    pack: str


_ASKED: TypeAdapter[_Exec | _Write | _Read | _Pack] = TypeAdapter(_Exec | _Write | _Read | _Pack)


class _Ended(StrictModel):
    raised: str | None


class HarborAgentHarness(ProxiedHarness):
    name = "harbor"

    def __init__(self, config: HarborAgentConfig) -> None:
        super().__init__(config)
        self.config = config
        self._what = f"agent {config.agent} of Harbor"

    def preflight(self) -> None:
        """TaskError if the package or the agent is not there."""
        self._process("").ask_alone({"check": True})

    async def listen(self, machine: Machine) -> tuple[socket.socket, int]:
        listener = socket.create_server(("127.0.0.1", 0))
        return listener, listener.getsockname()[1]

    async def run_program(self, task: Task, machine: Machine, url: str, api_key: str) -> ProgramEnd:
        begun = await machine.exec(["sh", "-c", _PREPARE], timeout_s=_SHORT_S, user="root")
        shell = BackgroundShell(machine, begun.output.decode("utf-8", "replace").strip() or "/")
        request = {"instruction": instruction_text(task), "base_url": url, "api_key": api_key}

        async def reply(what: Any) -> Any:
            return await _do(shell, _ASKED.validate_python(what))

        with tempfile.TemporaryDirectory() as place:
            process = self._process(place)
            try:
                answer = await process.ask(request, reply)
            finally:
                await process.close()
        try:
            raised = _Ended.model_validate(answer).raised
        except ValueError as error:
            raise HarnessError(f"{self._what}: its end cannot be used: {error}"[:2000]) from None
        return ProgramEnd(raised is not None, f"{self._what} {'ended' if raised is None else 'raised'}", raised or "")

    def _process(self, place: str) -> PackageProcess:
        order = {"agent": self.config.agent, "options": self.config.options, "place": place}
        return PackageProcess(self._what, self.config, "harbor_program.py", order)


async def _do(shell: BackgroundShell, asked: _Exec | _Write | _Read | _Pack) -> Any:
    machine = shell.machine
    match asked:
        case _Exec():
            return (await shell.exec(asked.exec, asked.cwd, asked.env, asked.timeout_s))._asdict()
        case _Write():
            await machine.write(asked.write, base64.b64decode(asked.data, validate=True))
            if asked.executable:
                await machine.exec(["chmod", "+x", "--", asked.write], timeout_s=_SHORT_S)
            return None
        case _Read():
            data = await machine.read(asked.read, max_bytes=_LARGEST)
        case _Pack():
            data = await machine.pack(asked.pack, max_bytes=_LARGEST, timeout_s=_SHORT_S, whole=False)
    return base64.b64encode(data).decode()
