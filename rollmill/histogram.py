"""Seconds counted in buckets, and metrics as the text that Prometheus reads."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Adds many equal observations at once, which prometheus_client does one by one: an answer has thousands."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.sum = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += times
        self.sum += seconds * times

    def cumulative(self) -> Sequence[tuple[str, float]]:
        """(upper bound, number of observations up to it) of each bucket."""
        return list(zip([*map(str, BUCKETS), "+Inf"], accumulate(self.counts), strict=True))


def exposition(families: Iterable[object]) -> bytes:
    """Families of prometheus_client as text."""
    from prometheus_client import CollectorRegistry, generate_latest

    class Families:
        def collect(self) -> Iterable[object]:
            return families

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Families())  # type: ignore[arg-type]
    return generate_latest(registry)
