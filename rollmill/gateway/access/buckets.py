"""Buckets that refill continuously: how much of a limit per minute is left. All workers of a gateway share them.

They are rows of a memory file. A lock of the file guards them; the kernel releases it if a worker is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import time
from collections.abc import Iterator

_ROWS = 1 << 14
_FIELDS = 4  # of a row: the id, its limit per minute, the units that are there, and when they were counted
BYTES = _ROWS * _FIELDS * 8


class Buckets:
    """`file`: one that the workers share, of `BYTES` zeros; None: nobody else uses them."""

    def __init__(self, file: int | None = None) -> None:
        self._file = file
        self._memory = mmap.mmap(-1 if file is None else file, BYTES)
        self._ids = memoryview(self._memory).cast("Q")
        self._numbers = memoryview(self._memory).cast("d")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """No other worker reads or changes a bucket in the block."""
        if self._file is None:
            yield
            return
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def wait_s(self, name: str, per_minute: int, needed: float) -> float:
        """Seconds until the bucket has `needed` units; 0 if it has. A new one is full."""
        row = self._row(name, per_minute)
        level = self._refill(row, per_minute)
        return max(0.0, (needed - level) * 60 / per_minute)

    def take(self, name: str, per_minute: int, amount: float) -> None:
        """The bucket may go below zero."""
        row = self._row(name, per_minute)
        self._numbers[row + 2] = self._refill(row, per_minute) - amount

    def _refill(self, row: int, per_minute: int) -> float:
        now = time.monotonic()  # the same clock in all processes
        level = min(per_minute, self._numbers[row + 2] + (now - self._numbers[row + 3]) * per_minute / 60)
        self._numbers[row + 2], self._numbers[row + 3] = level, now
        return level

    def _row(self, name: str, per_minute: int) -> int:
        id = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) or 1
        for step in range(_ROWS):
            row = (id + step) % _ROWS * _FIELDS
            if self._ids[row] not in (0, id):
                continue
            if not self._ids[row] or self._numbers[row + 1] != per_minute:
                self._ids[row] = id
                for index, value in enumerate((per_minute, per_minute, time.monotonic()), row + 1):
                    self._numbers[index] = value
            return row
        self._memory[:] = bytes(BYTES)  # too many keys since the start: all begin again
        return self._row(name, per_minute)


def shared_file() -> int:
    """A file for `Buckets` that processes forked from this one share."""
    file = os.memfd_create("rollmill-limits")
    os.ftruncate(file, BYTES)
    return file
