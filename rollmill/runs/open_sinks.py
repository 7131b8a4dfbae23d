"""The sinks that a run has, while it is driven or watched (sink.py)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rollmill import telemetry
from rollmill.kinds import build
from rollmill.runs.run import RunDirectory
from rollmill.runs.sink import Sink, scalars_of

POLL_S = 1.0


class Sinks:
    """The sinks of a run. `poll` is called again and again, and never raises. If not `fed`, another process does it."""

    def __init__(self, run: RunDirectory, *, fed: bool = True) -> None:
        self._tail = telemetry.EventTail(run.events)
        self._polled_at = 0.0
        self.problems: list[str] = []  # of sinks that were closed
        self._open: list[tuple[str, Sink]] = []
        for section in run.config.sinks if fed else ():
            with self._guarded(section.kind):
                sink: Sink = build(section)
                sink.open(run.path, run.config.name)
                self._open.append((section.kind, sink))

    def poll(self, *, now: bool = False) -> None:
        if not self._open or (not now and time.monotonic() - self._polled_at < POLL_S):
            return
        self._polled_at = time.monotonic()
        found = [scalar for event in self._tail.poll() for scalar in scalars_of(event)]
        for kind, sink in list(self._open) if found else ():
            with self._guarded(kind):
                sink.write(found)

    def close(self) -> None:
        self.poll(now=True)
        for kind, sink in self._open:
            with self._guarded(kind):
                sink.close()
        self._open = []

    @contextlib.contextmanager
    def _guarded(self, kind: str) -> Iterator[None]:
        """A sink may be code of the user, or of a package that is not there."""
        try:
            yield
        except Exception as error:
            self._open = [each for each in self._open if each[0] != kind]
            self.problems.append(f"the sink {kind!r} is closed: {error}")
            telemetry.emit("warning", text=self.problems[-1])
