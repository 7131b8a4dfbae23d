"""How role processes end, in words. Imports nothing: each process of a cluster's node waits for it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

STOP_PATIENCE_S = 20.0  # between SIGTERM and SIGKILL
BEGINS, CAUSE = " begins, process ", "error: "  # parts of lines that a role writes to its log
_TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")


def last_words(logs: Path, name: str) -> str:
    """Why a role ended, for an error: the cause that it wrote, also if other lines follow; else the end of its log."""
    try:
        with (logs / f"{name}.log").open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 16384))
            lines = list(map(untimed, log.read().decode(errors="replace").strip().splitlines()))
    except OSError as error:
        return f"its log cannot be read: {error.strerror}"
    began = max((at for at, line in enumerate(lines) if BEGINS in line), default=0)  # before it: another process
    causes = [at for at, line in enumerate(lines) if at >= began and line.startswith(CAUSE)]
    if not causes:
        return " ".join(lines[-2:])[-600:] or "its log is empty"
    told = lines[causes[-1] :]
    hint = next((at for at, line in enumerate(told) if line.startswith("hint: ")), 1)
    return " ".join(told[: hint + 1]).removeprefix(CAUSE)[:1200]


def untimed(line: str) -> str:
    """A line of a log without the time before it."""
    return _TIME.sub("", line)


def describe_exit(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"stopped with exit code {code}"
