"""A folder in memory instead of a machine, for a harness that runs no command (`wants_machine = False`).

It carries files from the harness to the hand-in. Grading has real machines as always.
"""

from __future__ import annotations

import errno
import os
import posixpath
from typing import cast

from rollmill.environments.harness import Harness
from rollmill.environments.task import Task, WholeDiff
from rollmill.machines.machine import WORK, Capabilities, Machine

_MOST_BYTES = 1 << 20  # of a file


class Folder:
    """The files of a task, and what a harness writes over them. It can read, write and close, and nothing else."""

    capabilities = Capabilities(kernel="shared", snapshot="none")

    def __init__(self, task: Task) -> None:
        self.image = task.image
        self._files = {_place(path): data for path, data in task.files.items()}

    async def read(self, path: str, *, max_bytes: int = _MOST_BYTES) -> bytes:
        data = self._files.get(_place(path))
        if data is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if len(data) > max_bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        return data

    async def write(self, path: str, data: bytes) -> None:
        self._files[_place(path)] = data

    async def close(self) -> None: ...


def folder_for(harness: Harness, task: Task) -> Machine | None:
    """A folder, if the harness needs no more and the task hands in named files."""
    if getattr(harness, "wants_machine", True) or isinstance(task.submission, WholeDiff):
        return None
    return cast(Machine, Folder(task))


def _place(path: str) -> str:
    return posixpath.normpath(posixpath.join(WORK, path))
