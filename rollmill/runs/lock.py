"""Locks of a run: one process at a time drives a run, trains it, serves a session log.

A lock is `locks/NAME` under a run directory, held with flock: a process that is killed releases it. The file names its
holder, so that whoever finds it taken can say by whom.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from pydantic import BaseModel, ValidationError

from rollmill.errors import RollmillError

_POLL_S = 0.05
_SIGNING_S = 2.0  # for a process that has just taken a lock to write its name into it


class LockTaken(RollmillError):
    """Another process holds the lock."""


class Holder(BaseModel):
    """The process that holds a lock."""

    pid: int
    command: str
    since: float  # seconds since the epoch

    def __str__(self) -> str:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} (`{self.command}`), since {began}"


@contextlib.contextmanager
def exclusive(directory: Path, name: str, patience_s: float = 30.0) -> Iterator[None]:
    """Hold the lock `name` of a run directory. Waits up to `patience_s`, then raises LockTaken with the holder."""
    (directory / "locks").mkdir(parents=True, exist_ok=True)
    with _path(directory, name).open("a+") as file:
        deadline = time.monotonic() + patience_s
        while not _try_lock(file):
            if time.monotonic() > deadline:
                raise _taken(directory, name)
            time.sleep(_POLL_S)
        file.truncate(0)
        file.write(Holder(pid=os.getpid(), command=_command(), since=time.time()).model_dump_json())
        file.flush()
        yield


def holder(directory: Path, name: str) -> Holder | None:
    """The process that holds the lock now, if any does. Its pid is 0 if it has not signed after _SIGNING_S."""
    deadline = time.monotonic() + _SIGNING_S
    while True:
        try:
            with _path(directory, name).open() as file:
                if _try_lock(file, fcntl.LOCK_SH):  # nobody holds it, whatever an earlier holder wrote
                    return None  # closing the file releases it; others may look at the same time
                return Holder.model_validate_json(file.read())
        except FileNotFoundError:
            return None
        except ValidationError:  # just taken: its holder has not signed yet
            if time.monotonic() > deadline:
                return Holder(pid=0, command="unknown", since=time.time())
            time.sleep(_POLL_S)


def terminate(by: Holder) -> None:
    """Ask the process that holds a lock to stop."""
    if by.pid <= 0:  # such a number would be a group of processes: our own one, or everything
        raise RollmillError("a process that has not said its pid cannot be stopped", hint="try again in a moment")
    try:
        os.kill(by.pid, signal.SIGTERM)
    except (ProcessLookupError, PermissionError) as error:
        raise RollmillError(
            f"{by} cannot be stopped: {error.strerror}", hint="it belongs to another user or container"
        ) from None


def _taken(directory: Path, name: str) -> LockTaken:
    by = holder(directory, name)
    return LockTaken(
        f"{directory} is in use: {by or 'another process'} holds its lock {name!r}",
        hint=f"wait for it to end, or `rollmill stop {directory}`; a killed process releases its locks",
    )


def _try_lock(file: TextIO, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _path(directory: Path, name: str) -> Path:
    return directory / "locks" / name


def _command() -> str:
    program, *arguments = sys.argv
    return shlex.join([Path(program).name, *arguments])
