"""One address for Prometheus per run: figures of training beside those of every gateway and engine, at /metrics.

    rollmill_training_reward_mean{run="demo",stage="rl"} 0.75          the newest figures of each stage, by event
    rollmill_eval_rate{run="demo",split="heldout",mode="sampled"} 0.5  the newest evaluation
    rollmill_weights_version{run="demo",line="rl"} 12                  the newest version of each line
    rollmill_role_up{run="demo",role="engine-home"} 1                  whether the role answered this request
    rollmill_engine_running{run="demo",role="engine-home",…} 3         what the role said itself

Gateways and engines have ports of their own, which change. They are asked when Prometheus asks.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from pydantic import Field

from rollmill.config import Config
from rollmill.errors import ConfigError
from rollmill.histogram import TEXT_TYPE, exposition
from rollmill.runs.sink import Scalar, Sink

if TYPE_CHECKING:
    from rollmill.runs.run import RunDirectory

PATIENCE_S = 3.0  # for a role to answer; Prometheus waits ten seconds by default
MOST_BYTES = 1 << 24
Families = dict[str, Metric]  # by name


class PrometheusSettings(Config):
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0: every address of this machine.")
    port: int = Field(9464, ge=0, le=65535, description="Port to listen on. 0: any free one.")


class Prometheus(Sink):
    def __init__(self, config: PrometheusSettings) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._figures: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}  # (metric, labels) → newest value
        self._directory, self._name = Path(), ""
        self._server: ThreadingHTTPServer | None = None

    def open(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        handler = type("Handler", (_Handler,), {"render": staticmethod(self.render)})
        try:
            self._server = ThreadingHTTPServer((self._config.host, self._config.port), handler)
        except OSError as error:
            where = f"{self._config.host}:{self._config.port}"
            raise ConfigError(
                f"no metrics at {where}: {error.strerror}",
                hint="give each run on this host another `port` in [[sinks]]",
            ) from None
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.server_address[1])

    def write(self, scalars: Sequence[Scalar]) -> None:
        with self._lock:
            for scalar in scalars:
                for metric, labels, value in _metrics_of(scalar):
                    self._figures[metric, tuple({"run": self._name, **labels}.items())] = value

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def render(self) -> bytes:
        """All metrics as Prometheus text."""
        from rollmill.runs.run import RunDirectory

        families: Families = {}
        with self._lock:
            figures = sorted(self._figures.items())
        for (metric, labels), value in figures:
            _add(families, metric, dict(labels), value)
        run = RunDirectory.open(self._directory)
        roles = [*run.config.gateways, *(spec.role for spec in run.config.engine_specs)]
        with ThreadPoolExecutor(len(roles)) as pool:
            for role, found in zip(roles, pool.map(lambda role: _ask(run, role), roles), strict=True):
                own = {"run": self._name, "role": role}
                _add(families, "rollmill_role_up", own, found is not None)
                for family in found or ():
                    known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                    for sample in family.samples:
                        known.add_sample(sample.name, {**sample.labels, **own}, sample.value)
        return exposition(families.values())


class _Handler(BaseHTTPRequestHandler):
    @staticmethod
    def render() -> bytes:
        raise NotImplementedError

    def do_GET(self) -> None:
        found = self.path.partition("?")[0] == "/metrics"
        body = self.render() if found else b"the metrics are at /metrics\n"
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", TEXT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: it is asked all the time."""


def _metrics_of(scalar: Scalar) -> Iterable[tuple[str, Mapping[str, str], float]]:
    """A figure as metrics: name, labels, value. Its tag is GROUP/FIGURE."""
    group, _, figure = scalar.tag.rpartition("/")
    kind, _, rest = group.partition("/")
    name = re.sub(r"\W", "_", figure)
    if kind == "eval":
        split, _, mode = rest.rpartition("/")
        yield f"rollmill_eval_{name}", {"split": split, "mode": mode}, scalar.value
        yield "rollmill_eval_version", {"split": split, "mode": mode}, scalar.step
    elif kind == "weights":
        yield f"rollmill_weights_{name}", {"line": rest}, scalar.value
        yield "rollmill_weights_version", {"line": rest}, scalar.step
    elif rest == "heldout_loss":
        yield "rollmill_training_heldout_loss", {"stage": kind, "source": figure}, scalar.value
    else:
        yield f"rollmill_training_{name}", {"stage": group}, scalar.value
        yield "rollmill_training_step", {"stage": group}, scalar.step
        yield "rollmill_training_step_time", {"stage": group}, scalar.at


def _ask(run: RunDirectory, role: str) -> list[Metric] | None:
    """What a role says about itself; None if it does not answer."""
    from rollmill.runs.trust import ask

    try:
        status, body = ask(run, f"{run.url(role)}/metrics", PATIENCE_S, MOST_BYTES)
        return list(text_string_to_metric_families(body.decode("utf-8", "replace"))) if status == 200 else None
    except (OSError, KeyError, ValueError):
        return None


def _add(families: Families, name: str, labels: Mapping[str, str], value: float) -> None:
    families.setdefault(name, Metric(name, name, "gauge")).add_sample(name, dict(labels), value)
