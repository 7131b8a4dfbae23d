"""Events: one JSON line each, one file per process, under `<run>/events/`. Reports and progress displays read them.

Every event has `at` (seconds since the epoch), `process` and `kind`; events of trainer and dispatcher also have the
`stage` they work for. `rollmill/events.py` lists the kinds and their other fields.
The timeline of who worked when is drawn from the `busy` events alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

_MOST_TEXT = 20_000  # characters of one text in an event
_MOST_DEPTH = 16
_MOST_WARNED = 1000
_TAIL_BYTES = 1 << 16
_RENAMED = {"midtrain_step": "document_step"}  # kinds as older runs wrote them
_LOGGED = {  # kind → the fields that a log shows
    "phase": ("phase", "state"),
    "step": ("step", "steps", "groups", "reward_mean", "solve_rate", "seconds"),
    "document_step": ("step", "steps", "loss", "tokens_per_s"),
    "publish": ("line", "version"),
    "apply": ("line", "version"),
    "warning": ("text",),
}
_file: BinaryIO | None = None
_log = False
_process = "main"
_labels: dict[str, str] = {}
_REPEAT_S = 60.0  # a warning is written again after this time
_warned: dict[str, float] = {}  # text of a warning without its numbers → when it was written


def open_events(directory: Path, process: str, *, log: bool = False) -> None:
    """Send this process's events to `directory/process.jsonl`; before that call they go nowhere. With `log`, it also
    prints those that tell what it does."""
    global _file, _log, _process
    _log = log
    _warned.clear()
    directory.mkdir(parents=True, exist_ok=True)
    if _file is not None:
        _file.close()
    path = directory / f"{process}.jsonl"
    # unbuffered and in append mode: an event is one write, so threads do not interleave and a crash loses nothing
    _file = path.open("ab", buffering=0)
    _process = process
    if not _ends_a_line(path):
        _file.write(b"\n")  # a crash cut the last line short; do not let it swallow the next one


def label_events(**labels: str) -> None:
    """Add these fields to every later event of this process."""
    _labels.update(labels)


def emit(kind: str, /, **fields: Any) -> None:
    """Write one event. It never raises: events are for people, and losing one must not stop work."""
    if _file is None or (kind == "warning" and _is_repeated(fields.get("text"))):
        return
    event: dict[str, Any] = {"at": time.time(), "process": _process, "kind": kind, **_labels}
    try:
        line = json.dumps({**event, **_plain(fields), **event}, allow_nan=False)
    except Exception as error:  # a field that breaks when it is looked at
        line = json.dumps({**event, "unwritable": type(error).__name__})
    with contextlib.suppress(OSError):  # a full disk: the stores report it, and must stop
        _file.write(line.encode() + b"\n")
        if _log and kind in _LOGGED:
            print(kind, *(f"{name}={fields[name]}" for name in _LOGGED[kind] if fields.get(name) is not None))


def _is_repeated(text: object) -> bool:
    """Whether a warning was written a short time ago, with the same or with other numbers. It would hide others."""
    cause, now = re.sub(r"\d+", "", text) if isinstance(text, str) else "", time.monotonic()
    if now - _warned.get(cause, -math.inf) < _REPEAT_S:
        return True
    if len(_warned) > _MOST_WARNED:
        _warned.clear()
    _warned[cause] = now
    return False


@contextlib.contextmanager
def busy(what: str, **fields: Any) -> Iterator[None]:
    """Mark a stretch of work for the timeline."""
    start = time.time()
    try:
        yield
    finally:
        emit("busy", what=what, start=start, end=time.time(), **fields)


def append_events(directory: Path, process: str, events: Iterable[Mapping[str, Any]]) -> None:
    """Write events that another process could not write. Each has `at`, `kind` and its fields."""
    lines = [json.dumps({**_plain(event), "process": process}, allow_nan=False) + "\n" for event in events]
    if lines:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / f"{process}.jsonl").open("a") as file:
            file.write("".join(lines))


def last_events(directory: Path, process: str) -> list[dict[str, Any]]:
    """The events at the end of a process's file, oldest first: a bounded part of it."""
    try:
        with (directory / f"{process}.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return list(_parse(file.read().split(b"\n")))
    except OSError:
        return []


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
        # a line cut short is not JSON, or not even UTF-8
        with contextlib.suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict) and isinstance(event.get("at"), int | float) and "kind" in event:
                yield {**event, "kind": _RENAMED.get(str(event["kind"]), event["kind"])}


def _plain(value: Any, depth: int = 0) -> Any:
    """A value that JSON can hold. Fields may come from a model or a task, so anything may be in them.

    Numbers that are not finite become None; long text is cut; other objects become their text.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, int):
        return int(value) if value.bit_length() <= 64 else _text(f"an integer of {value.bit_length()} bits")
    if isinstance(value, str):
        return _text(value)
    if depth < _MOST_DEPTH and isinstance(value, Mapping):
        return {_text(str(key)): _plain(each, depth + 1) for key, each in value.items()}
    if depth < _MOST_DEPTH and isinstance(value, list | tuple):
        return [_plain(each, depth + 1) for each in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of numpy or torch
        return _plain(value.item(), depth + 1) if depth < _MOST_DEPTH else None
    return _text(str(value))


def _text(text: str) -> str:
    """Bounded text without lone surrogates: those cannot be printed."""
    if len(text) > _MOST_TEXT:
        text = f"{text[:_MOST_TEXT]}… ({len(text)} characters)"
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
