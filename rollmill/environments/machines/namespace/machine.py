"""One namespace machine as the client sees it: requests over the machine's own socket, one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollmill.environments.machine import WORK, Capabilities, ExecResult, ProcessState, Snapshot
from rollmill.environments.machines.images import Image
from rollmill.environments.machines.namespace import launch, wire
from rollmill.errors import MachineError

if TYPE_CHECKING:
    from rollmill.environments.machines.namespace.client import NamespaceHost

GRACE_S = 20.0  # a machine that does not answer for this long beyond its own time limit is given up


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
        self._sent = asyncio.Event()  # the pending request
        self._limit: asyncio.Timeout | None = None  # of the pending request
        self._interrupting: asyncio.Task[None] | None = None
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
            for unclaimed in self._handed_over:
                unclaimed.close()

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
            self._sent.clear()
            self._pending = asyncio.create_task(self._exchange(frame, timeout_s, header["op"] == "listen"))
            try:
                answer = await asyncio.shield(self._pending)
            except asyncio.CancelledError:
                self._interrupting = asyncio.create_task(self._interrupt())
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

    async def _exchange(self, frame: bytes, timeout_s: float, with_files: bool) -> tuple[dict[str, Any], bytes] | None:
        try:
            async with asyncio.timeout(timeout_s + GRACE_S) as self._limit:
                with contextlib.suppress(BrokenPipeError):  # it has ended; what it said last can still be received
                    await asyncio.get_running_loop().sock_sendall(self._connection, frame)
                self._sent.set()
                return await self._receive(with_files)
        except (OSError, wire.WireError):
            return None
        finally:
            if self._interrupting is not None:
                self._interrupting.cancel()
                self._interrupting = None

    async def _interrupt(self) -> None:
        """End the command of a caller that was cancelled. If it has just ended, pid 1 ignores the message."""
        await self._sent.wait()
        loop = asyncio.get_running_loop()
        assert self._limit is not None
        self._limit.reschedule(loop.time() + GRACE_S)  # the command's own time limit may be days away
        with contextlib.suppress(OSError):
            await loop.sock_sendall(self._connection, wire.pack({"op": "interrupt"}))

    async def _lose(self, why: str, by_command: bool) -> None:
        """End a machine that cannot go on. Returns if its commands ruined it, else MachineError."""
        healthy = await self._host.end(self._id)
        if self._closed or not (healthy and by_command):
            problem = "" if healthy else "; the machine host does not answer either"
            hint = "is the host overloaded?" if self._begun or not healthy else launch.hint()
            raise MachineError(f"machine {self._id}: {why}{problem}", hint=hint)
        self._ruined = True

    async def _receive(self, with_files: bool) -> tuple[dict[str, Any], bytes]:
        lengths = await self._receive_exactly(wire.LENGTHS.size, with_files)
        header_length, body_length = wire.unpack_lengths(lengths)
        data = await self._receive_exactly(header_length + body_length, with_files)
        return wire.unpack_header(data[:header_length]), data[header_length:]

    async def _receive_exactly(self, count: int, with_files: bool) -> bytes:
        data = bytearray()
        while len(data) < count:
            size = min(count - len(data), 1 << 20)
            try:
                if with_files:
                    part, files, _, _ = socket.recv_fds(self._connection, size, 1)
                    self._handed_over += [socket.socket(fileno=file) for file in files]
                else:
                    part = self._connection.recv(size)
            except BlockingIOError:
                await _readable(self._connection)
                continue
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


def _order(
    operation: str, argv: Sequence[str], cwd: str, env: Mapping[str, str] | None, timeout_s: float, max_output: int
) -> dict[str, Any]:
    if not argv or isinstance(argv, str) or not 0 <= max_output <= wire.MAX_BODY:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    order = {"op": operation, "argv": list(argv), "cwd": cwd, "env": dict(env or {})}
    return {**order, "timeout_s": timeout_s, "max_output": max_output}


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
