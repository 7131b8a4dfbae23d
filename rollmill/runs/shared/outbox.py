"""Logs, events and the report of a run whose store is not a directory: they travel through it to other hosts.

    cluster/files/events/trainer.jsonl/STREAM-000000   a stream per process; its segments grow to SEGMENT bytes
    cluster/report.html, cluster/report.json           written at the end

The host of a process sends what is new every few seconds. `bring` appends it to the files of a run directory, unless it
is from there. A host that is lost takes its last seconds with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rollmill.errors import ObjectMissing
from rollmill.storage.objects import Objects

FOLDER = "cluster/files"
REPORT = ("report.html", "report.json")  # the second one last: it says that the run is finished
SEGMENT = 256 << 10
SENT = "sent"  # a file: the streams that come from its directory
_KEY = re.compile(rf"{FOLDER}/((?:events|logs)/[A-Za-z0-9][A-Za-z0-9._-]*\.(?:jsonl|log))/([0-9a-f]+)-\d{{6}}")


class Outbox:
    """Sends what some files of a directory grow by, from now on."""

    def __init__(self, objects: Objects, directory: Path, names: Iterable[str]) -> None:
        self._objects, self._directory = objects, directory
        self._stream = f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(2)}"  # in the order of their time
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / SENT).open("a") as file:
            print(self._stream, file=file)
        self._sent = {name: _size(directory / name) for name in names}
        self._segments: dict[str, tuple[int, bytes]] = dict.fromkeys(self._sent, (0, b""))  # number, content so far

    def add(self, names: Iterable[str]) -> None:
        """Send these files too, from their beginning."""
        for name in names:
            if name not in self._sent:
                self._sent[name], self._segments[name] = 0, (0, b"")

    def send(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Raises StorageError if the store does not answer; the next call sends the rest. `meanwhile` is called before
        each file and between segments: there may be much to send."""
        for name in self._sent:
            meanwhile()
            while self._send_some(name):
                meanwhile()

    def _send_some(self, name: str) -> bool:
        number, content = self._segments[name]
        with contextlib.suppress(FileNotFoundError), (self._directory / name).open("rb") as file:
            file.seek(self._sent[name])
            new = file.read(SEGMENT - len(content))
            if new:
                self._objects.put(f"{FOLDER}/{name}/{self._stream}-{number:06}", content + new)
                self._sent[name] += len(new)
                full = len(content) + len(new) == SEGMENT
                self._segments[name] = (number + 1, b"") if full else (number, content + new)
                return full
        return False


def send_report(objects: Objects, directory: Path) -> None:
    for name in REPORT:
        objects.put(f"cluster/{name}", (directory / name).read_bytes())


def is_sent(objects: Objects) -> bool:
    """Whether the report is in the store."""
    return objects.head(f"cluster/{REPORT[-1]}") is not None


def bring(objects: Objects, directory: Path) -> None:
    """Append what was sent since the last call to the files of `directory`, and copy the report if there is one. If
    another process does so now, it returns at once."""
    with _one_at_a_time(directory) as brought:
        if brought is None:
            return
        own = (directory / SENT).read_text().split() if (directory / SENT).exists() else ()
        for key in sorted(objects.list(FOLDER)):
            found, have = _KEY.fullmatch(key), brought.get(key, 0)
            if found is None or found[2] in own or have >= SEGMENT:
                continue
            size = objects.head(key) or 0
            if size <= have:
                continue
            _append(
                directory / found[1],
                objects.get_range(key, have, size - have),
                fresh=have == 0 and key.endswith("-000000"),
            )
            brought[key] = size
        for name in REPORT:
            size = objects.head(f"cluster/{name}") or 0
            if size and size != _size(directory / name):
                with contextlib.suppress(ObjectMissing):
                    _replace(directory / name, objects.get(f"cluster/{name}"))


@contextlib.contextmanager
def _one_at_a_time(directory: Path) -> Iterator[dict[str, int] | None]:
    """Bytes brought so far, by key; written back at the end. None if another process has them."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "brought.json"
    with (directory / "brought.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        brought: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        before = dict(brought)
        try:
            yield brought
        finally:
            if brought != before:
                _replace(path, json.dumps(brought).encode())


def _append(path: Path, data: bytes, *, fresh: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        if fresh and size:  # another process wrote before: its last line may have been cut short
            file.seek(size - 1)
            data = data if file.read(1) == b"\n" else b"\n" + data
        file.write(data)


def _replace(path: Path, data: bytes) -> None:
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    draft.write_bytes(data)
    os.replace(draft, path)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
