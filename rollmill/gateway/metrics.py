"""Counters of the gateway, as Prometheus text at /metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

# name → meaning, and its labels in braces. Names that end in _total are counters; the others are gauges.
METRICS = {
    "requests_total": "valid requests that were accepted {traffic}",
    "errors_total": "requests answered with an error {status}",
    "prompt_tokens_total": "prompt tokens of answered requests {traffic}",
    "sampled_tokens_total": "sampled tokens of answered requests {traffic}",
    "answers_repeated_total": "repeated requests that got the recorded answer",
    "answers_cut_short_total": "answers whose client disconnected {traffic}",
    "recording_failures_total": "answers that could not be recorded, or not in time {traffic}",
    "segments_total": "segments begun {cause}",
    "sealed_total": "sessions sealed into trajectories {traffic}",
    "sessions": "open sessions",
    "log_fsyncs_total": "times the session log was flushed to disk",
    "engine_alive": "1 if the engine answers health checks, else 0 {url}",
    "engine_failures_total": "requests that failed on the engine {url}",
}


class Metrics:
    def __init__(self) -> None:
        self._counts: defaultdict[str, float] = defaultdict(int)

    def count(self, name: str, amount: float = 1, **labels: str | int) -> None:
        if labels:
            listed = ",".join(f'{key}="{value}"' for key, value in labels.items())
            name = f"{name}{{{listed}}}"
        self._counts[name] += amount

    def render(self, gauges: Mapping[str, float]) -> str:
        lines: list[str] = []
        described = ""
        for sample, value in sorted({**self._counts, **gauges}.items()):
            name = sample.partition("{")[0]
            if name != described:
                kind = "counter" if name.endswith("_total") else "gauge"
                lines += [
                    f"# HELP rollmill_gateway_{name} {METRICS.get(name, name)}",
                    f"# TYPE rollmill_gateway_{name} {kind}",
                ]
                described = name
            lines.append(f"rollmill_gateway_{sample} {value}")
        return "\n".join(lines) + "\n"
