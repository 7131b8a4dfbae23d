"""Namespace machines as the dispatcher has them: their host, which starts the machine host process, and one machine.
asyncio."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rollmill.errors import MachineError, TaskError
from rollmill.machines import agent_machine
from rollmill.machines.agent_machine import AgentMachine, AgentMachineConfig, Ended
from rollmill.machines.guest import cgroups
from rollmill.machines.guest import frames as wire
from rollmill.machines.guest.image_root import ImageRoot
from rollmill.machines.images import services
from rollmill.machines.images.image import BUILT_IN, Image, hold_images, obtain_image
from rollmill.machines.images.services import RunningServices
from rollmill.machines.machine import USERS, Capabilities, MachineHost, Snapshot
from rollmill.machines.namespace import emulation, launch

_AT_ONCE = 8  # children that get files by one request
_MOST_ASKED = 16  # machines that are asked for at once: the end of a machine must not wait behind hundreds
_PACKAGE_ROOT = Path(__file__).resolve().parents[3]


class Seen(NamedTuple):
    """Of an image, what all machines of a host see."""

    packages: str | None = None  # directories of this host
    root: str | None = None
    architecture: str | None = None  # of the root's programs, if it is not this host's
    image: ImageRoot | None = None  # a whole OCI image
    made: tuple[int, ...] = ()  # which directories these are: one that was removed and made again is another one


_NOTHING = Seen()


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
        self.architecture = sees.architecture or ""
        self.measured_slowdown: float | None = None  # of programs of another architecture, once someone has asked
        self.limits: dict[str, Any] = {}  # what bounds machines on this host; known after start()
        self._process: subprocess.Popen[bytes] | None = None
        self._holding: int | None = None  # an open file, while machines use an OCI image
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._measuring = asyncio.Lock()
        self._telling = asyncio.Lock()
        self._asking = asyncio.Semaphore(_MOST_ASKED)
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
            await (machine.write_first(wanted) if wanted or snapshot is not None else machine.set_up())
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
        try:
            found = [os.stat(place) for place in (image.packages, image.root) if place is not None]
        except FileNotFoundError as error:
            raise TaskError(
                f"machine image {image.name!r} is not whole: {error.filename} is gone",
                hint="`rollmill images build` or `pull` makes it again",
            ) from None
        made = tuple(number for each in found for number in (each.st_ino, each.st_ctime_ns))
        sees = Seen(image.packages, image.root, emulated(image), image.whole, made)
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
        holding, self._holding = self._holding, None
        if holding is not None:
            os.close(holding)
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
                if self._sees.image is not None:
                    self._holding = await asyncio.to_thread(hold_images)
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
            async with self._asking, asyncio.timeout(agent_machine.GRACE_S):  # waiting for others is no bad sign
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


class NamespaceMachine(AgentMachine):
    """One machine. Requests are answered one after the other; callers may share it."""

    capabilities = Capabilities(kernel="shared", snapshot="files", listen=True, users=USERS)

    def __init__(self, host: NamespaceHost, identifier: int, image: Image, connection: socket.socket) -> None:
        super().__init__(image.reference, connection, str(identifier))
        self.host = host
        self._id = identifier
        self._image = image
        self._killed = False  # by someone outside, or by us because the machine host failed
        self.services: RunningServices | None = None
        self.capabilities = replace(
            self.capabilities,
            shared_fork=host.limits["shared_forks"],
            network="policy" if host.config.egress else "none",
            egress=tuple(host.config.egress),
            memory_mb=host.config.memory_mb,
            disk_mb=host.config.disk_mb,
            architecture=host.architecture,
            slowdown=host.measured_slowdown or 1.0,
        )

    async def set_up(self) -> None:
        """Returns when a new machine is set up; MachineError says why it could not be. Any request waits for it too."""
        async with self._nothing_pending():
            answer = await self._exchange(b"", "set up", 0, 0.0, 0)
            if answer is None or "error" in answer[0]:
                await self._lose("it does not answer" if answer is None else str(answer[0]["error"])[:500], False)

    async def snapshot(self) -> Snapshot:
        """The work directory, in the memory of this process: it is small (`disk_mb`). Services stop for it."""
        if self.services is None:
            return Snapshot(self.image, await self._pack_work())
        try:
            await self.services.stop()
            state = services.join(await self._pack_work(), await self.services.pack())
        finally:
            await self.services.start_again()
        return Snapshot(self.image, state)

    async def _pack_work(self) -> bytes:
        limit = min(self.host.config.disk_mb << 20, wire.MAX_BODY >> 1)  # the tar needs room of its own
        request = {"op": "snapshot", "max_bytes": limit}
        return await self.request_files(request, max_body=wire.MAX_BODY)

    async def restore(self, work: bytes) -> None:
        await self.request_files({"op": "restore"}, work)

    async def fork(self, count: int = 1) -> list[NamespaceMachine]:
        """Share the files with `count` new machines (forks.py). Where that is not possible, they get copies.

        It is not possible while a process or a service runs in the machine.
        """
        if self.services is None and self.capabilities.shared_fork and not await self._busy():
            children = await _all_or_none(self.host.create_empty(self._image) for _ in range(count))
            if await self._share_with(children):
                return children
        snapshot = await self.snapshot()
        return await _all_or_none(self.host.create(self._image.name, snapshot=snapshot) for _ in range(count))

    async def _busy(self) -> bool:
        answer = await self.request({"op": "busy"}, max_body=0)
        return answer is None or answer[0]["busy"]

    async def _share_with(self, children: list[NamespaceMachine]) -> bool:
        """Returns whether the children have the files; if not, they are closed."""
        shared = False
        try:
            async with self._nothing_pending():
                # If the caller is cancelled, the machine host goes on. Requests wait, because meanwhile the machine may
                # have no work directory.
                self._pending = sharing = asyncio.create_task(self._share([child._id for child in children]))
                shared = await asyncio.shield(sharing)
            if shared:
                for child in children:
                    await child.open_egress(self.host.config)
        except BaseException:
            shared = False
            raise
        finally:
            if not shared:
                await asyncio.gather(*(child.close() for child in children))
        return shared

    async def _share(self, children: list[int]) -> bool:
        """A few at once, so that the machine host serves others in between."""
        try:
            for first in range(0, len(children), _AT_ONCE):
                if not await self.host.share(self._id, children[first : first + _AT_ONCE]):
                    return False
            return True
        except MachineError:  # nobody knows whether the work directory is there
            self._killed = True
            await self.host.end(self._id)
            return False

    async def listen(self) -> tuple[socket.socket, int]:
        reply, _ = await self.request({"op": "listen"}) or ({}, b"")
        if not self._handed_over:
            raise OSError(errno.ENETDOWN, "the machine's commands ended it")
        return self._handed_over.pop(), reply["port"]

    async def close(self) -> None:
        """End the machine. When this returns, none of its processes is left. A request that is still running fails."""
        self._closed = True
        if self._egress is not None:
            await self._egress.close()
        await self.host.end(self._id)
        async with self._lock:
            self._connection.close()
            for unclaimed in self._handed_over:
                unclaimed.close()

    async def _end(self, begun: bool) -> Ended:
        killed = await self.host.end(self._id)
        if killed is None:
            return Ended(True, "; the machine host does not answer either")
        self._killed |= killed  # the machine host says it once
        if self._killed:
            return Ended(True, "; someone killed its first process", "is the host out of memory?")
        return Ended(False, "", "is the host overloaded?" if begun else launch.hint())


async def _all_or_none(starting: Iterable[Coroutine[Any, Any, NamespaceMachine]]) -> list[NamespaceMachine]:
    """Start machines at once. If one cannot start, the others are closed."""
    tasks = [asyncio.ensure_future(each) for each in starting]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        made = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(each.close() for each in made if isinstance(each, NamespaceMachine)))
        raise


def emulated(image: Image) -> str | None:
    """The architecture of an image's programs, if it is not this host's. TaskError: this host cannot emulate it."""
    if image.root is None or image.architecture in (None, platform.machine()):
        return None
    if why := emulation.missing(image.architecture):
        hint = 'or use [machine] kind = "qemu"'
        raise TaskError(f"image {image.name!r} is for {image.architecture}, and {why}", hint=hint)
    return image.architecture


def _launch(control: socket.socket, config: NamespaceConfig, sees: Seen) -> subprocess.Popen[bytes]:
    words = [f"{__package__}.launch", str(control.fileno()), json.dumps(config.limits()), json.dumps(sees[:-1])]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", *words],
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
