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

from pydantic import Field

from rollmill.config import Config
from rollmill.errors import ConfigError
from rollmill.runs.sink import Scalar, Sink

if TYPE_CHECKING:
    from rollmill.runs.run import RunDirectory

PATIENCE_S = 3.0  # for a role to answer; Prometheus waits ten seconds by default
MOST_BYTES = 1 << 24
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
Families = dict[str, list[str]]  # name of a metric → its comment lines and samples, which must be together


class PrometheusSettings(Config):
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0: every address of this machine.")
    port: int = Field(9464, ge=0, le=65535, description="Port to listen on. 0: any free one.")


class Prometheus(Sink):
    def __init__(self, config: PrometheusSettings) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._figures: dict[tuple[str, str], float] = {}  # (metric, labels) → its newest value
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
                    self._figures[metric, _listed({"run": self._name, **labels})] = value

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def render(self) -> str:
        """All metrics as Prometheus text."""
        from rollmill.runs.run import RunDirectory

        families: Families = {}
        with self._lock:
            for (metric, labels), value in sorted(self._figures.items()):
                _add(families, metric, f"{metric}{{{labels}}} {value}")
        run = RunDirectory.open(self._directory)
        roles = [*run.config.gateways, *(spec.role for spec in run.config.engine_specs)]
        with ThreadPoolExecutor(len(roles)) as pool:
            for role, text in zip(roles, pool.map(lambda role: _ask(run, role), roles), strict=True):
                labels = _listed({"run": self._name, "role": role})
                _add(families, "rollmill_role_up", f"rollmill_role_up{{{labels}}} {int(text is not None)}")
                _merge(families, (text or "").splitlines(), labels)
        return "".join(f"{line}\n" for lines in families.values() for line in lines)


class _Handler(BaseHTTPRequestHandler):
    @staticmethod
    def render() -> str:
        raise NotImplementedError

    def do_GET(self) -> None:
        found = self.path.partition("?")[0] == "/metrics"
        body = self.render().encode() if found else b"the metrics are at /metrics\n"
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
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
    elif kind == "weights":
        yield f"rollmill_weights_{name}", {"line": rest}, scalar.value
        yield "rollmill_weights_version", {"line": rest}, scalar.step
    elif rest == "heldout_loss":
        yield "rollmill_training_heldout_loss", {"stage": kind, "source": figure}, scalar.value
    else:
        yield f"rollmill_training_{name}", {"stage": group}, scalar.value
        yield "rollmill_training_step", {"stage": group}, scalar.step
        yield "rollmill_training_step_time", {"stage": group}, scalar.at


def _ask(run: RunDirectory, role: str) -> str | None:
    """What a role says about itself; None if it does not answer."""
    from rollmill.runs.trust import ask

    try:
        status, body = ask(run, f"{run.url(role)}/metrics", PATIENCE_S, MOST_BYTES)
    except (OSError, KeyError, ValueError):
        return None
    return body.decode("utf-8", "replace") if status == 200 else None


def _merge(families: Families, lines: Iterable[str], labels: str) -> None:
    """Add the samples of a role, with more labels. Comments of a metric are taken from the first role that has it."""
    family = ""
    for line in lines:
        if line.startswith("#"):
            family = line.split(" ", 3)[2]
            known = families.setdefault(family, [])
            if line not in known and not any(each.startswith(line.split(family)[0] + family) for each in known):
                known.insert(sum(each.startswith("#") for each in known), line)
        elif (sample := _SAMPLE.fullmatch(line)) is not None:
            own = f"{labels},{sample[2]}" if sample[2] else labels
            families.setdefault(family or sample[1], []).append(f"{sample[1]}{{{own}}} {sample[3]}")


def _add(families: Families, metric: str, sample: str) -> None:
    families.setdefault(metric, [f"# TYPE {metric} gauge"]).append(sample)


def _listed(labels: Mapping[str, str]) -> str:
    escaped = {
        key: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for key, value in labels.items()
    }
    return ",".join(f'{key}="{value}"' for key, value in escaped.items())
