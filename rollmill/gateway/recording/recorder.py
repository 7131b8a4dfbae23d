"""The gateway's local log of open sessions: append-only, written to disk before an answer is sent.

One thread writes. It gets all entries of one turn of the event loop at once. While it waits for the disk, further
entries queue up and share the next fsync, so the cost of durability does not grow with the number of sessions. A
session is removed from the log when it is sealed. When most of the file is such dead entries, the live ones are copied
to a new file, which replaces the old one in one rename (see rewriting.py).

A disk can hang. An `append` with `wait_s` gives up after that time, counted from when the disk stopped answering: while
it hangs, later appends do not wait again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rollmill.errors import GatewayError, StorageError
from rollmill.gateway.recording.entries import LogEntry, encode_entry, find_whole_entry, scan_entries
from rollmill.gateway.recording.rewriting import Place, Places, Rewriting

log = logging.getLogger(__name__)
LOG_NAME = "sessions.log"
_HANGS_AFTER_S = 5.0
_CLOSE_S = 5.0  # how long a stopping gateway waits for its disk


@dataclass
class _Write:
    """One append that waits for the disk. A caller that stops waiting cancels `done`."""

    session: str
    data: bytes
    closes: bool
    erases: bool
    done: asyncio.Future[None]


class Recorder:
    """`append` returns when the entry is on disk, or raises StorageError and leaves the log unchanged."""

    def __init__(self, directory: Path, *, compact_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._path = directory / LOG_NAME
        self._compact_bytes = compact_bytes
        self._lock_file = _lock(directory / "lock")
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._path.with_suffix(".new").unlink(missing_ok=True)  # of a process that died
        _sync_directory(directory)
        self._size = 0
        self._places = Places()
        self._moving = threading.Lock()  # while file, size and places change
        self._readers: Counter[int] = Counter()  # of a file: it is not freed before
        self._rewriting: Rewriting | None = None
        self._rewrite_from = compact_bytes  # size of a file that is worth it
        self._erasures: list[_Write] = []  # wait for the next rewriting
        self._erasing: list[_Write] = []  # wait for this one
        self._gathered: list[_Write] = []  # of this turn of the event loop
        self._queue: queue.SimpleQueue[list[_Write] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: str | None = None  # why the last write failed; None after one succeeds
        self._busy_since: float | None = None  # when the thread began to wait for the disk
        self.fsyncs = 0

    def replay(self) -> Iterator[LogEntry]:
        """The entries of sessions that were never closed, in the order of the file.

        An entry that a crash cut short is dropped. Reads one entry at a time: a log may be larger than memory.
        """
        for begin, end, entry in scan_entries(self._file):
            self._size = end
            self._places.add(Place(entry.session, begin, end, closes=entry.op == "close"))
        if self._size < os.fstat(self._file).st_size:
            self._drop_tail(self._path.read_bytes())
        living = {begin for extents in self._places.extents.values() for begin, _ in extents}
        return (entry for begin, _, entry in scan_entries(self._file) if begin in living)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str | None:
        """The fault of the log's disk; None if there is none."""
        waited = self._waited_s()
        if waited > _HANGS_AFTER_S:
            return f"cannot write {self._path}: the disk has not answered for {waited:.0f} s"
        return self._failure

    @property
    def living_bytes(self) -> int:
        """Of the entries of open sessions."""
        return self._places.living

    async def append(self, session: str, data: bytes, *, wait_s: float | None = None) -> None:
        """Returns when `data` is on disk. With `wait_s`: raises StorageError if the disk takes longer."""
        write = self._enqueue(session, data, closes=False)
        if wait_s is None:
            await write.done
            return
        late = False

        def give_up() -> None:
            nonlocal late
            late = write.done.cancel()

        # a timer of our own: `asyncio.timeout` costs several times as much, and every answer needs one
        timer = asyncio.get_running_loop().call_later(max(0.0, wait_s - self._waited_s()), give_up)
        try:
            await write.done
        except asyncio.CancelledError:
            if not late:
                raise
            write.data = b""  # while the disk hangs, only the queue holds the entry
            raise StorageError(
                f"{self._path}: the disk did not answer within {wait_s:g} s", hint="check the disk"
            ) from None
        finally:
            timer.cancel()

    def append_later(self, session: str, data: bytes) -> None:
        """Queue an entry without waiting. If the write fails, the caller is not told."""
        self._enqueue(session, data, closes=False).done.add_done_callback(asyncio.Future.exception)

    @contextlib.contextmanager
    def located(self, session: str) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """The file of the log, and the (begin, end) of a session's entries in it. The log may be rewritten then."""
        with self._moving:
            source, file, extents = self._file, os.dup(self._file), list(self._places.extents.get(session, ()))
            self._readers[source] += 1
        try:
            yield file, extents
        finally:
            os.close(file)
            with self._moving:
                self._readers[source] -= 1

    async def forget(self, session: str) -> None:
        """Mark the entries of a session as dead: it is sealed or given up."""
        await self._enqueue(session, encode_entry("close", session, {}), closes=True).done

    async def erase(self) -> None:
        """Returns when the entries of forgotten sessions are no longer in the file. Raises StorageError if it cannot be
        rewritten."""
        await self._enqueue("", b"", closes=False, erases=True).done

    def close(self) -> None:
        if self._thread is not None:
            self._hand_over()
            self._queue.put(None)
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                log.error("%s", self.problem)  # the thread still uses the files, so they stay open
                return
        os.close(self._file)
        os.close(self._lock_file)

    def _enqueue(self, session: str, data: bytes, *, closes: bool, erases: bool = False) -> _Write:
        loop = asyncio.get_running_loop()
        write = _Write(session, data, closes, erases, loop.create_future())
        if not self._gathered:
            loop.call_soon(self._hand_over)
        self._gathered.append(write)
        return write

    def _hand_over(self) -> None:
        """Gives the thread what was gathered: it wakes up once, not once per entry."""
        gathered, self._gathered = self._gathered, []
        if gathered:
            self._queue.put(gathered)

    def _waited_s(self) -> float:
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            writes = [write for write in batch if not write.erases]
            self._erasures += [write for write in batch if write.erases]
            self._busy_since = time.monotonic()
            _finish(writes, self._attempt(functools.partial(self._write, writes)))
            self._rewrite()
            self._busy_since = None
        while self._rewriting is not None and self._erasing:
            self._rewriting.wait()
            self._rewrite()
        if self._rewriting is not None:
            self._rewriting.cancel()

    def _attempt(self, work: Callable[[], None]) -> StorageError | None:
        try:
            work()
            self._failure = None
            return None
        except OSError as failure:
            error = self._fault(failure)
            self._failure = error.message
            return error

    def _fault(self, failure: OSError) -> StorageError:
        message = f"cannot write {self._path}: {failure.strerror or failure}"
        return StorageError(message, hint="free disk space, or move the run to a disk that has some")

    def _next_batch(self) -> list[_Write] | None:
        """All queued writes whose callers still wait, none when a rewriting is ready; None at the end."""
        while True:
            taken = [self._queue.get()]
            while taken[-1] is not None and not self._queue.empty():  # nobody else takes from it
                taken.append(self._queue.get())
            batch = [write for writes in taken if writes is not None for write in writes if not write.done.cancelled()]
            if taken[-1] is None:
                self._queue.put(None)  # for the next call
                return batch or None
            if batch or (self._rewriting is not None and self._rewriting.ready):
                return batch

    def _write(self, batch: list[_Write]) -> None:
        if not batch:
            return
        data = [write.data for write in batch]  # read once: a caller that stops waiting clears it
        try:
            write_through(self._file, b"".join(data), self._size)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self.fsyncs += 1
        with self._moving:
            for write, written in zip(batch, data, strict=True):
                begin, self._size = self._size, self._size + len(written)
                place = Place(write.session, begin, self._size, write.closes)
                self._places.add(place)
                if self._rewriting is not None:
                    self._rewriting.add(place)

    def _rewrite(self) -> None:
        """Ends a rewriting that is ready, and begins one that is worth it or that somebody waits for."""
        if self._rewriting is not None and self._rewriting.ready:
            rewriting, self._rewriting = self._rewriting, None
            error = self._try_rewriting(functools.partial(self._replace, rewriting))
            if self._file != rewriting.file:
                rewriting.cancel()
            _finish(self._erasing, error)
            self._erasing = []
        worth = self._size > self._rewrite_from and self._places.living * 2 <= self._size
        if self._rewriting is None and (worth or self._erasures):
            self._erasing, self._erasures = self._erasures, []
            error = self._try_rewriting(self._begin_rewriting)
            if error is not None:
                _finish(self._erasing, error)

    def _try_rewriting(self, work: Callable[[], None]) -> StorageError | None:
        """If it fails, the log goes on in the file that it has, and this is tried again when that is larger."""
        try:
            work()
            self._rewrite_from = self._compact_bytes
            return None
        except OSError as failure:
            self._rewrite_from = self._size + self._compact_bytes
            log.warning("cannot rewrite %s: %s", self._path, failure.strerror or failure)
            return self._fault(failure)

    def _begin_rewriting(self) -> None:
        target, ended = self._path.with_suffix(".new"), functools.partial(self._queue.put, [])
        self._rewriting = Rewriting(self._file, self._places, self._size, target, self._moving, ended)

    def _replace(self, new: Rewriting) -> None:
        new.finish(self._path)
        with self._moving:
            self._file, self._size, self._places = new.file, new.size, new.places
        _sync_directory(self.directory)  # first: after a power cut the name may still be of the old file
        new.drop_old(lambda file: self._readers[file] > 0)

    def _drop_tail(self, data: bytes) -> None:
        """Removes what follows the last whole entry: an interrupted write. If good entries follow it, the file is
        damaged, and a copy is kept."""
        if find_whole_entry(data, self._size) is not None:
            aside = self._path.with_suffix(".damaged")
            aside.write_bytes(data)
            log.error("%s is damaged at byte %d; what follows is kept in %s", self._path, self._size, aside)
        os.ftruncate(self._file, self._size)
        os.fsync(self._file)


def write_through(file: int, data: bytes, at: int) -> None:
    """Returns when the data is on disk, and so is the size of the file. The only call that answers wait for.

    One system call, where there is one: between a write and an fsync this thread would wait for the interpreter.
    """
    try:
        _write_all(file, data, at, os.RWF_DSYNC)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
        _write_all(file, data, at)
        sync(file)


def sync(file: int) -> None:
    os.fsync(file)


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


def _write_all(file: int, data: bytes, at: int, flags: int = 0) -> None:
    view = memoryview(data)
    while view:
        written = os.pwritev(file, [view], at, flags) if flags else os.pwrite(file, view, at)
        view, at = view[written:], at + written


def _sync_directory(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _finish(batch: list[_Write], error: StorageError | None) -> None:
    """Wake every waiting caller, with one call into the event loop."""

    def wake() -> None:
        for write in batch:
            if write.done.done():
                continue
            if error is None:
                write.done.set_result(None)
            else:
                write.done.set_exception(error)

    if not batch:
        return
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
        batch[0].done.get_loop().call_soon_threadsafe(wake)
