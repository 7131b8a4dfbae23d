"""Services of an image: PostgreSQL, Redis, a web server … They run inside each machine, and every machine has its own.

    [[services]]
    name = "cache"
    start = "exec redis-server --port 6379 --dir ."     stays in the foreground
    ready = "redis-cli ping"                            exits with 0 once the service can be used

Each service has a directory of its own, ~/services/NAME. All its commands run there, as the machine's user.

    when the image is built     prepare, start, ready, warm, stop; then the directories become a layer of the image
    namespace machines          get that layer and start the services. A snapshot stops them, packs their directories
                                with the work directory and starts them again; a fork starts its own from those files
    virtual machines            the template starts and warms them before it is saved. Machines are restored and forked
                                with the services running, memory and all

Services of two machines share nothing. A command of the agent may stop or ruin a service of its own machine: that is
its own doing, and no failure of the infrastructure.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from rollmill.config import Config, load_config
from rollmill.errors import ConfigError, MachineError, TaskError
from rollmill.machines.guest import frames as wire
from rollmill.machines.guest import layout
from rollmill.machines.machine import Machine, Process

log = logging.getLogger(__name__)
DIRECTORY = f"{layout.HOME}/services"
STATE = "services.tar"  # the file of the layer
_LOOK_S = 0.02  # between two looks whether a service is ready
_COMMAND_S = 120.0
# once the agent has worked, what it did to its services must not cost more; both times the machine's slowdown
_STOP_S, _START_AGAIN_S = 15.0, 20.0  # for all services together
_LENGTH = struct.Struct("!Q")


def _is_public(path: str) -> str:
    """Only places that namespace machines see as well: nothing private of the host gets into a virtual machine."""
    if not path.startswith(("/usr/", "/bin/", "/sbin/", "/lib/", "/lib64/")) or ".." in path:
        raise ValueError("a path below /usr, /bin, /sbin or /lib is needed")
    return path


class Service(Config):
    """One program that runs in every machine of an image."""

    name: str = Field(pattern=r"^[a-z][a-z0-9-]{0,31}$", description="Name, also of its directory ~/services/NAME.")
    start: str = Field(
        min_length=1, description="Shell command that runs the service and stays in the foreground (`exec …`)."
    )
    ready: str = Field(min_length=1, description="Shell command that exits with 0 once the service can be used.")
    prepare: str = Field("", description="Shell command that makes its files, once, when the image is built.")
    warm: str = Field(
        "", description="Shell command that runs once the service is ready: when the image is built, and in templates."
    )
    stop: str = Field(
        "", description="Shell command that ends it so that its files are whole. Empty: it is killed, as in a crash."
    )
    ready_s: float = Field(30.0, gt=0, description="Seconds until it must be ready, times the machine's slowdown.")
    files: list[Annotated[str, AfterValidator(_is_public)]] = Field(
        [],
        description="Programs and directories of this host that virtual machines need for it; * is allowed. "
        "Namespace machines see all of /usr.",
    )


class ServicesFile(Config):
    """A file with nothing but [[services]], for `rollmill images build --services`."""

    services: list[Service] = Field(min_length=1, max_length=16, description="The services, in the order of starting.")


def read_services(path: Path) -> list[Service]:
    """The services that a TOML file declares. ConfigError names what is wrong."""
    services = load_config(ServicesFile, path).services
    names = [service.name for service in services]
    if len(set(names)) < len(names):
        raise ConfigError(f"{path} has two services with the same name: {', '.join(names)}")
    return services


class RunningServices:
    """The services of one machine."""

    def __init__(self, machine: Machine, services: Sequence[Service]) -> None:
        self._machine = machine
        self._services = services
        self._processes: dict[str, Process] = {}

    async def prepare(self) -> None:
        """Make the directories and their first files. TaskError: a command failed."""
        for service in self._services:
            await self._run(["mkdir", "-p", f"{DIRECTORY}/{service.name}"], cwd="/", what=f"{service.name}: mkdir")
            await self._command(service, "prepare")

    async def start(self, *, warm: bool = False) -> None:
        """Start all, one after the other. MachineError: one is not ready in its time."""
        for service in self._services:
            place = f"{DIRECTORY}/{service.name}"
            self._processes[service.name] = await self._machine.start(["sh", "-c", service.start], cwd=place)
            await self._wait(service)
            if warm:
                await self._command(service, "warm")

    async def start_again(self) -> None:
        """Start those that the machine's commands have left able to run, in the time there is."""
        try:
            async with asyncio.timeout(_START_AGAIN_S * self._machine.capabilities.slowdown):
                await self.start()
        except (MachineError, TaskError, TimeoutError) as error:
            log.info("a service does not run any more: %r", error)

    async def stop(self, *, within_s: float = _STOP_S) -> None:
        """End all, the last first. The files are whole afterwards, if `stop` says how. Those that have not ended in the
        time for all of them (the agent may have halted them) are killed."""
        deadline = time.monotonic() + within_s * self._machine.capabilities.slowdown
        for service in reversed(self._services):
            process = self._processes.pop(service.name, None)
            if process is None:
                continue
            left_s = deadline - time.monotonic()
            if service.stop and left_s > 0 and (await process.state()).exit_code is None:
                arguments = ["sh", "-c", service.stop]
                await self._machine.exec(arguments, cwd=f"{DIRECTORY}/{service.name}", timeout_s=left_s)
            await process.stop()

    async def pack(self) -> bytes:
        """The directories of services that have been stopped. OSError: they do not fit."""
        limit = _COMMAND_S * self._machine.capabilities.slowdown
        return await self._machine.pack(DIRECTORY, max_bytes=wire.MAX_BODY >> 1, timeout_s=limit)

    async def unpack(self, data: bytes) -> None:
        unpack = f"mkdir -p {DIRECTORY} && exec tar -xf - -C {DIRECTORY}"
        await self._run(["sh", "-c", unpack], cwd="/", stdin=data, what="the files of the services")

    async def _wait(self, service: Service) -> None:
        deadline = time.monotonic() + service.ready_s * self._machine.capabilities.slowdown
        process = self._processes[service.name]
        while True:
            asked = await self._machine.exec(
                ["sh", "-c", service.ready], cwd=f"{DIRECTORY}/{service.name}", timeout_s=_COMMAND_S
            )
            if asked.exit_code == 0:
                return
            state = await process.state()
            if state.exit_code is not None or time.monotonic() > deadline:
                ended = "is not ready" if state.exit_code is None else f"ended with exit code {state.exit_code}"
                said = (state.output + asked.output).decode("utf-8", "replace").strip()
                raise MachineError(
                    f"the service {service.name!r} {ended}; it printed: {said[-600:] or 'nothing'}",
                    hint="try its commands in a machine; [machine] memory_mb, disk_mb and processes are its limits",
                )
            await asyncio.sleep(_LOOK_S)

    async def _command(self, service: Service, which: str) -> None:
        command = getattr(service, which)
        if command:
            place = f"{DIRECTORY}/{service.name}"
            await self._run(["sh", "-c", command], cwd=place, what=f"`{which}` of the service {service.name!r}")

    async def _run(self, argv: list[str], *, cwd: str, what: str, stdin: bytes = b"") -> None:
        limit = _COMMAND_S * self._machine.capabilities.slowdown
        result = await self._machine.exec(argv, cwd=cwd, stdin=stdin, timeout_s=limit)
        if result.exit_code != 0:
            why = f"the limit {result.stopped!r}" if result.stopped else f"exit code {result.exit_code}"
            said = result.output.decode("utf-8", "replace").strip()
            raise TaskError(f"{what} ended with {why}: {said[-600:]}", hint="[machine] disk_mb is the room for files")


async def begin(machine: Machine, services: Sequence[Service], state: bytes, *, warm: bool = False) -> RunningServices:
    """Start the services of a machine in which no command of an agent has run."""
    running = RunningServices(machine, services)
    await running.unpack(state)
    await running.start(warm=warm)
    return running


async def go_on(machine: Machine, services: Sequence[Service], state: bytes) -> RunningServices:
    """Start the services of a machine that has the state of another one. What its commands did to them stays so."""
    running = RunningServices(machine, services)
    try:
        await running.unpack(state)
    except (MachineError, TaskError) as error:
        log.info("the files of services could not be unpacked: %s", error)
    await running.start_again()
    return running


def join(work: bytes, services: bytes) -> bytes:
    """The state of a machine with services: its work directory and their directories."""
    return _LENGTH.pack(len(work)) + work + services


def split(state: bytes) -> tuple[bytes, bytes]:
    """Undoes `join`. MachineError: the state is not one of a machine with services."""
    if len(state) < _LENGTH.size or (end := _LENGTH.size + _LENGTH.unpack_from(state)[0]) > len(state):
        raise MachineError("this snapshot is not of a machine with services")
    return state[_LENGTH.size : end], state[end:]
