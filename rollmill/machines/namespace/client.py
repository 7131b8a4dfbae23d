"""The client's side of the machine host: starts it, has machines created and ended. asyncio."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollmill.errors import MachineError, TaskError
from rollmill.machines import agent_machine
from rollmill.machines.agent_machine import AgentMachineConfig
from rollmill.machines.guest import cgroups
from rollmill.machines.images import services
from rollmill.machines.images.image import BUILT_IN, Image, obtain_image
from rollmill.machines.machine import MachineHost, Snapshot
from rollmill.machines.namespace import emulation
from rollmill.machines.namespace.machine import NamespaceMachine

_PACKAGE_ROOT = Path(__file__).resolve().parents[3]


# of an image, what all machines of a host see: its packages and root (directories), and the architecture of its
# programs if it is not the host's
Seen = tuple[str | None, str | None, str | None]
_NOTHING: Seen = (None, None, None)


class NamespaceConfig(AgentMachineConfig):
    """Settings of namespace machines."""


class NamespaceHost(MachineHost):
    """Creates namespace machines; starts its machine host process on first use. One per event loop.

    Machines of an image with packages or an operating system come from a machine host of their own, so that no other
    machine sees them.
    """

    def __init__(self, config: NamespaceConfig | None = None, *, sees: Seen = _NOTHING) -> None:
        self.config = config or NamespaceConfig()
        self._sees = sees
        self._others: dict[Seen, NamespaceHost] = {}
        self.architecture = sees[2] or ""
        self.measured_slowdown: float | None = None  # of programs of another architecture, once someone has asked
        self.limits: dict[str, Any] = {}  # what bounds machines on this host; known after start()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._measuring = asyncio.Lock()
        self._telling = asyncio.Lock()
        self._next = 0
        self._creating: dict[int, asyncio.Future[socket.socket]] = {}
        self._ending: dict[int, asyncio.Future[bool]] = {}
        self._sharing: dict[int, asyncio.Future[bool]] = {}

    async def create(
        self, image: str, files: Mapping[str, bytes] | None = None, *, snapshot: Snapshot | None = None
    ) -> NamespaceMachine:
        loaded = await obtain_image(image, self.config)
        if (host := self._host_of(loaded)) is not self:
            return await host.create(image, files, snapshot=snapshot)
        machine = await self._connect(loaded)
        try:
            if snapshot is not None:
                work, state = services.split(snapshot.state) if loaded.services else (snapshot.state, b"")
                await machine.restore(work)
            wanted = {**(loaded.files if snapshot is None else {}), **(files or {})}
            try:
                await (machine.write_all(wanted) if wanted or snapshot is not None else machine.set_up())
            except OSError as error:
                hint = "`machine.disk_mb` is the size of the work directory"
                raise TaskError(f"the files of a task cannot be written to a machine: {error}", hint=hint) from None
            if loaded.services and snapshot is None:
                machine.services = await services.begin(machine, loaded.services, loaded.services_state())
            elif loaded.services:
                machine.services = await services.go_on(machine, loaded.services, state)
            await machine.open_egress(self.config)
        except BaseException:
            await machine.close()
            raise
        return machine

    async def create_empty(self, image: Image) -> NamespaceMachine:
        """A machine whose work directory is empty, of an image that this host has made machines of."""
        machine = await self._connect(image)
        try:
            await machine.set_up()
        except BaseException:
            await machine.close()
            raise
        return machine

    async def share(self, parent: int, children: list[int]) -> bool:
        """Let children have the files of their parent (forks.py). False: it is not possible now."""
        number = self._number()
        future = self._sharing[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(agent_machine.GRACE_S):
                await self._tell("share", number, parent=parent, children=children)
                return await future
        except TimeoutError:
            raise MachineError("the machine host does not answer", hint="is the host overloaded?") from None
        finally:
            del self._sharing[number]

    async def slowdown(self, image: str) -> float:
        """How many times longer programs of another architecture take; 1 if the image has none."""
        try:
            loaded = await obtain_image(image, self.config)
            if emulated(loaded) is None:
                return 1.0
        except TaskError:
            return 1.0  # `create` says why
        host = self._host_of(loaded)
        async with host._measuring:  # many ask at once when a run begins
            if host.measured_slowdown is None:
                machine = await self.create(image)
                try:
                    host.measured_slowdown = await self._compare(machine)
                finally:
                    await machine.close()
            return host.measured_slowdown

    async def _compare(self, machine: NamespaceMachine) -> float:
        plain = await self.create(BUILT_IN)
        try:
            return await emulation.measure_slowdown(machine, plain)
        finally:
            await plain.close()

    def _host_of(self, image: Image) -> NamespaceHost:
        """The host whose machines see what the image has. TaskError: its programs cannot run here."""
        sees = (image.packages, image.root, emulated(image))
        if sees in (_NOTHING, self._sees):
            return self
        return self._others.setdefault(sees, NamespaceHost(self.config, sees=sees))

    async def export(self, snapshot: Snapshot) -> Snapshot:
        return snapshot  # it is bytes

    async def end(self, identifier: int) -> bool | None:
        """End a machine. Returns whether someone else had killed it; None if the machine host does not say so, and so
        is not healthy itself."""
        ended = self._ending.get(identifier)
        try:
            async with asyncio.timeout(agent_machine.GRACE_S):
                if ended is None:
                    ended = self._ending[identifier] = asyncio.get_running_loop().create_future()
                    await self._tell("close", identifier)
                return await asyncio.shield(ended)  # several may wait for the same end
        except (MachineError, TimeoutError):
            self._ending.pop(identifier, None)
            return None

    async def close(self) -> None:
        """End all machines and the machine host."""
        for other in self._others.values():
            await other.close()
        await self._close_own()

    async def _close_own(self) -> None:
        self._lost("the machine host was closed")
        process, self._process = self._process, None
        if process is None:
            return
        try:
            await asyncio.to_thread(process.wait, 10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stderr is not None
        process.stderr.close()
        await asyncio.to_thread(cgroups.sweep)  # of this one or of earlier ones, if they were killed

    async def start(self) -> None:
        """Start the machine host process unless it runs. MachineError says what this computer lacks."""
        async with self._starting:
            if self._control is not None:
                return
            if not sys.platform.startswith("linux"):
                raise MachineError(f"namespaces need Linux, this is {sys.platform}", hint="use a Linux host or VM")
            await self._close_own()  # clean up after one that died
            control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            control.setblocking(False)
            with other:
                self._process = _launch(other, self.config, self._sees)
            greeting = await _greeting(control, self._process)
            if "error" in greeting:
                control.close()
                await self._close_own()
                raise MachineError(greeting["error"], hint=greeting.get("hint"))
            self.limits = greeting["limits"]
            self._control = control
            asyncio.get_running_loop().add_reader(control, self._on_control)

    def _number(self) -> int:
        self._next += 1
        return self._next

    async def _connect(self, image: Image) -> NamespaceMachine:
        """Have the machine host create a machine. Nothing says yet that it could be set up."""
        await self.start()
        identifier = self._number()
        future = self._creating[identifier] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(agent_machine.GRACE_S):
                await self._tell("create", identifier)
                return NamespaceMachine(self, identifier, image, await future)
        except TimeoutError:
            raise MachineError("the machine host does not answer", hint="is the host overloaded?") from None
        finally:
            del self._creating[identifier]

    async def _tell(self, operation: str, identifier: int, **more: Any) -> None:
        message = json.dumps({"op": operation, "id": identifier, **more}).encode()
        # One at a time: while the socket is full, the loop keeps one sender per socket and forgets any other.
        async with self._telling:
            if self._control is None:
                raise MachineError("the machine host is not running")
            try:
                await asyncio.get_running_loop().sock_sendall(self._control, message)
            except OSError as error:
                raise MachineError(f"the machine host does not answer: {error!r}") from None

    def _on_control(self) -> None:
        assert self._control is not None
        try:
            message, handed_over, _, _ = socket.recv_fds(self._control, 1 << 16, 1)
        except BlockingIOError:
            return
        except OSError:
            message, handed_over = b"", []
        if not message:
            return self._lost("the machine host ended unexpectedly")
        reply = json.loads(message)
        if "closed" in reply:
            ended = self._ending.pop(reply["closed"], None)
            if ended is not None:
                ended.set_result(reply["killed"])
            return
        if "shared" in reply:
            if (sharing := self._sharing.get(reply["shared"])) is not None and not sharing.done():
                sharing.set_result(reply["error"] is None)
            return
        connection = socket.socket(fileno=handed_over[0]) if handed_over else None
        created = self._creating.get(reply["id"])
        if created is None or created.done():
            if connection is not None:
                connection.close()  # nobody waits any more: end of file ends the machine
        elif connection is None:
            why = reply.get("error", "this process may not open more files")  # then the kernel has dropped the socket
            created.set_exception(MachineError(f"no machine could be created: {why}"))
        else:
            connection.setblocking(False)
            created.set_result(connection)

    def _lost(self, why: str) -> None:
        """Forget the machine host, and tell everyone who waits for it why. Its machines die with it."""
        control, self._control = self._control, None
        if control is not None:
            asyncio.get_running_loop().remove_reader(control)
            control.close()
        waiting: list[asyncio.Future[Any]] = [*self._creating.values(), *self._ending.values(), *self._sharing.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(MachineError(why))
                future.exception()  # read: whoever waited may have been cancelled, and asyncio would complain at exit


def emulated(image: Image) -> str | None:
    """The architecture of an image's programs, if it is not this host's. TaskError: this host cannot emulate it."""
    if image.root is None or image.architecture in (None, platform.machine()):
        return None
    if why := emulation.missing(image.architecture):
        hint = 'or use [machine] kind = "qemu"'
        raise TaskError(f"image {image.name!r} is for {image.architecture}, and {why}", hint=hint)
    return image.architecture


def _launch(control: socket.socket, config: NamespaceConfig, sees: Seen) -> subprocess.Popen[bytes]:
    limits = {
        "memory": config.memory_mb << 20,
        "disk": config.disk_mb << 20,
        "processes": config.processes,
        "open_files": config.open_files,
    }
    module = f"{__package__}.launch"
    return subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            module,
            str(control.fileno()),
            json.dumps(limits),
            json.dumps(sees),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=[control.fileno()],
        start_new_session=True,  # Ctrl-C reaches the dispatcher only; the machine host ends when it does
        env={**os.environ, "PYTHONPATH": str(_PACKAGE_ROOT)},
    )


async def _greeting(control: socket.socket, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The machine host's first message, or what it printed if it did not start."""
    try:
        async with asyncio.timeout(agent_machine.GRACE_S):
            message = await asyncio.get_running_loop().sock_recv(control, 1 << 16)
    except TimeoutError:
        message = b""
    if message:
        return json.loads(message)
    process.kill()
    assert process.stderr is not None
    words = (await asyncio.to_thread(process.stderr.read)).decode("utf-8", "replace").strip()
    return {"error": f"the machine host did not start: {words[-500:] or 'no reason given'}"}
