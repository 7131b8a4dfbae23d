"""How long the requests of a session wait for an engine. The clock of an episode stands still meanwhile.

A request waits from its arrival to its first token. An answer that comes whole has no first token that the gateway
could see: it counts as waiting until it is there, and then only the time that its engine did not work on it.
"""

from __future__ import annotations

import time

from rollmill.inference.engine import GenerateChunk


class Wait:
    """Of one session, which has one request at a time."""

    def __init__(self) -> None:
        self._settled = 0.0
        self._since: float | None = None  # a request waits since then

    def seconds(self) -> float:
        return self._settled + (0.0 if self._since is None else time.monotonic() - self._since)

    def begin(self) -> None:
        self._since = time.monotonic()

    def hear(self, chunk: GenerateChunk) -> None:
        """A chunk has come: the first one ends the wait."""
        if self._since is None:
            self._settled += chunk.timing.get("requeue_seconds", 0.0)  # the engine took its place away for a while
            return
        elapsed = time.monotonic() - self._since
        if chunk.finish is not None:  # the whole answer
            worked = chunk.timing.get("total_seconds", elapsed) - chunk.timing.get("queue_seconds", 0.0)
            elapsed = min(max(elapsed - worked, 0.0), elapsed)
        self._settled += elapsed
        self._since = None

    def end(self) -> None:
        """No more chunks come. A request that got none has waited all the time."""
        if self._since is not None:
            self._settled, self._since = self.seconds(), None
