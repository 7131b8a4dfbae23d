"""A future for one task that waits. The task goes on within `set`, and not in the next turn of the event loop.

A turn costs tens of microseconds, and a request waits for several: for its engine, for the disk. `set` is called by the
event loop itself, from the callback of a socket or of a thread, never from a task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextvars import Context
from typing import Any


class Wake:
    _asyncio_future_blocking = False  # how asyncio knows what a task can wait for

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: tuple[Callable[[Any], object], Context | None] | None = None
        self._error: BaseException | None = None
        self._done = False

    def __await__(self) -> Generator[Wake, None, None]:
        if not self._done:
            self._asyncio_future_blocking = True
            yield self
        self.result()

    def set(self, error: BaseException | None = None) -> None:
        """The task goes on now; if there is an `error`, with it. Only the first call counts."""
        if self._done:
            return
        self._done, self._error = True, error
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            callback, context = waiting
            if context is None:
                callback(self)
            else:
                context.run(callback, self)

    def done(self) -> bool:
        return self._done

    def cancelled(self) -> bool:
        return isinstance(self._error, asyncio.CancelledError)

    # What asyncio asks of a future

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def result(self) -> None:
        if self._error is not None:
            raise self._error

    def add_done_callback(self, callback: Callable[[Any], object], *, context: Context | None = None) -> None:
        assert self._waiting is None and not self._done, "one task waits"
        self._waiting = callback, context

    def cancel(self, msg: Any = None) -> bool:
        """The task that waits is cancelled, by somebody who runs now: it goes on in the next turn."""
        if self._done:
            return False
        self._done, self._error = True, asyncio.CancelledError(*([msg] if msg else ()))
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._loop.call_soon(waiting[0], self, context=waiting[1])
        return True
