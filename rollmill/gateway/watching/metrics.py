"""Counters, gauges and histograms of the gateway, as Prometheus text at /metrics."""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence

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
    "ignored_fields_total": "fields of requests that were accepted without effect {field, dialect}",
    "dropped_tools_total": "tools of requests that only a server could run, and that were left out {tool, dialect}",
    "ambiguous_histories_total": "requests that could continue several conversations, and began a new one",
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
    "engine_lent": "1 while production lends the engine to training, else 0 {url}",
    "engine_failures_total": "requests that failed on the engine {url}",
}
Labels = tuple[tuple[str, str | int], ...]


class Metrics:
    def __init__(self) -> None:
        # by name and labels; the text of labels is made when somebody reads it, not with every request
        self._counts: defaultdict[tuple[str, Labels], float] = defaultdict(int)
        self._histograms: defaultdict[tuple[str, Labels], Histogram] = defaultdict(Histogram)

    def count(self, name: str, amount: float = 1, **labels: str | int) -> None:
        self._counts[name, tuple(labels.items())] += amount

    def observe(self, name: str, seconds: float, labels: Labels) -> None:
        self._histograms[name, labels].add(seconds)

    def merge(self, name: str, histogram: Histogram, labels: Labels) -> None:
        """Adds all that `histogram` has counted."""
        self._histograms[name, labels].merge(histogram)

    def render(self, gauges: Mapping[str, float]) -> str:
        lines: list[str] = []
        described = ""
        counts = {f"{name}{{{_listed(labels)}}}" if labels else name: v for (name, labels), v in self._counts.items()}
        samples = {sample: [f"{sample} {value}"] for sample, value in {**counts, **gauges}.items()}
        for (name, labels), histogram in self._histograms.items():
            text = _listed(labels)
            samples[f"{name}{{{text}}}"] = histogram.lines(name, text)
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


def added(texts: Sequence[str]) -> str:
    """Several texts of `render` as one: values of the same name and labels are added; of `engine_alive` and
    `engine_lent` the largest is taken."""
    if len(texts) == 1:
        return texts[0]
    about: dict[str, list[str]] = {}  # name -> HELP and TYPE
    values: dict[str, dict[str, float]] = {}  # name -> sample -> value
    for text in texts:
        name = ""
        for line in text.splitlines():
            if line.startswith("#"):
                name = line.split(" ", 3)[2]
                about.setdefault(name, [])
                about[name] += [line] if line not in about[name] else []
                continue
            sample, _, value = line.rpartition(" ")
            known = values.setdefault(name, {})
            join = max if name.endswith(("_engine_alive", "_engine_lent")) else operator.add
            known[sample] = join(known[sample], float(value)) if sample in known else float(value)
    lines = [[*about[name], *(f"{sample} {value}" for sample, value in values[name].items())] for name in sorted(about)]
    return "\n".join(itertools.chain.from_iterable(lines)) + "\n"


def kind_of(name: str) -> str:
    return "counter" if name.endswith("_total") else "histogram" if name.endswith("_seconds") else "gauge"


def _listed(labels: Labels) -> str:
    escaped = {key: str(value).replace("\\", r"\\").replace('"', r"\"") for key, value in labels}
    return ",".join(f'{key}="{value}"' for key, value in escaped.items())
