"""What the decode loop did: counters for `/metrics`, and telemetry once per second."""

from __future__ import annotations

import time
from typing import get_args

from rollmill import telemetry
from rollmill.histogram import Histogram
from rollmill.types import FinishReason

REPORT_SECONDS = 1.0
GAP_SECONDS = 0.2  # shorter pauses between steps do not end a busy interval
COUNTERS = (
    "steps_total",
    "computed_tokens_total",
    "sampled_tokens_total",
    "draft_tokens_total",
    "draft_tokens_right_total",
    "applied_total",
    "refused_total",
    *(f"finished_{reason}_total" for reason in get_args(FinishReason)),
)


class Activity:
    """Consecutive steps are one `busy` interval. While there is work, a report is emitted every second."""

    def __init__(self, engine: str, region: str) -> None:
        self._engine, self._region = engine, region
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._started: float | None = None
        self._ended = 0.0
        self._sampled = 0
        self.tokens_per_second = 0.0
        self._first, self._between, self._pauses = Histogram(), Histogram(), Histogram()
        self.histograms = {
            "first_token_seconds": self._first,
            "between_tokens_seconds": self._between,
            "pause_seconds": self._pauses,
        }

    def first_token(self, seconds: float) -> None:
        self._first.add(seconds)

    def step(self, started: float, sampled: int, computed: int, running: int, waiting: int, *, steps: int = 1) -> None:
        """One step, or a burst of `steps`, has ended."""
        self.counters["steps_total"] += steps
        self.counters["sampled_tokens_total"] += sampled
        self.counters["computed_tokens_total"] += computed
        self._sampled += sampled
        now = time.time()
        if self._started is None:
            self._started = started
            self._between.add((now - started) / steps, sampled)
        else:
            self._between.add((now - self._ended) / steps, sampled)
        self._ended = now
        if self._ended - self._started >= REPORT_SECONDS:
            self._report(running, waiting)

    def drafted(self, guessed: int, right: int) -> None:
        self.counters["draft_tokens_total"] += guessed
        self.counters["draft_tokens_right_total"] += right
        self.counters["sampled_tokens_total"] += right
        self._sampled += right

    def rest(self) -> None:
        """Called when nothing was computed for a while."""
        if self._started is not None:
            self._report(0, 0)
        self.tokens_per_second = 0.0

    def finished(self, reason: FinishReason) -> None:
        self.counters[f"finished_{reason}_total"] += 1

    def applied(self, seconds: float) -> None:
        self.counters["applied_total"] += 1
        self._pauses.add(seconds)

    def _report(self, running: int, waiting: int) -> None:
        assert self._started is not None
        start, end = self._started, self._ended
        self.tokens_per_second = self._sampled / max(end - start, 1e-9)
        telemetry.emit("busy", what="decode", start=start, end=end)
        telemetry.emit(
            "engine",
            engine=self._engine,
            region=self._region,
            tokens_per_s=self.tokens_per_second,
            running=running,
            waiting=waiting,
        )
        self._started, self._sampled = None, 0
