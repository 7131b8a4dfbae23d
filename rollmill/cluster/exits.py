"""How role processes end, in words. Imports nothing: each process of a cluster's node waits for it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

STOP_PATIENCE_S = 20.0  # between SIGTERM and SIGKILL
_TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")


def last_words(logs: Path, name: str) -> str:
    """The end of a role's log, for an error."""
    try:
        with (logs / f"{name}.log").open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
            lines = log.read().decode(errors="replace").strip().splitlines()
    except OSError as error:
        return f"its log cannot be read: {error.strerror}"
    return " ".join(map(untimed, lines[-2:]))[-600:] or "its log is empty"


def untimed(line: str) -> str:
    """A line of a log without the time before it."""
    return _TIME.sub("", line)


def describe_exit(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"stopped with exit code {code}"
