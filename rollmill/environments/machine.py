"""Machine: the "operating system" part of an environment. exec, read, write, snapshot, fork, close."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

WORK = "/work"  # the directory a task's files lie in, inside every machine


@dataclass(frozen=True)
class ExecResult:
    exit_code: int
    output: bytes  # stdout and stderr together; beyond max_output the middle is cut out, with a line that says so
    truncated: bool = False
    stopped: Literal["time", "memory", "processes"] | None = None  # which limit ended the command, if one did
    seconds: float = 0.0


@dataclass(frozen=True)
class Capabilities:
    """What a kind of machine can do, so that callers ask instead of trying."""

    kernel: Literal["shared", "own"]
    snapshot: Literal["none", "files", "full"]
    slowdown: float = 1.0  # time limits scale with it


class Machine(Protocol):
    capabilities: Capabilities

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
        """Run a command to its end, and end whatever it left running.

        A command that fails, loops or floods is a result; MachineError is ours alone.
        """
        ...

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """OSError as usual (FileNotFoundError …; EFBIG beyond max_bytes); links lead nowhere outside the machine."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file, and its directories. OSError as usual (ENOSPC …)."""
        ...

    async def snapshot(self) -> bytes:
        """The work directory as bytes that `MachineHost.create(image, snapshot=…)` takes."""
        ...

    async def fork(self) -> Machine: ...

    async def close(self) -> None: ...


class MachineHost(Protocol):
    """Creates machines; one per dispatcher."""

    async def create(
        self, image: str, files: Mapping[str, bytes] | None = None, *, snapshot: bytes | None = None
    ) -> Machine:
        """TaskError if the image does not exist; MachineError if the host cannot create machines."""
        ...

    async def close(self) -> None: ...
