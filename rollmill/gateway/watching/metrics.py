"""Counters, gauges and histograms of the gateway. Its workers share them in files, as prometheus_client does.

A worker has files of its own number, not of its process: one that is started again goes on counting in them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, values
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from rollmill import histogram
from rollmill.histogram import BUCKETS, exposition

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
_OF_ENGINES = ("engine_alive", "engine_lent")
_PREFIX = "rollmill_gateway_"
Labels = tuple[tuple[str, str | int], ...]


class Metrics:
    def __init__(self, worker: int = 0, shared: Path | None = None) -> None:
        """`shared`: the directory of the files that workers share; None if there is one process."""
        self._shared = shared
        if shared is not None:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(shared)
            values.ValueClass = values.MultiProcessValue(lambda: worker)
        disable_created_metrics()
        self._registry = CollectorRegistry()
        self._families = {name: self._family(name) for name in METRICS if name not in _OF_ENGINES}
        self._children: dict[tuple[str, Labels], Any] = {}  # `labels()` takes far longer
        self._followed: dict[Counter, float] = {}

    def count(self, name: str, amount: float = 1, **labels: str | int) -> None:
        self._child(name, tuple(labels.items())).inc(amount)

    def observe(self, name: str, seconds: float, labels: Labels) -> None:
        self._child(name, labels).observe(seconds)

    def merge(self, name: str, counted: histogram.Histogram, labels: Labels) -> None:
        """Adds all that `counted` has counted. `observe` would count one after the other."""
        child = self._child(name, labels)
        child._sum.inc(counted.sum)
        for bucket, count in zip(child._buckets, counted.counts, strict=True):
            if count:
                bucket.inc(count)

    def follow(self, name: str, number: float, **labels: str) -> None:
        """A gauge is this number now. A counter grows by as much as the number did since the last call."""
        child = self._child(name, tuple(labels.items()))
        if isinstance(child, Gauge):
            child.set(number)
        else:
            child.inc(max(0.0, number - self._followed.get(child, 0.0)))
            self._followed[child] = number

    def render(self, engines: Iterable[tuple[str, bool, bool]]) -> bytes:
        """All metrics of all workers as Prometheus text. `engines`: URL, alive, lent; all workers see the same."""
        alive, lent = (GaugeMetricFamily(f"{_PREFIX}{name}", METRICS[name], labels=["url"]) for name in _OF_ENGINES)
        for url, is_alive, is_lent in engines:
            alive.add_metric([url], is_alive)
            lent.add_metric([url], is_lent)
        return exposition([*self._collect(), alive, lent])

    def _collect(self) -> Iterable[Metric]:
        if self._shared is None:
            return self._registry.collect()
        return list(MultiProcessCollector(None, str(self._shared)).collect())

    def _family(self, name: str) -> Counter | Gauge | Histogram:
        labels = re.findall(r"\w+", METRICS[name].partition("{")[2])
        about = f"{_PREFIX}{name}", METRICS[name], labels
        if kind_of(name) == "counter":
            return Counter(*about, registry=self._registry)
        if kind_of(name) == "histogram":
            return Histogram(*about, registry=self._registry, buckets=BUCKETS)
        return Gauge(*about, registry=self._registry, multiprocess_mode="livesum")

    def _child(self, name: str, labels: Labels) -> Any:
        child = self._children.get((name, labels))
        if child is None:
            family = self._families[name]
            child = self._children[name, labels] = family.labels(**dict(labels)) if labels else family
        return child


def kind_of(name: str) -> str:
    return "counter" if name.endswith("_total") else "histogram" if name.endswith("_seconds") else "gauge"
