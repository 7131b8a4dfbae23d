"""Machine: the "operating system" part of an environment. exec, start, read, write, listen, snapshot, fork, close.

A kind of machine is two classes: one derived from `MachineHost`, named by `[machine] kind = "package.module:Class"`,
and one derived from `Machine`, which its `create` returns. Methods that are not abstract raise OSError here, or do
their work in a plain way: a kind may do better. The pool (pool.py) stands around every kind.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rollmill.kinds import KindSection, Slot

log = logging.getLogger(__name__)
WORK = "/work"  # the directory of a task's files, inside every machine


@dataclass(frozen=True)
class ExecResult:
    exit_code: int
    output: bytes  # stdout and stderr together; if longer than max_output, a line replaces the middle
    truncated: bool = False
    # the limit that ended the command, if one did; "machine": a command ruined the machine itself
    stopped: Literal["time", "memory", "processes", "machine"] | None = None
    seconds: float = 0.0  # that the command itself ran, without waiting for its turn; 0: not known
    starved: bool = False  # `stopped` is "time", and it had nearly all of `longest` while others had the processors


def longest(timeout_s: float) -> float:
    """Seconds after which a command ends that others keep from the processor: the clock of its limit stands still
    meanwhile, where its machine can tell."""
    return timeout_s + min(7 * timeout_s, 600.0)


@dataclass(frozen=True)
class Order:
    """What `exec` and `start` are asked to run. `Machine.order` makes one of their arguments."""

    argv: Sequence[str]
    cwd: str = WORK
    env: Mapping[str, str] | None = None
    stdin: bytes = b""
    timeout_s: float = 10.0  # of `exec`
    max_output: int = 65536
    pty: tuple[int, int] | None = None  # of `start`
    user: str | None = None

    def header(self, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
        """As JSON has it, without stdin. Variables of the machine's `environment` come first."""
        terminal = {} if self.pty is None else {"TERM": "xterm-256color"}
        return {
            "argv": list(self.argv),
            "cwd": self.cwd,
            "env": {**terminal, **(environment or {}), **(self.env or {})},
            "timeout_s": self.timeout_s,
            "longest_s": longest(self.timeout_s),
            "max_output": self.max_output,
            "pty": self.pty,
            **({} if self.user is None else {"user": self.user}),
        }


@dataclass(frozen=True)
class ProcessState:
    exit_code: int | None  # None: it is running
    output: bytes  # so far, as in ExecResult
    truncated: bool = False
    stopped: Literal["memory", "processes", "machine"] | None = None  # the limit that ended it


class Process(ABC):
    """A process that `Machine.start` started. It runs while commands come and go, and ends with its machine."""

    @abstractmethod
    async def state(self) -> ProcessState: ...

    @abstractmethod
    async def stop(self) -> ProcessState:
        """End the process and everything it started. Returns its last state; safe to repeat."""

    @abstractmethod
    async def write(self, data: bytes, within_s: float | None = None) -> int:
        """Type into its terminal. Returns how many bytes it took `within_s` seconds; all, if that is None. A program
        that reads nothing takes a few KiB. OSError: it has no terminal, or has ended."""

    @abstractmethod
    async def resize(self, rows: int, columns: int) -> None:
        """Change the size of its terminal. OSError as with `write`."""


@dataclass(frozen=True)
class Snapshot:
    """A reference to a saved state. Only the kind of host that made it can use it."""

    image: str  # what the machine had started from
    # whatever the host finds it by: a path, an id, or the bytes if they are few; or the machine itself, see `release`
    state: Any = field(repr=False)


@dataclass(frozen=True)
class Capabilities:
    """What a kind of machine can do."""

    kernel: Literal["shared", "own"]
    snapshot: Literal["none", "files", "full"]  # what it keeps, and a fork: files, or memory too
    shared_fork: bool = False  # forks share files with their parent; a fork takes no longer if there are more of them
    pause: bool = False
    network: Literal["none", "policy"] = "none"  # policy: commands reach the names that its host allows, and no others
    listen: bool = False  # `listen` works: an agent program in the machine can reach its model
    slowdown: float = 1.0  # measured; multiply time limits by it
    architecture: str = ""  # of its programs, as `uname -m` prints it; "": the host's
    memory_mb: int = 0  # that it has; 0: not known
    disk_mb: int = 0
    egress: tuple[str, ...] = ()  # names that its commands reach
    users: tuple[str, ...] = ("user",)  # that a command can run as; the first one if it names none


USERS = ("user", "root")  # of machines whose agent is ours


class Machine(ABC):
    capabilities: Capabilities
    image: str  # what it started from, with its digest: NAME@DIGEST

    @abstractmethod
    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str = WORK,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 10.0,
        max_output: int = 65536,
        user: str | None = None,
    ) -> ExecResult:
        """Run a command to its end, and end whatever it left running. If the caller is cancelled, it ends at once.

        `user` is one of `capabilities.users`. "root" gives no right: to its programs the user of the machine and its
        files have the name root and the number 0. It is for programs that refuse to work for anyone else. OSError
        (EPERM): no such user.

        Whatever a command does is a result, the ruin of its machine included. OSError: these arguments are no command.
        MachineError: the infrastructure failed. Only evidence from the host makes one, never the machine's own.
        """

    @abstractmethod
    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """Read a file. OSError as usual (FileNotFoundError …; EFBIG beyond max_bytes). Links stay in the machine.

        Any path that a model can write is served or refused. The files of a ruined machine are not found.
        """

    @abstractmethod
    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file, and its directories. OSError as usual (ENOSPC …).

        rollmill/machines/file_trees.py copies whole directories.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the machine and all its processes. Safe to repeat."""

    async def write_all(self, files: Mapping[str, bytes]) -> None:
        """Write several files. A kind may do it by one request."""
        for path, data in files.items():
            await self.write(path, data)

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str = WORK,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        max_output: int = 65536,
        pty: tuple[int, int] | None = None,
        user: str | None = None,
    ) -> Process:
        """Start a process that keeps running between commands, a server for example. Errors as with `exec`.

        With `pty`, rows and columns, it has a terminal: `stdin` is what is typed first, and `Process.write` types more.
        The limits of the machine hold for all its processes together. EAGAIN: too many were started.
        """
        raise self._cannot("start processes that run between commands")

    async def pack(self, directory: str, *, max_bytes: int, timeout_s: float, whole: bool = True) -> bytes:
        """A tar of a directory, which nobody has checked; if not `whole`, without what cannot be read.

        Here `tar` of the machine makes it. A kind does better where no command of the machine reaches. OSError: there
        is no such directory (FileNotFoundError), not all can be read, it has more than `max_bytes` (EFBIG), or it
        cannot be packed; ENOSYS: the machine has no `tar`, and needs it. MachineError as with `exec`.
        """
        result = await self.exec(["sh", "-c", _PACK, directory], timeout_s=timeout_s, max_output=max_bytes)
        if result.truncated:
            raise OSError(errno.EFBIG, f"the tree has more than {max_bytes} bytes", directory)
        if result.exit_code == _NO_PROGRAM:
            raise OSError(errno.ENOSYS, "the machine has no `tar`", directory)
        if result.stopped is not None or result.exit_code not in ((0,) if whole else (0, _INCOMPLETE)):
            check_tree(result, directory)
        return result.output

    async def listen(self) -> tuple[socket.socket, int]:
        """Open a port on the loopback address of the machine. Returns a listening socket in this process and the port.

        What a program in the machine connects to 127.0.0.1:port arrives at the socket. Close the socket to close the
        port. This is the only way out of a machine, and it leads to the owner of the socket alone. OSError: this kind
        of machine cannot, or its commands have ended it.
        """
        raise self._cannot("open ports")

    async def snapshot(self) -> Snapshot:
        """Save the state, as far as `capabilities.snapshot` goes. OSError: it does not fit."""
        raise self._cannot("be saved")

    async def fork(self, count: int = 1) -> Sequence[Machine]:
        """Returns `count` new machines with the state of this one, as far as `capabilities.snapshot` goes."""
        raise self._cannot("be forked")

    async def pause(self) -> None:
        """Stop all processes of the machine until `resume`. OSError: `capabilities.pause` is false."""
        raise self._cannot("be paused")

    async def resume(self) -> None:
        raise self._cannot("be paused")

    async def prepare(self) -> None:
        """Make the next command start faster, if the kind can. The pool calls it before it pauses a new machine."""

    def order(self, argv: Sequence[str], **options: Any) -> Order:
        """The arguments of `exec` or `start`. OSError: they are no command, or there is no such user."""
        order, users = Order(argv, **options), self.capabilities.users
        if not argv or isinstance(argv, str) or order.max_output < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if order.user is not None and order.user not in users:
            raise OSError(errno.EPERM, f"no user {order.user!r} here; there are: {', '.join(users)}")
        return order

    def _cannot(self, what: str) -> OSError:
        return OSError(errno.ENOTSUP, f"a {type(self).__name__} cannot {what}")


_NO_DIRECTORY, _NO_PROGRAM = 66, 127
_INCOMPLETE = 2  # `tar` could not read a file
# what tar says about files that it cannot read must not be mixed with the archive
_PACK = f'cd -- "$0" 2> /dev/null || exit {_NO_DIRECTORY}; exec tar -cf - . 2> /dev/null'


def check_tree(result: ExecResult, path: str) -> None:
    """Raises OSError for a command that moved a tree and failed."""
    if result.stopped == "machine" or result.exit_code == _NO_DIRECTORY:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if result.exit_code != 0:
        why = result.output.decode("utf-8", "replace")[-300:] if len(result.output) < 4096 else ""
        raise OSError(errno.EIO, f"exit code {result.exit_code}, stopped: {result.stopped}. {why}", path)


class MachineWrapper(Machine):
    """A machine that hands every request on to another one. Override a method, or `_in_use` for all of them."""

    def __init__(self, machine: Machine) -> None:
        self.capabilities, self.image = machine.capabilities, machine.image
        self._machine = machine

    @contextlib.asynccontextmanager
    async def _in_use(self) -> AsyncIterator[Machine]:
        """The other machine, for one request."""
        yield self._machine

    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        async with self._in_use() as machine:
            return await machine.exec(argv, **options)

    async def start(self, argv: Sequence[str], **options: Any) -> Process:
        async with self._in_use() as machine:
            return await machine.start(argv, **options)

    async def read(self, path: str, **options: Any) -> bytes:
        async with self._in_use() as machine:
            return await machine.read(path, **options)

    async def write(self, path: str, data: bytes) -> None:
        async with self._in_use() as machine:
            await machine.write(path, data)

    async def write_all(self, files: Mapping[str, bytes]) -> None:
        async with self._in_use() as machine:
            await machine.write_all(files)

    async def pack(self, directory: str, **options: Any) -> bytes:
        async with self._in_use() as machine:
            return await machine.pack(directory, **options)

    async def listen(self) -> tuple[socket.socket, int]:
        async with self._in_use() as machine:
            return await machine.listen()

    async def snapshot(self) -> Snapshot:
        async with self._in_use() as machine:
            return await machine.snapshot()

    async def fork(self, count: int = 1) -> Sequence[Machine]:
        async with self._in_use() as machine:
            return await machine.fork(count)

    async def prepare(self) -> None:
        async with self._in_use() as machine:
            await machine.prepare()

    async def pause(self) -> None:
        async with self._in_use() as machine:
            await machine.pause()

    async def resume(self) -> None:
        await self._machine.resume()

    async def close(self) -> None:
        await self._machine.close()


class LentMachine(MachineWrapper):
    """A machine that its user does not end."""

    async def close(self) -> None: ...


class MachineHost(ABC):
    """Creates machines; one per dispatcher."""

    @abstractmethod
    async def create(
        self, image: str, files: Mapping[str, bytes] | None = None, *, snapshot: Snapshot | None = None
    ) -> Machine:
        """A machine of an image, or with the state of a snapshot; `files` are written last.

        TaskError: no such image, or `files` do not fit. MachineError: the host cannot create machines.
        """

    @abstractmethod
    async def close(self) -> None:
        """End all machines that are left."""

    def expect(self, image: str, count: int) -> None:
        """`count` machines of an image will be needed soon: a host may start them ahead."""

    async def slowdown(self, image: str) -> float:
        """How many times longer commands take in machines of an image, measured before any exists.

        A host that makes a template first makes it now. So ask before a time limit begins. MachineError as `create`.
        """
        return 1.0

    async def export(self, snapshot: Snapshot) -> Snapshot | None:
        """The same state as bytes, which `create` of any host of this kind takes; None if it cannot leave this one."""
        return None

    async def release(self, snapshot: Snapshot) -> None:
        """Nobody needs the snapshot any more: free what it takes."""

    def turn(self, *, alone: bool) -> contextlib.AbstractAsyncContextManager[None]:
        """Entered while an episode is graded here; `alone`: no other one at the same time."""
        return contextlib.nullcontext()


async def release(host: MachineHost, snapshot: Snapshot | None) -> None:
    """Release a snapshot, if there is one. A host that cannot let go of it breaks no episode."""
    if snapshot is not None:
        try:
            await (snapshot.state.close() if isinstance(snapshot.state, Machine) else host.release(snapshot))
        except Exception:  # the host may be code of the user
            log.warning("a snapshot was not released", exc_info=True)


class MachineSection(KindSection):
    """The section of a run that says what its machines are."""

    _slot: ClassVar[Slot] = Slot(
        "machine",
        MachineHost,
        {
            "namespace": "rollmill.machines.namespace.client:NamespaceHost",
            "qemu": "rollmill.machines.qemu.host:QemuHost",
            "remote": "rollmill.machines.remote.client:RemoteHost",
            "e2b": "rollmill.machines.remote.e2b_client:E2BHost",
        },
        "rollmill.machines",
        default="namespace",
        removed={"firecracker": 'use kind = "qemu", which uses KVM where the host has it'},
    )
