"""One piece of work at a time beside the trainer's own: it writes what a step made while the next step runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Background(Generic[Result]):
    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)  # its thread starts with the first work
        self._work: Future[Result] | None = None

    def start(self, work: Callable[[], Result]) -> None:
        """The work before must have been waited for."""
        assert self._work is None
        self._work = self._pool.submit(work)

    def failed(self) -> bool:
        """Whether the work has ended with an error that nobody waited for yet."""
        return self._work is not None and self._work.done() and self._work.exception() is not None

    def wait(self) -> Result | None:
        """Wait for the work that was started. Returns its result or raises its error, once; None if there is none."""
        work, self._work = self._work, None
        return None if work is None else work.result()
