"""The gateway's local log of open sessions: append-only, on disk before an answer leaves.

One thread writes. While it waits for the disk, further records queue up and share the next fsync, so the cost of
durability does not grow with the number of sessions. A session leaves the log when it is sealed; once most of the file
is such dead weight, the living records are copied to a new file that takes the old one's place in one rename.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import queue
import threading
from dataclasses import dataclass
from pathlib import Path

from rollmill.errors import GatewayError, StorageError
from rollmill.gateway.records import Record, encode_record, find_whole_record, read_records

log = logging.getLogger(__name__)


@dataclass
class _Entry:
    session: str
    data: bytes
    closes: bool
    done: asyncio.Future[None]


class Recorder:
    """`append` returns once the record is on disk, or raises StorageError and leaves the log as it was."""

    def __init__(self, directory: Path, *, compact_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / "sessions.log"
        self._compact_bytes = compact_bytes
        self._lock_file = _lock(directory / "lock")
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _sync_directory(directory)
        self._size = 0
        self._pieces: dict[str, list[tuple[int, int]]] = {}  # session -> (begin, end) of its records in the file
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.problem: str | None = None  # why the last write failed, until one succeeds
        self.fsyncs = 0

    def replay(self) -> list[Record]:
        """The records of sessions that were never closed, oldest first. What a crash cut short is dropped."""
        data = self._path.read_bytes()
        living: dict[str, list[Record]] = {}
        for begin, end, record in read_records(data):
            self._size = end
            if record.op == "close":
                living.pop(record.session, None)
                self._pieces.pop(record.session, None)
            else:
                living.setdefault(record.session, []).append(record)
                self._pieces.setdefault(record.session, []).append((begin, end))
        if self._size < len(data):
            self._drop_tail(data)
        return [record for records in living.values() for record in records]

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    async def append(self, session: str, data: bytes) -> None:
        await self._enqueue(session, data, closes=False)

    async def forget(self, session: str) -> None:
        """The session is sealed or given up: its records are dead from here on."""
        await self._enqueue(session, encode_record("close", session, {}), closes=True)

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        os.close(self._file)
        os.close(self._lock_file)

    async def _enqueue(self, session: str, data: bytes, *, closes: bool) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put(_Entry(session, data, closes, done))
        await done

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            error: StorageError | None = None
            try:
                self._write(batch)
                self.problem = None
            except OSError as failure:
                self.problem = f"cannot write {self._path}: {failure.strerror or failure}"
                error = StorageError(self.problem, hint="free disk space, or move the run to a disk that has some")
            _finish(batch, error)
            if error is None:
                self._compact_if_worth()

    def _next_batch(self) -> list[_Entry] | None:
        """Everything that is waiting; None at the end, which comes last."""
        batch = [self._queue.get()]
        with contextlib.suppress(queue.Empty):
            while batch[-1] is not None:
                batch.append(self._queue.get_nowait())
        entries = [entry for entry in batch if entry is not None]
        if batch[-1] is None:
            self._queue.put(None)
        return entries or None

    def _write(self, batch: list[_Entry]) -> None:
        try:
            _write_all(self._file, b"".join(entry.data for entry in batch), self._size)
            os.fsync(self._file)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self.fsyncs += 1
        for entry in batch:
            begin, self._size = self._size, self._size + len(entry.data)
            if entry.closes:
                self._pieces.pop(entry.session, None)
            else:
                self._pieces.setdefault(entry.session, []).append((begin, self._size))

    def _compact_if_worth(self) -> None:
        if self._size <= self._compact_bytes:
            return
        living = sum(end - begin for pieces in self._pieces.values() for begin, end in pieces)
        if living * 2 > self._size:
            return
        try:
            self._compact()
        except OSError as failure:  # the old file is still whole, and the next batch tries again
            log.warning("cannot compact %s: %s", self._path, failure.strerror or failure)

    def _compact(self) -> None:
        target = self._path.with_suffix(".new")
        file = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        moved: dict[str, list[tuple[int, int]]] = {}
        at = 0
        try:
            # in the order of the old file: a segment's parent must be replayed before it
            pieces = sorted((begin, end, session) for session, own in self._pieces.items() for begin, end in own)
            for begin, end, session in pieces:
                _write_all(file, os.pread(self._file, end - begin, begin), at)
                moved.setdefault(session, []).append((at, at + end - begin))
                at += end - begin
            os.fsync(file)
            os.replace(target, self._path)
            _sync_directory(self._path.parent)
        except OSError:
            os.close(file)
            raise
        os.close(self._file)
        self._file, self._size, self._pieces = file, at, moved

    def _drop_tail(self, data: bytes) -> None:
        """Behind the last whole record: either the write a crash interrupted, or damage with good records after it."""
        if find_whole_record(data, self._size) is not None:
            aside = self._path.with_suffix(".damaged")
            aside.write_bytes(data)
            log.error("%s is damaged at byte %d; what follows is kept in %s", self._path, self._size, aside)
        os.ftruncate(self._file, self._size)
        os.fsync(self._file)


def _lock(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise GatewayError(
            f"{path.parent} is in use by another gateway",
            status=503,
            hint="stop it, or give this one its own directory",
        ) from None
    return file


def _write_all(file: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written


def _sync_directory(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _finish(batch: list[_Entry], error: StorageError | None) -> None:
    """Wake everyone who waits, with one hop into the event loop."""

    def wake() -> None:
        for entry in batch:
            if entry.done.done():
                continue
            if error is None:
                entry.done.set_result(None)
            else:
                entry.done.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop is gone: nobody waits any more
        batch[0].done.get_loop().call_soon_threadsafe(wake)
