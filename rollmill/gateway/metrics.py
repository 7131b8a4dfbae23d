"""Counters, gauges and histograms of the gateway, as Prometheus text at /metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from rollmill.histogram import Histogram

# name → meaning, and its labels in braces. Names that end in _total are counters, in _seconds histograms; the others
# are gauges.
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
    "feedback_dropped_total": "early feedback whose session never came, or whose user did not agree {reason}",
    "first_token_seconds": "from the request to its first token {traffic, model, dialect}",
    "between_tokens_seconds": "between two tokens of an answer {traffic, model, dialect}",
    "request_seconds": "from the request to the end of its answer {traffic, model, dialect}",
    "queue_seconds": "a request waited for an engine {traffic, model, dialect}",
    "sessions": "open sessions",
    "waiting": "requests that wait for an engine",
    "log_fsyncs_total": "times the session log was flushed to disk",
    "engine_alive": "1 if the engine answers health checks, else 0 {url}",
    "engine_failures_total": "requests that failed on the engine {url}",
}


class Metrics:
    def __init__(self) -> None:
        self._counts: defaultdict[str, float] = defaultdict(int)
        self._histograms: dict[tuple[str, str], Histogram] = {}

    def count(self, name: str, amount: float = 1, **labels: str | int) -> None:
        if labels:
            name = f"{name}{{{_listed(labels)}}}"
        self._counts[name] += amount

    def observe(self, name: str, seconds: float, labels: Mapping[str, str], *, times: int = 1) -> None:
        key = (name, _listed(labels))
        histogram = self._histograms.get(key)
        if histogram is None:
            histogram = self._histograms[key] = Histogram()
        histogram.add(seconds, times)

    def render(self, gauges: Mapping[str, float]) -> str:
        lines: list[str] = []
        described = ""
        samples = {sample: [f"{sample} {value}"] for sample, value in {**self._counts, **gauges}.items()}
        samples |= {
            f"{name}{{{labels}}}": each.lines(name, labels) for (name, labels), each in self._histograms.items()
        }
        for sample, listed in sorted(samples.items()):
            name = sample.partition("{")[0]
            if name != described:
                lines += [
                    f"# HELP rollmill_gateway_{name} {METRICS.get(name, name)}",
                    f"# TYPE rollmill_gateway_{name} {kind_of(name)}",
                ]
                described = name
            lines += [f"rollmill_gateway_{line}" for line in listed]
        return "\n".join(lines) + "\n"


def kind_of(name: str) -> str:
    return "counter" if name.endswith("_total") else "histogram" if name.endswith("_seconds") else "gauge"


def _listed(labels: Mapping[str, str | int]) -> str:
    escaped = {key: str(value).replace("\\", r"\\").replace('"', r"\"") for key, value in labels.items()}
    return ",".join(f'{key}="{value}"' for key, value in escaped.items())
