"""One address per run for Prometheus; the board and the alerts of deploy/ ask for figures that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rollmill import telemetry
from rollmill.errors import ConfigError
from rollmill.events import EVENTS as KINDS
from rollmill.gateway.watching.metrics import METRICS as GATEWAY
from rollmill.inference.engine import METRICS as ENGINE
from rollmill.runs.open_sinks import Sinks
from rollmill.runs.run import RunDirectory
from rollmill.runs.sinks.prometheus import Prometheus, PrometheusSettings
from tests.runs.conftest import make_config
from tests.runs.test_sink import EVENTS
from tests.test_repo import ROOT

MONITORING = ROOT / "deploy" / "monitoring"


class Role(BaseHTTPRequestHandler):
    """What a gateway or an engine answers at /metrics."""

    def do_GET(self) -> None:
        registry = CollectorRegistry()
        Gauge("rollmill_x_running", "requests", ["engine"], registry=registry).labels("e").set(3)
        Histogram("rollmill_x_first_seconds", "time", ["engine"], registry=registry).labels("e").observe(0.5)
        Counter("rollmill_x_done", "answers", ["engine"], registry=registry).labels("e").inc(4)
        body = generate_latest(registry)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())


def test_one_address_has_training_and_every_role(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, make_config('engines=[{kind="embedded", count=2}]'))
    servers = {}
    roles = ["gateway", *(spec.role for spec in run.config.engine_specs)]
    for role in roles[:2]:  # the second engine does not run
        servers[role] = ThreadingHTTPServer(("127.0.0.1", run.ports[role]), Role)
        threading.Thread(target=servers[role].serve_forever, daemon=True).start()
    sink = Prometheus(PrometheusSettings(port=0))
    sink.open(run.path, 'a "run"')
    try:
        from rollmill.runs.sink import scalars_of

        sink.write([scalar for event in EVENTS for scalar in scalars_of(event)])
        text = scraped(sink.port)
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/")
        with pytest.raises(ConfigError, match="no metrics at") as raised:
            Prometheus(PrometheusSettings(port=sink.port)).open(run.path, "second")
        assert "another `port` in [[sinks]]" in str(raised.value.hint)
    finally:
        sink.close()
        for server in servers.values():
            server.shutdown()
            server.server_close()
    name = r'run="a \"run\""'
    for sample in (
        f'rollmill_training_reward_mean{{{name},stage="rl"}} 0.25',
        f'rollmill_training_step{{{name},stage="midtrain"}} 3.0',
        f'rollmill_training_heldout_loss{{{name},source="text",stage="midtrain"}} 2.0',
        f'rollmill_eval_rate{{mode="sampled",{name},split="heldout"}} 0.5',
        f'rollmill_weights_version{{line="rl",{name}}} 7.0',
        f'rollmill_role_up{{role="{roles[1]}",{name}}} 1.0',
        f'rollmill_role_up{{role="{roles[2]}",{name}}} 0.0',
        f'rollmill_x_running{{engine="e",role="gateway",{name}}} 3.0',
        f'rollmill_x_done_total{{engine="e",role="gateway",{name}}} 4.0',
    ):
        assert sample in text.splitlines(), text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["rollmill_x_first_seconds"].type == "histogram"
    assert len({sample.labels["role"] for sample in families["rollmill_x_running"].samples}) == 2


def test_a_run_feeds_it_from_its_events(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, make_config('sinks=[{kind="prometheus", port=0}]'))
    telemetry.append_events(run.events, "trainer", EVENTS)
    sinks = Sinks(run)
    try:
        sinks.poll(now=True)
        assert sinks.problems == []
        ((_, sink),) = sinks._open
        assert isinstance(sink, Prometheus) and "rollmill_training_reward_mean" in scraped(sink.port)
    finally:
        sinks.close()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of the package prometheus, is not installed")
@pytest.mark.parametrize(
    "command", ["check config prometheus.yml", "check rules alerts.yml", "test rules alerts_test.yml"]
)
def test_prometheus_itself_loads_the_rules_and_raises_the_alerts(command: str) -> None:
    done = subprocess.run(["promtool", *command.split()], cwd=MONITORING, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stdout + done.stderr


def known() -> set[str]:
    """The names of all metrics that a run may have."""
    training = {*KINDS["step"].fields, *KINDS["document_step"].fields, "step_time", "heldout_loss"}
    found = {f"rollmill_training_{name}" for name in training}
    found |= {f"rollmill_eval_{name}" for name in ("rate", "low", "high")}
    found |= {"rollmill_weights_version", "rollmill_role_up", "up"}
    for prefix, metrics in (("rollmill_gateway_", GATEWAY), ("rollmill_engine_", ENGINE)):
        for name in metrics:
            found |= {
                f"{prefix}{name}{end}"
                for end in (("_bucket", "_sum", "_count") if name.endswith("_seconds") else ("",))
            }
    return found


def test_the_board_and_the_alerts_name_metrics_that_exist() -> None:
    board = json.loads((MONITORING / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) == 15
    assert all(rule["alert"] and rule["annotations"]["summary"] for rule in rules) and len(rules) == 8
    for query in [*queries, *(rule["expr"] for rule in rules)]:
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}"), query
        names = re.findall(r"\b(?:rollmill_\w+|up)\b", re.sub(r"\{.*?\}", "", query))
        assert names and set(names) <= known(), query
    scrape = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    (target,) = scrape["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target == f"127.0.0.1:{PrometheusSettings().port}" and scrape["rule_files"] == ["alerts.yml"]
    assert scrape["scrape_configs"][0]["job_name"] == "rollmill"
