"""Locks of a run: one process at a time drives a run, trains it, serves a session log.

A lock is `locks/NAME` under a run directory, held with flock: a process that is killed releases it. The file names its
holder, so that whoever finds it taken can say by whom.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from pydantic import BaseModel, ValidationError

from rollmill.errors import RollmillError

_POLL_S = 0.05


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
    """The process that holds the lock now, if any does."""
    try:
        with _path(directory, name).open() as file:
            if _try_lock(file):  # nobody holds it, whatever an earlier holder wrote; closing the file releases it
                return None
            file.seek(0)
            return Holder.model_validate_json(file.read())
    except FileNotFoundError:
        return None
    except ValidationError:  # just taken: its holder has not signed yet
        return Holder(pid=0, command="unknown", since=time.time())


def _taken(directory: Path, name: str) -> LockTaken:
    by = holder(directory, name)
    return LockTaken(
        f"{directory} is in use: {by or 'another process'} holds its lock {name!r}",
        hint=f"wait for it to end, or `rollmill stop {directory}`; a killed process releases its locks",
    )


def _try_lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _path(directory: Path, name: str) -> Path:
    return directory / "locks" / name


def _command() -> str:
    program, *arguments = sys.argv
    return shlex.join([Path(program).name, *arguments])
