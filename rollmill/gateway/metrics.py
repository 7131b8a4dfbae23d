"""Counters of the gateway, shown as Prometheus text at /metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping


class Metrics:
    def __init__(self) -> None:
        self._counts: defaultdict[str, float] = defaultdict(int)

    def count(self, name: str, amount: float = 1, **labels: str | int) -> None:
        if labels:
            listed = ",".join(f'{key}="{value}"' for key, value in labels.items())
            name = f"{name}{{{listed}}}"
        self._counts[name] += amount

    def render(self, gauges: Mapping[str, float]) -> str:
        lines = [f"rollmill_gateway_{name} {value}" for name, value in sorted({**self._counts, **gauges}.items())]
        return "\n".join(lines) + "\n"
