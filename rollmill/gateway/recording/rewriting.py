"""Rewrites the gateway's log without dead entries, while answers go on being recorded.

    living entries ─► what was written meanwhile, until little is left ─► the log's thread: the rest, one rename

Only the last step keeps answers waiting. The others have a thread of their own: with 20,000 open sessions they take
more than a second.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

_CHUNK = 1 << 20  # bytes that are copied before the disk has them: entries that are written share it
_PAUSE_S = 0.1
_LITTLE = 64  # entries that the log's thread copies


class Place(NamedTuple):
    """Where an entry is in the file. `closes`: all entries of its session are dead now."""

    session: str
    begin: int
    end: int
    closes: bool


class Places:
    """Which parts of a file belong to which open session, in the order of its entries."""

    def __init__(self) -> None:
        self.extents: dict[str, list[tuple[int, int]]] = {}
        self.living = 0  # bytes of them: a sum of all after each write would take longer than the write

    def add(self, place: Place) -> None:
        if place.closes:
            self.living -= sum(end - begin for begin, end in self.extents.pop(place.session, ()))
        else:
            self.extents.setdefault(place.session, []).append((place.begin, place.end))
            self.living += place.end - place.begin


class Rewriting:
    """Of one file, once. `add`, `finish` and `cancel` are called by the log's thread."""

    def __init__(
        self, source: int, places: Places, size: int, target: Path, moving: threading.Lock, ended: Callable[[], None]
    ) -> None:
        """`moving` is held while `places` change. `ended` is called once, when `finish` can be."""
        self._source, self._old, self._old_size = source, places, size
        self._target, self._moving, self._ended = target, moving, ended
        self._since: list[Place] = []  # in the old file, behind `size`
        self._failure: OSError | None = None
        self._stopped = False
        self._synced = 0
        self.ready = False
        self.places, self.size = Places(), 0
        self.file = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._thread = threading.Thread(target=self._run, name="rewriting", daemon=True)
        self._thread.start()

    def add(self, place: Place) -> None:
        """An entry was written to the old file. The caller holds `moving`."""
        self._since.append(place)

    def finish(self, path: Path) -> None:
        """Replaces the old file, at `path`. Raises OSError; the old file is still complete then."""
        if self._failure is not None:
            raise self._failure
        self._copy_entries(self._since)
        os.fsync(self.file)
        os.replace(self._target, path)

    def drop_old(self, is_read: Callable[[int], bool]) -> None:
        """Frees the old file and its places, in a thread. `is_read`: whether this process reads the file."""
        threading.Thread(target=self._drop_old, args=(is_read,), name="rewriting", daemon=True).start()

    def wait(self) -> None:
        """Returns when it is ready."""
        self._thread.join()

    def cancel(self) -> None:
        self._stopped = True
        self._thread.join()
        os.close(self.file)
        self._target.unlink(missing_ok=True)

    def _drop_old(self, is_read: Callable[[int], bool]) -> None:
        while self._old.extents:  # one by one: many objects that are freed together keep the interpreter
            self._old.extents.popitem()
        while is_read(self._source):
            time.sleep(_PAUSE_S)
        left = 0 if _is_open_elsewhere(self._source) else os.fstat(self._source).st_size
        while left > 0:  # freed together, 400 MB keep the file system from writing for 0.3 s
            started = time.monotonic()
            left = max(0, left - 4 * _CHUNK)
            os.ftruncate(self._source, left)
            os.fsync(self._source)
            _pause_since(started)
        os.close(self._source)

    def _run(self) -> None:
        try:
            self._copy_sessions()
            while len(self._since) > _LITTLE and not self._stopped:
                with self._moving:
                    since, self._since = self._since, []
                self._copy_entries(since)
            os.fsync(self.file)
        except OSError as failure:
            self._failure = failure
        self.ready = True
        self._ended()

    def _copy_sessions(self) -> None:
        """In the order in which they began. The entries of a session lie side by side then."""
        with self._moving:
            sessions = list(self._old.extents)
        for session in sessions:
            if self._stopped:
                return
            with self._moving:
                extents = [each for each in self._old.extents.get(session, ()) if each[0] < self._old_size]
            at = self.size
            for begin, end in extents:
                self._copy(begin, end)
            if extents:
                self.places.add(Place(session, at, self.size, closes=False))

    def _copy_entries(self, since: Iterable[Place]) -> None:
        for session, begin, end, closes in since:
            if closes and session not in self.places.extents:
                continue
            at = self.size
            self._copy(begin, end)
            self.places.add(Place(session, at, self.size, closes))

    def _copy(self, begin: int, end: int) -> None:
        while begin < end and not self._stopped:
            data = os.pread(self._source, min(_CHUNK, end - begin), begin)
            written = os.pwrite(self.file, data, self.size)
            begin, self.size = begin + written, self.size + written
            if self.size - self._synced >= _CHUNK:
                started = time.monotonic()
                os.fsync(self.file)
                self._synced = self.size
                _pause_since(started)


def _is_open_elsewhere(file: int) -> bool:
    """Whether others have opened a file by its name (`rollmill sessions`), or that cannot be known."""
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)  # given to who alone has the file open
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except (AttributeError, OSError):
        return True
    return False


def _pause_since(started: float) -> None:
    """Half of the time the disk is free for others."""
    time.sleep(min(time.monotonic() - started, _PAUSE_S))
