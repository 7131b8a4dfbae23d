"""Lines of a role's log begin with the time: `2026-01-31 12:00:00 text`, in UTC."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO


class Timed:
    """A text stream that writes the time before each line. Everything else is that of the stream below."""

    def __init__(self, below: TextIO) -> None:
        self._below = below
        self._fresh = True  # at the beginning of a line
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            for line in text.splitlines(keepends=True):
                stamp = time.strftime("%Y-%m-%d %H:%M:%S ", time.gmtime()) if self._fresh else ""
                self._below.write(stamp + line)
                self._fresh = line.endswith("\n")
            self._below.flush()
        return len(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._below, name)


def time_lines() -> None:
    """From now on, what this process prints has times."""
    sys.stdout, sys.stderr = Timed(sys.stdout), Timed(sys.stderr)
