"""How long the requests of a session wait for an engine. The clock of an episode stands still meanwhile.

A request waits from its arrival to its first token, and again from the loss of its engine to the next token. An answer
that comes whole has no first token that the gateway could see: it counts as waiting until it is there, and then only
the time that its engine did not work on it. Time in which several requests wait counts once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from rollmill.inference.engine import GenerateChunk

_Spell = tuple[float, float]  # a request waited from … to …, by the monotonic clock


class Waits:
    """The waits of one session."""

    def __init__(self) -> None:
        self._settled = 0.0  # seconds before the oldest request in flight
        self._spells: list[_Spell] = []
        self._requests: set[Wait] = set()
        self.kept = 0.0  # seconds that the log knows of

    def begin(self) -> Wait:
        """A request has arrived: it waits."""
        request = Wait(self)
        self._requests.add(request)
        return request

    def seconds(self) -> float:
        """All waits so far, those that last included."""
        now = time.monotonic()
        lasting = [(request.since, now) for request in self._requests if request.since is not None]
        return self._settled + _covered([*self._spells, *lasting])

    def restore(self, seconds: float) -> None:
        """What the log knows. The client itself counts the time in which it could not reach the gateway."""
        self._settled = self.kept = seconds

    def add(self, spell: _Spell) -> None:
        self._spells.append(spell)

    def remove(self, request: Wait) -> None:
        self._requests.discard(request)
        if not self._requests:
            self._settled += _covered(self._spells)
            self._spells = []


class Wait:
    """The waits of one request."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self.since: float | None = time.monotonic()

    def lost(self) -> None:
        """Its engine is lost: it waits for another one."""
        if self.since is None:
            self.since = time.monotonic()

    def hear(self, chunk: GenerateChunk) -> None:
        """A chunk has come. The first one ends the wait, unless the engine gives the request up."""
        if chunk.finish == "abort" and not chunk.tokens:
            return
        if self.since is None:
            if requeued := chunk.timing.get("requeue_seconds"):  # the engine took its place away
                now = time.monotonic()
                self._waits.add((now - requeued, now))
            return
        now = time.monotonic()
        elapsed = now - self.since
        if chunk.finish is not None:  # the whole answer
            worked = chunk.timing.get("total_seconds", elapsed) - chunk.timing.get("queue_seconds", 0.0)
            elapsed = min(max(elapsed - worked, 0.0), elapsed)
        self._waits.add((self.since, self.since + elapsed))
        self.since = None

    def end(self) -> None:
        """No more chunks come. A request that got none has waited all the time."""
        if self.since is not None:
            self._waits.add((self.since, time.monotonic()))
            self.since = None
        self._waits.remove(self)


def _covered(spells: Iterable[_Spell]) -> float:
    """Seconds that are in at least one spell."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spells):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
