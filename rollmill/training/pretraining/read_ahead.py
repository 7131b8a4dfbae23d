"""Reads what the next step trains on while the current step trains.

    step            n                n + 1            n + 2
    trains          ████████████████ ████████████████ ████████
    reads   n+1 ▓▓▓▓         n+2 ▓▓▓▓         n+3 ▓▓▓▓

What a step reads depends on its number alone. So nothing is saved: a resumed run reads again what was read ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class ReadAhead(Generic[T]):
    """Calls `read(number)` one step ahead of `take(number)`. All reading is done in one thread, so that sources need no
    locks. At most one step is held in memory besides the current one."""

    def __init__(self, read: Callable[[int], T], last: int | None = None) -> None:
        """`last`: the number of the last step; nothing is read beyond it."""
        self._read, self._last = read, last
        self._thread = ThreadPoolExecutor(1, "read-ahead")
        self._next: tuple[int, Future[T]] | None = None

    def take(self, number: int) -> T:
        """What step `number` reads. Raises what `read` raised for it. Then begins to read for the next step."""
        if self._next is None or self._next[0] != number:
            self._next = (number, self._thread.submit(self._read, number))
        future, self._next = self._next[1], None
        found = future.result()
        if self._last is None or number < self._last:
            self._next = (number + 1, self._thread.submit(self._read, number + 1))
        return found

    def call(self, read: Callable[[], U]) -> U:
        """Other reading, in the same thread."""
        return self._thread.submit(read).result()
