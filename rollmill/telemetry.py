"""Events: one JSON line each, one file a process, under `<run>/events/`. Reports and progress displays read them.

Every event has `at` (seconds since the epoch), `process` and `kind`. A `busy` event also has `start` and `end`:
the timeline of who worked when is drawn from those alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

_file: BinaryIO | None = None
_process = "main"


def open_events(directory: Path, process: str) -> None:
    """Send this process's events to `directory/process.jsonl`; before that call they go nowhere."""
    global _file, _process
    directory.mkdir(parents=True, exist_ok=True)
    if _file is not None:
        _file.close()
    path = directory / f"{process}.jsonl"
    # unbuffered and in append mode: an event is one write, so threads do not interleave and a crash loses nothing
    _file = path.open("ab", buffering=0)
    _process = process
    if not _ends_a_line(path):
        _file.write(b"\n")  # a crash cut the last line short; do not let it swallow the next one


def emit(kind: str, **fields: Any) -> None:
    if _file is None:
        return
    event = {"at": time.time(), "process": _process, "kind": kind, **fields}
    # Events are for people. A full disk is reported by the stores, which must stop; losing an event must not stop work.
    with contextlib.suppress(OSError):
        _file.write(json.dumps(event, default=_plain).encode() + b"\n")


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
    return EventTail(directory).poll()


class EventTail:
    """Follows the event files of a run as they grow: `poll()` returns what is new since the last call."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}

    def poll(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for path in sorted(self._directory.glob("*.jsonl")):
            offset = self._offsets.get(path, 0)
            with path.open("rb") as file:
                if offset > os.fstat(file.fileno()).st_size:
                    offset = 0  # the file was replaced: a run of the same name started over
                file.seek(offset)
                data = file.read()
            complete = data.rfind(b"\n") + 1
            self._offsets[path] = offset + complete
            events.extend(_parse(data[:complete].split(b"\n")))
        return sorted(events, key=lambda event: event["at"])


def _parse(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with contextlib.suppress(ValueError):  # a line cut short: not JSON, or not even UTF-8
            event = json.loads(line)
            if isinstance(event, dict) and isinstance(event.get("at"), int | float) and "kind" in event:
                yield event


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch stay numbers; anything else is written as its text."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return str(value)


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
