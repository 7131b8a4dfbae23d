"""Parallel requests: they fill a long, fast link, where one connection would wait for round trips.

Reading: each range is cut into pieces that are fetched in parallel and retried one by one, so a broken link costs the
pieces in flight and not the object. Writing: objects are uploaded while the next ones are made. Both hold a bounded
number of bytes.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from rollmill.backoff import Backoff
from rollmill.errors import ObjectExists, ObjectMissing, ObjectTruncated, StorageError
from rollmill.storage.objects import Objects

THREADS = 16  # requests at a time: a link of 200 Mbit/s and 120 ms holds 3 MB, and small objects must fill it too
PIECE_BYTES = 8 << 20
_SMALL_PIECE_BYTES, _LEAST_PIECE_BYTES = 512 << 10, 128 << 10
BYTES_IN_FLIGHT = 128 << 20
# Stores have already retried before this. These retries are for a link that is down for longer.
_RETRIES = 2
_PAUSE_SECONDS = 0.2, 1.0  # before the first retry, and the longest

_Result = TypeVar("_Result")


class Range(NamedTuple):
    key: str
    start: int
    length: int


def read_ranges(
    objects: Objects,
    ranges: Iterable[tuple[str, int, int]],
    threads: int = THREADS,
    piece_bytes: int = PIECE_BYTES,
    bytes_in_flight: int = BYTES_IN_FLIGHT,
) -> Generator[bytes, None, None]:
    """Yield the bytes of each (key, start, length), in order, reading at most `bytes_in_flight` ahead.

    Raises what `Objects.get_range` raises, at the range that cannot be read; the ranges before it have been yielded.
    """
    pieces = _pieces(ranges, piece_bytes, threads)
    ahead: collections.deque[tuple[Future[bytes], int, bool]] = collections.deque()
    given_up = threading.Event()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="read-ranges")
    flying = 0
    parts: list[bytes] = []
    try:
        more = True
        while True:
            while more and (flying < bytes_in_flight or not ahead):
                piece, last = next(pieces, (None, False))
                if piece is None:
                    more = False
                    break
                ahead.append((pool.submit(_read_piece, objects, piece, given_up), piece.length, last))
                flying += piece.length
            if not ahead:
                return
            future, length, last = ahead.popleft()
            parts.append(future.result())
            flying -= length
            if last:
                data = parts[0] if len(parts) == 1 else b"".join(parts)
                parts = []
                yield data
    finally:
        given_up.set()
        pool.shutdown(wait=False, cancel_futures=True)  # a request that hangs must not block the caller


def _pieces(ranges: Iterable[tuple[str, int, int]], piece_bytes: int, threads: int) -> Iterator[tuple[Range, bool]]:
    """Cut the ranges into pieces: enough for all threads, and not tiny. Yields each with whether it ends its range.

    The first requests start together. With equal sizes they would also end together, and the caller would have nothing
    to work on until then. So each of them asks for more than the one before.
    """
    number = 0
    for key, start, length in ranges:
        usual = min(piece_bytes, max(-(-length // threads), _SMALL_PIECE_BYTES))
        least = min(usual, _LEAST_PIECE_BYTES)
        end = start + length
        while True:
            number += 1
            size = max(usual * min(number, threads) // threads, least)
            if end - start - size < least:
                size = end - start
            yield Range(key, start, size), start + size == end
            start += size
            if start == end:
                break


def _read_piece(objects: Objects, piece: Range, given_up: threading.Event) -> bytes:
    return _patiently(lambda: objects.get_range(*piece), given_up)


def _patiently(call: Callable[[], _Result], given_up: threading.Event) -> _Result:
    """Retry a call that the store did not answer, until the caller has given up."""
    backoff = Backoff(*_PAUSE_SECONDS, factor=5.0)
    while True:
        try:
            return call()
        except (ObjectMissing, ObjectTruncated):
            raise  # the store did answer, and would answer the same again
        except StorageError:
            if backoff.failures == _RETRIES or given_up.wait(backoff.failed()):
                raise


def sizes_of(objects: Objects, keys: Sequence[str]) -> list[int | None]:
    """The size of each object, in the order of the keys; None where there is none."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="sizes") as pool:
        return list(pool.map(objects.head, keys))


class Uploads:
    """Writes objects in threads while the caller makes the next ones.

        with Uploads(objects) as uploads:
            uploads.create(key, data)     # returns at once while few bytes are under way
                                          # the end of the block waits for all of them, and raises the first error

    For objects whose key names their content: an object that exists counts as written, and a failed write can be
    retried.
    """

    def __init__(self, objects: Objects, threads: int = THREADS, bytes_in_flight: int = BYTES_IN_FLIGHT) -> None:
        self._objects, self._limit = objects, bytes_in_flight
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="uploads")
        self._given_up = threading.Event()
        self._changed = threading.Condition()
        self._objects_left = self._bytes_left = 0
        self._error: Exception | None = None

    def create(self, key: str, data: bytes) -> None:
        """Start a write; waits while too many bytes are in flight. Raises the error of an earlier write."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._objects_left or self._fits(data))
            self._raise_error()
            self._objects_left += 1
            self._bytes_left += len(data)
        self._pool.submit(self._write, key, data)

    def join(self) -> None:
        """Wait until everything is written; raises the first error."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._objects_left)
            self._raise_error()

    def close(self) -> None:
        try:
            self.join()
        finally:
            self._stop()

    def __enter__(self) -> Uploads:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._stop()

    def _stop(self) -> None:
        self._given_up.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _fits(self, data: bytes) -> bool:
        return self._bytes_left + len(data) <= self._limit

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self, key: str, data: bytes) -> None:
        failure: Exception | None = None
        try:
            _patiently(lambda: write_named(self._objects, key, data), self._given_up)
        except Exception as error:
            failure = error  # the caller's thread raises it
        with self._changed:
            self._objects_left -= 1
            self._bytes_left -= len(data)
            self._error = self._error or failure
            self._changed.notify_all()


def write_named(objects: Objects, key: str, data: bytes) -> None:
    """Write an object whose key names its content. An object of another size is damaged, and is overwritten."""
    try:
        objects.create(key, data)
    except ObjectExists:
        if objects.head(key) != len(data):
            objects.put(key, data)
