"""The dispatcher's side of namespace machines: asyncio, one socket per machine, and one to the machine host."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from rollmill.config import Config
from rollmill.environments.machine import WORK, Capabilities, ExecResult, ProcessState, Snapshot
from rollmill.environments.machines.images import Image, load_image
from rollmill.environments.machines.namespace import launch, wire
from rollmill.errors import MachineError, TaskError

_GRACE_S = 20.0  # a machine that does not answer for this long beyond its own time limit is given up
_PACKAGE_ROOT = Path(__file__).resolve().parents[4]


class NamespaceConfig(Config):
    memory_mb: int = Field(
        default=256, ge=32, description="Memory of one machine in MiB, for all its processes and files together."
    )
    disk_mb: int = Field(
        default=64, ge=1, description="Size of a machine's work directory in MiB; /tmp may take as much again."
    )
    processes: int = Field(default=64, ge=4, description="Most processes and threads in one machine.")
    open_files: int = Field(default=256, ge=32, description="Most open files of one process in a machine.")
    images: str | None = Field(
        None,
        description="Directory with machine images, one folder per name. `rollmill images` builds others, and "
        "`host-python` is built in.",
    )
    image_mb: int = Field(default=64, ge=1, description="Most files of an image's work directory in MiB.")


class NamespaceMachine:
    """One machine. Requests are answered one after the other; callers may share it.

    A machine that fails before its first command, or whose machine host is not healthy, is an infrastructure
    failure: MachineError. Otherwise its own commands ruined it: every further command ends with `stopped="machine"`,
    and no file is found. Only the machine host decides this; nothing inside the machine can.
    """

    capabilities = Capabilities(kernel="shared", snapshot="files", listen=True)

    def __init__(self, host: NamespaceHost, identifier: int, image: Image, connection: socket.socket) -> None:
        self.image = image.reference
        self._host = host
        self._id = identifier
        self._image = image.name
        self._connection = connection
        self._lock = asyncio.Lock()
        self._pending: asyncio.Task[tuple[dict[str, Any], bytes] | None] | None = None  # survives a cancelled caller
        self._unwanted = asyncio.Event()  # the caller of the pending request was cancelled
        self._handed_over: list[socket.socket] = []  # by pid 1
        self._begun = False  # a command has begun
        self._ruined = False  # by a command of its own
        self._closed = False

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str = WORK,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 10.0,
        max_output: int = 65536,
    ) -> ExecResult:
        header = _order("exec", argv, cwd, env, timeout_s, max_output)
        answer = await self._request(header, stdin, timeout_s=timeout_s)
        if answer is None:
            return ExecResult(exit_code=-signal.SIGKILL, output=b"", stopped="machine")
        reply, output = answer
        return ExecResult(
            exit_code=reply["exit_code"],
            output=output,
            truncated=reply["truncated"],
            stopped=reply["stopped"],
            seconds=reply["seconds"],
        )

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str = WORK,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        max_output: int = 65536,
    ) -> NamespaceProcess:
        answer = await self._request(_order("start", argv, cwd, env, 0.0, max_output), stdin)
        return NamespaceProcess(self, None if answer is None else answer[0]["process"])

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        limit = min(max_bytes, wire.MAX_BODY)
        return await self._request_files({"op": "read", "path": _inside(path), "max_bytes": limit})

    async def write(self, path: str, data: bytes) -> None:
        await self.write_all({path: data})

    async def write_all(self, files: Mapping[str, bytes]) -> None:
        entries = [[_inside(path), len(data)] for path, data in files.items()]
        await self._request_files({"op": "write", "files": entries}, b"".join(files.values()))

    async def snapshot(self) -> Snapshot:
        """The work directory, in the memory of this process: it is small (`disk_mb`)."""
        limit = min(self._host.config.disk_mb << 20, wire.MAX_BODY >> 1)  # the tar needs room of its own
        return Snapshot(self.image, await self._request_files({"op": "snapshot", "max_bytes": limit}))

    async def restore(self, snapshot: Snapshot) -> None:
        await self._request_files({"op": "restore"}, snapshot.state)

    async def fork(self, count: int = 1) -> list[NamespaceMachine]:
        snapshot = await self.snapshot()
        made = (self._host.create(self._image, snapshot=snapshot) for _ in range(count))
        return list(await asyncio.gather(*made))

    async def pause(self) -> None:
        raise OSError(errno.ENOTSUP, "namespace machines cannot be paused")

    async def resume(self) -> None:
        raise OSError(errno.ENOTSUP, "namespace machines cannot be paused")

    async def listen(self) -> tuple[socket.socket, int]:
        reply, _ = await self._request({"op": "listen"}) or ({}, b"")
        if not self._handed_over:
            raise OSError(errno.ENETDOWN, "the machine's commands ended it")
        return self._handed_over.pop(), reply["port"]

    async def close(self) -> None:
        """End the machine. When this returns, none of its processes is left. A request that is still running fails."""
        self._closed = True
        await self._host.end(self._id)
        async with self._lock:
            self._connection.close()

    async def wait_ready(self) -> None:
        try:
            async with asyncio.timeout(_GRACE_S):
                reply, _ = await self._receive()
        except (OSError, wire.WireError) as error:
            raise MachineError(f"a machine could not be set up: {error!r}") from None
        if "ready" not in reply:
            raise MachineError(f"a machine could not be set up: {reply.get('error')}", hint=launch.hint())

    async def _request_files(self, header: dict[str, Any], body: bytes = b"") -> bytes:
        answer = await self._request(header, body)
        if answer is None:
            raise FileNotFoundError(errno.ENOENT, "the machine's commands ended it", header.get("path"))
        return answer[1]

    async def _request(
        self, header: dict[str, Any], body: bytes = b"", *, timeout_s: float = 0.0
    ) -> tuple[dict[str, Any], bytes] | None:
        """Send a request and return its reply; None if the machine's own commands ruined it. OSError: refused."""
        frame = wire.pack(header, body)
        async with self._lock:
            if self._pending is not None:
                await asyncio.wait([self._pending])  # its caller was cancelled; nobody wants the answer
            if self._ruined:
                return None
            begun_before = self._begun
            self._begun |= header["op"] in ("exec", "start")
            self._unwanted.clear()
            self._pending = asyncio.create_task(self._exchange(frame, timeout_s))
            try:
                answer = await asyncio.shield(self._pending)
            except asyncio.CancelledError:
                self._unwanted.set()
                raise
            if answer is None:
                await self._lose("it does not answer", self._begun)
                return None
            reply, data = answer
            if "error" in reply:
                await self._lose(reply["error"], begun_before)
                return None
        if "errno" in reply:
            raise OSError(reply["errno"], os.strerror(reply["errno"]), reply.get("path"))
        return reply, data

    async def _exchange(self, frame: bytes, timeout_s: float) -> tuple[dict[str, Any], bytes] | None:
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                await asyncio.get_running_loop().sock_sendall(self._connection, frame)
                interrupt = asyncio.create_task(self._interrupt_if_unwanted())
                try:
                    return await self._receive()
                finally:
                    interrupt.cancel()
        except (OSError, wire.WireError):
            return None

    async def _interrupt_if_unwanted(self) -> None:
        """End the command of a caller that was cancelled. If it has just ended, pid 1 ignores the message."""
        await self._unwanted.wait()
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(self._connection, wire.pack({"op": "interrupt"}))

    async def _lose(self, why: str, by_command: bool) -> None:
        """End a machine that cannot go on. Returns if its commands ruined it, else MachineError."""
        healthy = await self._host.end(self._id)
        if self._closed or not (healthy and by_command):
            problem = "" if healthy else "; the machine host does not answer either"
            raise MachineError(f"machine {self._id}: {why}{problem}", hint="is the host overloaded?")
        self._ruined = True

    async def _receive(self) -> tuple[dict[str, Any], bytes]:
        header_length, body_length = wire.unpack_lengths(await self._receive_exactly(wire.LENGTHS.size))
        data = await self._receive_exactly(header_length + body_length)
        return wire.unpack_header(data[:header_length]), data[header_length:]

    async def _receive_exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                part, files, _, _ = socket.recv_fds(self._connection, min(count - len(data), 1 << 20), 1)
            except BlockingIOError:
                await _readable(self._connection)
                continue
            self._handed_over += [socket.socket(fileno=file) for file in files]
            if not part:
                raise ConnectionResetError("end of stream")
            data += part
        return bytes(data)


class NamespaceProcess:
    """A process that keeps running between commands. `identifier` is None if the machine was ruined."""

    def __init__(self, machine: NamespaceMachine, identifier: int | None) -> None:
        self._machine = machine
        self._identifier = identifier
        self._last: ProcessState | None = None  # after stop

    async def state(self) -> ProcessState:
        return await self._ask("state")

    async def stop(self) -> ProcessState:
        self._last = await self._ask("stop")
        return self._last

    async def _ask(self, operation: str) -> ProcessState:
        if self._last is not None:
            return self._last
        answer = None
        if self._identifier is not None:
            answer = await self._machine._request({"op": operation, "process": self._identifier})
        if answer is None:
            return ProcessState(exit_code=-signal.SIGKILL, output=b"", stopped="machine")
        reply, output = answer
        return ProcessState(reply["exit_code"], output, reply["truncated"], reply["stopped"])


class NamespaceHost:
    """Creates namespace machines; starts its machine host process on first use. One per event loop.

    Machines of an image with packages come from a machine host of their own, so that no other machine sees them.
    """

    def __init__(self, config: NamespaceConfig | None = None, *, packages: str | None = None) -> None:
        self.config = config or NamespaceConfig()
        self._packages = packages
        self._others: dict[str, NamespaceHost] = {}  # by packages
        self.limits: dict[str, Any] = {}  # what bounds machines on this host; known after start()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._next = 0
        self._creating: dict[int, asyncio.Future[socket.socket]] = {}
        self._ending: dict[int, asyncio.Future[None]] = {}

    async def create(
        self, image: str, files: Mapping[str, bytes] | None = None, *, snapshot: Snapshot | None = None
    ) -> NamespaceMachine:
        loaded = load_image(image, self.config.images, max_bytes=self.config.image_mb << 20)
        if loaded.packages not in (None, self._packages):
            other = self._others.setdefault(loaded.packages, NamespaceHost(self.config, packages=loaded.packages))
            return await other.create(image, files, snapshot=snapshot)
        await self.start()
        self._next += 1
        identifier = self._next
        connection = await self._connect(identifier)
        machine = NamespaceMachine(self, identifier, loaded, connection)
        try:
            await machine.wait_ready()
            if snapshot is not None:
                await machine.restore(snapshot)
            try:
                await machine.write_all({**(loaded.files if snapshot is None else {}), **(files or {})})
            except OSError as error:
                hint = "`machine.disk_mb` is the size of the work directory"
                raise TaskError(f"the files of a task cannot be written to a machine: {error}", hint=hint) from None
        except BaseException:
            await machine.close()
            raise
        return machine

    async def end(self, identifier: int) -> bool:
        """End a machine. Returns False if the machine host does not confirm it, and so is not healthy itself."""
        ended = self._ending.get(identifier)
        try:
            async with asyncio.timeout(_GRACE_S):
                if ended is None:
                    ended = self._ending[identifier] = asyncio.get_running_loop().create_future()
                    await self._tell("close", identifier)
                await asyncio.shield(ended)  # several may wait for the same end
            return True
        except (MachineError, TimeoutError):
            self._ending.pop(identifier, None)
            return False

    async def close(self) -> None:
        """End all machines and the machine host."""
        for other in self._others.values():
            await other.close()
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

    async def start(self) -> None:
        """Start the machine host process unless it runs. MachineError says what this computer lacks."""
        async with self._starting:
            if self._control is not None:
                return
            if not sys.platform.startswith("linux"):
                raise MachineError(f"namespaces need Linux, this is {sys.platform}", hint="use a Linux host or VM")
            await self.close()  # clean up after one that died
            control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            control.setblocking(False)
            with other:
                self._process = _launch(other, self.config, self._packages)
            greeting = await _greeting(control, self._process)
            if "error" in greeting:
                control.close()
                await self.close()
                raise MachineError(greeting["error"], hint=greeting.get("hint"))
            self.limits = greeting["limits"]
            self._control = control
            asyncio.get_running_loop().add_reader(control, self._on_control)

    async def _connect(self, identifier: int) -> socket.socket:
        """Have the machine host create a machine; returns the machine's socket."""
        future = self._creating[identifier] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(_GRACE_S):
                await self._tell("create", identifier)
                return await future
        except TimeoutError:
            raise MachineError("the machine host does not answer", hint="is the host overloaded?") from None
        finally:
            del self._creating[identifier]

    async def _tell(self, operation: str, identifier: int) -> None:
        if self._control is None:
            raise MachineError("the machine host is not running")
        try:
            message = json.dumps({"op": operation, "id": identifier}).encode()
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
                ended.set_result(None)
            return
        connection = socket.socket(fileno=handed_over[0]) if handed_over else None
        created = self._creating.get(reply["id"])
        if created is None or created.done():
            if connection is not None:
                connection.close()  # nobody waits any more: end of file ends the machine
        elif connection is None:
            created.set_exception(MachineError(f"no machine could be created: {reply['error']}"))
        else:
            connection.setblocking(False)
            created.set_result(connection)

    def _lost(self, why: str) -> None:
        """Forget the machine host, and tell everyone who waits for it why. Its machines die with it."""
        control, self._control = self._control, None
        if control is not None:
            asyncio.get_running_loop().remove_reader(control)
            control.close()
        waiting: list[asyncio.Future[Any]] = [*self._creating.values(), *self._ending.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(MachineError(why))


def _order(
    operation: str, argv: Sequence[str], cwd: str, env: Mapping[str, str] | None, timeout_s: float, max_output: int
) -> dict[str, Any]:
    if not argv or isinstance(argv, str) or not 0 <= max_output <= wire.MAX_BODY:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    order = {"op": operation, "argv": list(argv), "cwd": cwd, "env": dict(env or {})}
    return {**order, "timeout_s": timeout_s, "max_output": max_output}


def _launch(control: socket.socket, config: NamespaceConfig, packages: str | None) -> subprocess.Popen[bytes]:
    limits = {
        "memory": config.memory_mb << 20,
        "disk": config.disk_mb << 20,
        "processes": config.processes,
        "open_files": config.open_files,
    }
    module = f"{__package__}.launch"
    return subprocess.Popen(
        [sys.executable, "-m", module, str(control.fileno()), json.dumps(limits), *([packages] if packages else [])],
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
        async with asyncio.timeout(_GRACE_S):
            message = await asyncio.get_running_loop().sock_recv(control, 1 << 16)
    except TimeoutError:
        message = b""
    if message:
        return json.loads(message)
    process.kill()
    assert process.stderr is not None
    words = (await asyncio.to_thread(process.stderr.read)).decode("utf-8", "replace").strip()
    return {"error": f"the machine host did not start: {words[-500:] or 'no reason given'}"}


async def _readable(connection: socket.socket) -> None:
    """Return when `connection` can be read."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection)


def _inside(path: str) -> str:
    """Relative paths are relative to the work directory. A NUL byte or half a surrogate pair names no file."""
    try:
        if not path or b"\0" in path.encode("utf-8", "surrogateescape"):
            raise ValueError
    except ValueError:  # UnicodeEncodeError is one
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
    return os.path.join(WORK, path)
