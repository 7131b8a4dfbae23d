"""A histogram of seconds, as Prometheus text."""

from __future__ import annotations

from bisect import bisect_left

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self.sum = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        self._counts[bisect_left(BUCKETS, seconds)] += times
        self.sum += seconds * times

    def merge(self, other: Histogram) -> None:
        """Adds all that `other` has counted."""
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, other._counts, strict=True)]
        self.sum += other.sum

    def lines(self, name: str, labels: str) -> list[str]:
        lines, total = [], 0
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {total}')
        return [*lines, f"{name}_sum{{{labels}}} {self.sum}", f"{name}_count{{{labels}}} {total}"]
