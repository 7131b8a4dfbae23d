"""A machine behind an agent (guest/agent.py): requests over a socket, one after the other.

What the agent answers is not trusted: a command may have taken the agent over. An answer has the number of its request,
the fields that the request asks for, and no more bytes than it allows. Anything else ends the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from rollmill.config import Config
from rollmill.errors import MachineError
from rollmill.machines.egress import ENTRY, Egress
from rollmill.machines.guest import frames as wire
from rollmill.machines.machine import WORK, Capabilities, ExecResult, Order, ProcessState, longest

GRACE_S = 20.0  # a machine that does not answer for this long beyond its own time limit is given up
_NOTE = 64  # bytes of the line that replaces the middle of a long output
_TYPED, _FULL_S = 4096, 0.02  # bytes typed at once; pause while a terminal takes none
_MOST_STALE = 16  # answers to earlier requests that are dropped before a machine is given up
_STOPPED = (None, "time", "memory", "processes")

Answer = tuple[dict[str, Any], bytes]


class Ended(NamedTuple):
    """How a machine ended, as its host knows it."""

    by_infrastructure: bool
    problem: str = ""  # what the host adds to the error
    hint: str | None = "is the host overloaded?"


class AgentMachineConfig(Config):
    """Settings of all machines with an agent."""

    memory_mb: int = Field(
        default=256, ge=32, description="Memory of one machine in MiB, for all its processes and files together."
    )
    disk_mb: int = Field(
        default=64,
        ge=1,
        description="Size of a machine's work directory in MiB; /tmp may take as much again. A machine that has forked "
        "and its forks may each write as much again beside the files that they share.",
    )
    processes: int = Field(default=64, ge=4, description="Most processes and threads in one machine.")
    open_files: int = Field(default=256, ge=32, description="Most open files of one process in a machine.")
    images: str | None = Field(
        None,
        description="Directory with machine images, one folder per name. `rollmill images` builds others, and "
        "`host-python` is built in.",
    )
    image_store: str | None = Field(
        None,
        description="Directory or URL of an object store with images, written by `rollmill images push`. An image that "
        "is not on this host is fetched from it when its first machine starts.",
    )
    image_mb: int = Field(default=64, ge=1, description="Most files of an image's work directory in MiB.")
    egress: list[Annotated[str, Field(pattern=ENTRY)]] = Field(
        [],
        description="Names that commands may reach through a proxy: NAME, NAME:PORT or *.NAME; no port: 80 and 443. "
        "It holds for all machines of the run, those that grade too. Empty: no network at all.",
    )
    egress_log: str | None = Field(
        None, description="File that gets one line of JSON per request through the proxy. Not set: the process's log."
    )


class AgentMachine(ABC):
    """What all machines with an agent have in common. A kind of machine adds `_end`, and what its host does.

    A machine that fails before its first command, or whose host is not healthy, is an infrastructure failure:
    MachineError. Otherwise its own commands ruined it: every further command ends with `stopped="machine"`, and no file
    is found. Only the host decides this; nothing inside the machine can, with one exception: where no command has run
    in a machine or its template before (`_proven`), an agent that answers its first command with an error is believed.
    """

    capabilities: Capabilities
    _grace_s = GRACE_S
    _proven = False  # a command has run in what this machine was made from, so its agent can start commands

    def __init__(self, image: str, connection: socket.socket, name: str) -> None:
        self.image = image
        self.environment: dict[str, str] = {}  # of every command, under what its caller gives
        self._name = name
        self._connection = connection
        self._lock = asyncio.Lock()
        self._pending: asyncio.Task[Any] | None = None  # survives a cancelled caller
        self._sent = asyncio.Event()  # the pending request
        self._limit: asyncio.Timeout | None = None  # of the pending request
        self._interrupting: asyncio.Task[None] | None = None
        self._handed_over: list[socket.socket] = []  # by the agent
        self._number = 0  # of the latest request
        self._begun = False  # a command has begun
        self._ruined = False  # by a command of its own
        self._closed = False
        self._egress: Egress | None = None

    @abstractmethod
    async def listen(self) -> tuple[socket.socket, int]: ...

    async def open_egress(self, config: AgentMachineConfig) -> None:
        """Let commands reach the names of `egress`, through a proxy whose variables they find in their environment."""
        if not config.egress:
            return
        listener, port = await self.listen()
        self._egress = Egress(listener, config.egress, config.egress_log, self._name)
        await self._egress.start()
        names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
        self.environment = {**dict.fromkeys(names, f"http://127.0.0.1:{port}"), "no_proxy": "127.0.0.1,localhost"}

    @abstractmethod
    async def _end(self, begun: bool) -> Ended:
        """End the machine. Says whether the infrastructure failed; `begun`: a command had begun."""

    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        order = Order(argv, **options)
        header, began = self._header("exec", order), time.monotonic()
        limit_s, most = longest(order.timeout_s), order.max_output + _NOTE
        answer = await self._request(header, order.stdin, timeout_s=limit_s, max_body=most)
        if answer is None:
            return ExecResult(exit_code=-signal.SIGKILL, output=b"", stopped="machine")
        reply, output = answer
        return ExecResult(
            exit_code=reply["exit_code"],
            output=output,
            truncated=reply["truncated"],
            stopped=reply["stopped"],
            seconds=min(reply["seconds"], time.monotonic() - began),
            starved=reply.get("starved") is True,
        )

    async def start(self, argv: Sequence[str], **options: Any) -> AgentProcess:
        order = Order(argv, **options)
        answer = await self._request(self._header("start", order), order.stdin)
        return AgentProcess(self, None if answer is None else answer[0]["process"], order.max_output)

    def _header(self, operation: str, order: Order) -> dict[str, Any]:
        if not order.argv or isinstance(order.argv, str) or not 0 <= order.max_output <= wire.MAX_BODY - _NOTE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if order.user is not None and order.user not in self.capabilities.users:
            raise OSError(errno.EPERM, f"no user {order.user!r} here; there are: {', '.join(self.capabilities.users)}")
        return {"op": operation, **order.header(self.environment)}

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        limit = min(max_bytes, wire.MAX_BODY)
        return await self._request_files({"op": "read", "path": _inside(path), "max_bytes": limit}, max_body=limit)

    async def pack(self, directory: str, *, max_bytes: int, timeout_s: float, whole: bool = True) -> bytes:
        most = min(max_bytes, wire.MAX_BODY >> 1)
        header = {"op": "pack", "path": _inside(directory), "max_bytes": most, "whole": whole}
        return await self._request_files(header, timeout_s=timeout_s, max_body=wire.MAX_BODY)

    async def write(self, path: str, data: bytes) -> None:
        await self.write_all({path: data})

    async def write_all(self, files: Mapping[str, bytes]) -> None:
        entries = [[_inside(path), len(data)] for path, data in files.items()]
        await self._request_files({"op": "write", "files": entries}, b"".join(files.values()))

    async def _request_files(
        self, header: dict[str, Any], body: bytes = b"", *, timeout_s: float = 0.0, max_body: int = 0
    ) -> bytes:
        answer = await self._request(header, body, timeout_s=timeout_s, max_body=max_body)
        if answer is None:
            raise FileNotFoundError(errno.ENOENT, "the machine's commands ended it", header.get("path"))
        return answer[1]

    async def _request(
        self, header: dict[str, Any], body: bytes = b"", *, timeout_s: float = 0.0, max_body: int = wire.MAX_BODY
    ) -> Answer | None:
        """Send a request and return its reply; None if the machine's own commands ruined it. OSError: refused."""
        self._number += 1
        number = self._number
        frame = wire.pack({**header, "id": number}, body)
        async with self._nothing_pending():
            if self._ruined:
                return None
            begun_before = self._begun
            self._begun |= header["op"] in ("exec", "start")
            self._sent.clear()
            exchange = self._exchange(frame, header["op"], number, timeout_s, max_body)
            self._pending = asyncio.create_task(exchange)
            try:
                answer = await asyncio.shield(self._pending)
            except asyncio.CancelledError:
                if not self._pending.done():  # else nobody would end this task
                    self._interrupting = asyncio.create_task(self._interrupt())
                raise
            if answer is None:
                await self._lose("it does not answer", self._begun)
                return None
            reply, data = answer
            if "error" in reply:
                await self._lose(str(reply["error"])[:500], begun_before or (self._begun and self._proven))
                return None
        if "errno" in reply:
            raise OSError(reply["errno"], os.strerror(reply["errno"]), reply.get("path"))
        return reply, data

    @contextlib.asynccontextmanager
    async def _nothing_pending(self) -> AsyncIterator[None]:
        """Keep other requests from the machine for a while."""
        async with self._lock:
            if self._pending is not None:
                await asyncio.wait([self._pending])  # its caller was cancelled; nobody wants the answer
            yield

    async def _exchange(
        self, frame: bytes, operation: str, number: int, timeout_s: float, max_body: int
    ) -> Answer | None:
        """The answer to a request; None if there is none, or if it is no answer to it."""
        try:
            async with asyncio.timeout(timeout_s + self._grace_s) as self._limit:
                with contextlib.suppress(BrokenPipeError):  # it has ended; what it said last can still be received
                    await asyncio.get_running_loop().sock_sendall(self._connection, frame)
                self._sent.set()
                for _ in range(_MOST_STALE):
                    reply, data = await self._receive(operation == "listen", max_body)
                    if reply.get("id", number) == number:  # an agent that cannot go on says so without a number
                        return _checked(operation, reply), data
            return None
        except (OSError, wire.WireError):
            return None
        finally:
            if self._interrupting is not None:
                self._interrupting.cancel()
                self._interrupting = None

    async def _interrupt(self) -> None:
        """End the command of a caller that was cancelled. If it has just ended, the agent ignores the message."""
        await self._sent.wait()
        loop = asyncio.get_running_loop()
        assert self._limit is not None
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: the limit was reached at this moment
            self._limit.reschedule(loop.time() + self._grace_s)  # the command's own time limit may be days away
            await loop.sock_sendall(self._connection, wire.pack({"op": "interrupt"}))

    async def _lose(self, why: str, by_command: bool) -> None:
        """End a machine that cannot go on. Returns if its commands ruined it, else MachineError."""
        ended = await self._end(self._begun)
        if self._closed or ended.by_infrastructure or not by_command:
            raise MachineError(f"machine {self._name}: {why}{ended.problem}", hint=ended.hint)
        self._ruined = True

    async def _receive(self, with_files: bool, max_body: int) -> Answer:
        lengths = await self._receive_exactly(wire.LENGTHS.size, with_files)
        header_length, body_length = wire.unpack_lengths(lengths)
        if body_length > max_body:
            raise wire.WireError(f"an answer of {body_length} bytes; at most {max_body} were asked for")
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


class AgentProcess:
    """A process that keeps running between commands. `identifier` is None if the machine was ruined."""

    def __init__(self, machine: AgentMachine, identifier: int | None, max_output: int) -> None:
        self._machine = machine
        self._identifier = identifier
        self._max_output = max_output
        self._last: ProcessState | None = None  # after stop

    async def state(self) -> ProcessState:
        return await self._ask("state")

    async def stop(self) -> ProcessState:
        self._last = await self._ask("stop")
        return self._last

    async def write(self, data: bytes) -> None:
        while data:
            data = data[await self.write_some(data, 60.0) :]

    async def write_some(self, data: bytes, within_s: float) -> int:
        """Type what the terminal takes within `within_s`. Returns how many bytes that were."""
        deadline, done = time.monotonic() + within_s, 0
        while done < len(data) and time.monotonic() < deadline:
            count = (await self._tell({"op": "input"}, data[done : done + _TYPED]))["count"]
            done += count
            if not count:
                await asyncio.sleep(_FULL_S)
        return done

    async def resize(self, rows: int, columns: int) -> None:
        await self._tell({"op": "resize", "rows": rows, "columns": columns})

    async def _tell(self, header: dict[str, Any], body: bytes = b"") -> dict[str, Any]:
        answer = None
        if self._identifier is not None and self._last is None:
            answer = await self._machine._request({**header, "process": self._identifier}, body, max_body=0)
        if answer is None:
            raise OSError(errno.ESRCH, "the process has ended")
        return answer[0]

    async def _ask(self, operation: str) -> ProcessState:
        if self._last is not None:
            return self._last
        answer = None
        if self._identifier is not None:
            request = {"op": operation, "process": self._identifier}
            answer = await self._machine._request(request, max_body=self._max_output + _NOTE)
        if answer is None:
            return ProcessState(exit_code=-signal.SIGKILL, output=b"", stopped="machine")
        reply, output = answer
        return ProcessState(reply["exit_code"], output, reply["truncated"], reply["stopped"])


def _checked(operation: str, reply: dict[str, Any]) -> dict[str, Any]:
    """The reply, if it has what the operation promises. WireError if not."""
    if "error" in reply:
        return reply
    if "errno" in reply:
        valid = _is_count(reply["errno"], 4095) and isinstance(reply.get("path"), str | None)
    elif operation in ("exec", "state", "stop"):
        code, seconds = reply.get("exit_code"), reply.get("seconds", 0.0)
        valid = (code is None and operation != "exec") or (isinstance(code, int) and abs(code) < 1 << 16)
        valid &= isinstance(reply.get("truncated"), bool) and reply.get("stopped") in _STOPPED
        valid &= isinstance(seconds, int | float) and math.isfinite(seconds) and seconds >= 0
        valid &= operation != "exec" or "seconds" in reply
    elif operation in ("start", "listen"):
        valid = _is_count(reply.get("process" if operation == "start" else "port"), 1 << 32)
    elif operation == "input":
        valid = reply.get("count") == 0 or _is_count(reply.get("count"), _TYPED)
    elif operation == "busy":
        valid = isinstance(reply.get("busy"), bool)
    else:
        valid = True
    if not valid:
        raise wire.WireError(f"no answer to {operation!r}")
    return reply


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most


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
