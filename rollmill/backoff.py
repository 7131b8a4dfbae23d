"""Backoff: how long to wait before the next try. The one implementation that everything in this package uses.

Each failure doubles the wait, up to `longest` seconds; a success resets it. It never sleeps: the caller sleeps in a
thread, awaits, waits on an event, or asks `waiting` when it is called again.

    backoff = Backoff(first=0.1, longest=2.0, patience=15.0)
    while True:
        try:
            return ask()
        except ConnectionError:
            pause = backoff.failed()
            if pause > backoff.left():
                raise
            time.sleep(pause)
"""

from __future__ import annotations

import math
import random
import time


class Backoff:
    """`patience` limits the seconds from the start, or the last `reset`, to the last try.

    `jitter` is the share of each pause that is random: with 1.0 a pause is anywhere between 0 and its full length, so
    that several processes that collided do not collide again.
    """

    def __init__(
        self,
        first: float,
        longest: float,
        *,
        patience: float = math.inf,
        factor: float = 2.0,
        jitter: float = 0.0,
    ) -> None:
        self._first, self._longest, self._factor, self._jitter = first, longest, factor, jitter
        self._patience = patience
        self.reset()

    def reset(self) -> None:
        """The last try succeeded, or there is a reason to try again at once."""
        self.failures = 0
        self._pause = min(self._first, self._longest)
        self._due = -math.inf
        self._deadline = time.monotonic() + self._patience

    def failed(self) -> float:
        """Count a failure. Returns the seconds to wait before the next try."""
        pause = self._pause * (1.0 - self._jitter * random.random())
        self._pause = min(self._pause * self._factor, self._longest)
        self.failures += 1
        self._due = time.monotonic() + pause
        return pause

    def excuse(self, seconds: float) -> None:
        """`seconds` of the last try do not count towards `patience`."""
        self._deadline += seconds

    def waiting(self) -> bool:
        """Whether the pause after the last failure is not over yet."""
        return time.monotonic() < self._due

    def left(self) -> float:
        """Seconds of `patience` that are left, 0 if none are."""
        return max(self._deadline - time.monotonic(), 0.0)
