"""Events: one JSON line each, one file a process, under `<run>/events/`. Reports and progress displays read them.

Every event has `at` (seconds since the epoch), `process` and `kind`. A `busy` event also has `start` and `end`:
the timeline of who worked when is drawn from those alone.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

_file: TextIO | None = None
_process = "main"


def open_events(directory: Path, process: str) -> None:
    """Send this process's events to `directory/process.jsonl`; before that call they go nowhere."""
    global _file, _process
    directory.mkdir(parents=True, exist_ok=True)
    _file = (directory / f"{process}.jsonl").open("a", buffering=1)
    _process = process


def emit(kind: str, **fields: Any) -> None:
    if _file is not None:
        _file.write(json.dumps({"at": time.time(), "process": _process, "kind": kind, **fields}, default=str) + "\n")


@contextlib.contextmanager
def busy(what: str, **fields: Any) -> Iterator[None]:
    """Mark a stretch of work for the timeline."""
    start = time.time()
    try:
        yield
    finally:
        emit("busy", what=what, start=start, end=time.time(), **fields)


def read_events(directory: Path) -> list[dict[str, Any]]:
    """All events of a run in time order. A line cut short by a crash is left out."""
    events = []
    for path in sorted(directory.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                events.append(json.loads(line))
    return sorted(events, key=lambda event: event["at"])


class EventTail:
    """Follows the event files of a run as they grow: `poll()` returns what is new since the last call."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}

    def poll(self) -> list[dict[str, Any]]:
        events = []
        for path in sorted(self._directory.glob("*.jsonl")):
            offset = self._offsets.get(path, 0)
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
            complete = data.rfind(b"\n") + 1
            self._offsets[path] = offset + complete
            for line in data[:complete].splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    events.append(json.loads(line))
        return sorted(events, key=lambda event: event["at"])
