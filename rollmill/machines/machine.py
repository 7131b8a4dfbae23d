"""Machine: the "operating system" part of an environment. exec, start, read, write, listen, snapshot, fork, close."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

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
    """What `exec` and `start` are asked to run. Kinds of machines make one of the options that they are given."""

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


class Process(Protocol):
    """A process that `Machine.start` started. It runs while commands come and go, and ends with its machine."""

    async def state(self) -> ProcessState: ...

    async def write(self, data: bytes) -> None:
        """Type into its terminal. Returns once all is typed: a program that reads nothing takes a few KiB. OSError: it
        has no terminal, or has ended."""
        ...

    async def resize(self, rows: int, columns: int) -> None:
        """Change the size of its terminal. OSError as with `write`."""
        ...

    async def stop(self) -> ProcessState:
        """End the process and everything it started. Returns its last state; safe to repeat."""
        ...


@dataclass(frozen=True)
class Snapshot:
    """A reference to a saved state. Only the kind of host that made it can use it."""

    image: str  # what the machine had started from
    state: Any = field(repr=False)  # whatever the host finds it by: a path, an id, or the bytes if they are few


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
    users: tuple[str, ...] = ("user",)  # that a command can run as; the first one if it names none


USERS = ("user", "root")  # of machines whose agent is ours


class Machine(Protocol):
    capabilities: Capabilities
    image: str  # what it started from, with its digest: NAME@DIGEST

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
        ...

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
        ...

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """Read a file. OSError as usual (FileNotFoundError …; EFBIG beyond max_bytes). Links stay in the machine.

        Any path that a model can write is served or refused. The files of a ruined machine are not found.
        """
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file, and its directories. OSError as usual (ENOSPC …).

        rollmill/machines/file_trees.py copies whole directories.
        """
        ...

    async def pack(self, directory: str, *, max_bytes: int, timeout_s: float, whole: bool = True) -> bytes:
        """A tar of a directory, made where no command of the machine reaches. OSError as with `pack_tree` of
        rollmill/machines/file_trees.py: optional. For a kind without, `pack_tree` has `tar` of the machine do it."""
        ...

    async def listen(self) -> tuple[socket.socket, int]:
        """Open a port on the loopback address of the machine. Returns a listening socket in this process and the port.

        What a program in the machine connects to 127.0.0.1:port arrives at the socket. Close the socket to close the
        port. This is the only way out of a machine, and it leads to the owner of the socket alone. OSError: this kind
        of machine cannot, or its commands have ended it.
        """
        ...

    async def snapshot(self) -> Snapshot:
        """Save the state, as far as `capabilities.snapshot` goes. OSError: it does not fit."""
        ...

    async def fork(self, count: int = 1) -> Sequence[Machine]:
        """Returns `count` new machines with the state of this one, as far as `capabilities.snapshot` goes."""
        ...

    async def pause(self) -> None:
        """Stop all processes of the machine until `resume`. OSError: `capabilities.pause` is false."""
        ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


class MachineHost(Protocol):
    """Creates machines; one per dispatcher.

    A host whose snapshots take up space may also have `async def release(self, snapshot: Snapshot) -> None`. It is
    called once nobody needs the snapshot any more. A host whose machines are slow may have `async def slowdown(self,
    image: str) -> float`: how many times longer commands take in machines of this image, measured before any exists.
    A host whose snapshots other hosts of its kind can use may have `async def export(self, snapshot: Snapshot) ->
    Snapshot`: the same state as bytes. Its `create` takes such a snapshot too, whoever made it.
    A host that can start machines ahead may have `def expect(self, image: str, count: int) -> None`: as many will be
    needed soon.
    """

    async def create(
        self, image: str, files: Mapping[str, bytes] | None = None, *, snapshot: Snapshot | None = None
    ) -> Machine:
        """A machine of an image, or with the state of a snapshot; `files` are written last.

        TaskError: no such image, or `files` do not fit. MachineError: the host cannot create machines.
        """
        ...

    async def close(self) -> None: ...


def expect(host: MachineHost, image: str, count: int) -> None:
    """Tell the host that `count` machines of an image will be needed soon."""
    method = getattr(host, "expect", None)
    if method is not None:
        method(image, count)


async def slowdown(host: MachineHost, image: str) -> float:
    """How many times longer commands take in machines of an image; 1 if the host does not measure it.

    A host that makes a template first makes it now. So ask before a time limit begins. MachineError as with `create`.
    """
    method = getattr(host, "slowdown", None)
    return 1.0 if method is None else float(await method(image))


async def export(host: MachineHost, snapshot: Snapshot) -> Snapshot | None:
    """The snapshot as bytes, which other hosts of this kind can use; None if there is none. MachineError: it failed."""
    method = getattr(host, "export", None)
    return None if method is None else await method(snapshot)


async def release(host: MachineHost, snapshot: Snapshot | None) -> None:
    """Tell the host that nobody needs the snapshot any more. A host that cannot let go of it breaks no episode."""
    method = getattr(host, "release", None)
    if snapshot is None or method is None:
        return
    try:
        await method(snapshot)
    except Exception:  # the host may be code of the user
        log.warning("a snapshot was not released", exc_info=True)
