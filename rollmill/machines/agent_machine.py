"""A machine behind an agent (guest/agent.py): requests over a socket, one after the other.

An answer that has not the number of its request, or is none (framed_machine.py), ends the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from rollmill.config import Config
from rollmill.errors import MachineError, TaskError
from rollmill.machines.egress import ENTRY, Egress
from rollmill.machines.framed_machine import Answer, FramedMachine
from rollmill.machines.guest import frames as wire

GRACE_S = 20.0  # a machine that does not answer for this long beyond its own time limit is given up
_MOST_STALE = 16  # answers to earlier requests that are dropped before a machine is given up


class Ended(NamedTuple):
    """How a machine ended, as its host knows it."""

    by_infrastructure: bool
    problem: str = ""  # what the host adds to the error
    hint: str | None = "is the host overloaded?"


class AgentMachineConfig(Config):
    """Settings of all machines with an agent."""

    memory_mb: int = Field(
        default=2048, ge=32, description="Memory of one machine in MiB, for all its processes and files together."
    )
    disk_mb: int = Field(
        default=4096,
        ge=1,
        description="Size of a machine's work directory in MiB, as far as `memory_mb` lasts; /tmp may take as much "
        "again. A machine that has forked and its forks may each write as much again beside the files that they share. "
        "Of an OCI image: of all that a machine writes; in a virtual machine it is on a disk and not in memory.",
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
        "is not on this host is fetched from it when its first machine starts. OCI images of a registry, and those "
        "that a task builds, are written to it by the first host that needs one; the others fetch it from there.",
    )
    image_mb: int = Field(default=64, ge=1, description="Most files of an image's work directory in MiB.")
    egress: list[Annotated[str, Field(pattern=ENTRY)]] = Field(
        [],
        description="Names that commands may reach through a proxy: NAME, NAME:PORT or *.NAME; no port: 80 and 443. "
        "It holds for all machines of the run, those that grade too. Empty: no network at all.",
    )
    egress_inside: bool = Field(
        False, description="These names may lead to addresses of a private network, such as a mirror of packages."
    )
    egress_log: str | None = Field(
        None, description="File that gets one line of JSON per request through the proxy. Not set: the process's log."
    )

    def limits(self) -> dict[str, int]:
        """Of guest/agent.py, in bytes and counts."""
        counts = {"processes": self.processes, "open_files": self.open_files}
        return {"memory": self.memory_mb << 20, "disk": self.disk_mb << 20, **counts}


class AgentMachine(FramedMachine):
    """What all machines with an agent have in common. A kind of machine adds `_end`, and what its host does.

    A machine that fails before its first command, or whose host is not healthy, is an infrastructure failure:
    MachineError. Otherwise its own commands ruined it: every further command ends with `stopped="machine"`, and no file
    is found. Only the host decides this; nothing inside the machine can, with one exception: where no command has run
    in a machine or its template before (`_proven`), an agent that answers its first command with an error is believed.
    """

    _grace_s = GRACE_S
    _proven = False  # a command has run in what this machine was made from, so its agent can start commands

    def __init__(self, image: str, connection: socket.socket, name: str) -> None:
        self.image = image
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

    async def open_egress(self, config: AgentMachineConfig) -> None:
        """Let commands reach the names of `egress`, through a proxy whose variables they find in their environment."""
        if not config.egress:
            return
        listener, port = await self.listen()
        inside = config.egress_inside
        self._egress = Egress(listener, config.egress, config.egress_log, self._name, inside=inside)
        await self._egress.start()
        names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
        self.environment = {**dict.fromkeys(names, f"http://127.0.0.1:{port}"), "no_proxy": "127.0.0.1,localhost"}

    async def write_first(self, files: Mapping[str, bytes]) -> None:
        """Write the files that a machine starts with. TaskError: they cannot be written."""
        try:
            await self.write_all(files)
        except OSError as error:
            hint = "`machine.disk_mb` is the size of the work directory"
            raise TaskError(f"the files of a task cannot be written to a machine: {error}", hint=hint) from None

    @abstractmethod
    async def _end(self, begun: bool) -> Ended:
        """End the machine. Says whether the infrastructure failed; `begun`: a command had begun."""

    async def request(
        self, header: dict[str, Any], body: bytes = b"", *, timeout_s: float = 0.0, max_body: int = wire.MAX_BODY
    ) -> Answer | None:
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
                        return self.checked(operation, reply), data
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


async def _readable(connection: socket.socket) -> None:
    """Return when `connection` can be read."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection)
