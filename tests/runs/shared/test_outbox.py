"""What a run on other hosts tells through its store: logs and events, who drives it, what it is."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from rollmill.errors import ConfigError
from rollmill.runs import saved
from rollmill.runs.free_ports import PORTS
from rollmill.runs.opening import describe_run, open_by_url, open_run
from rollmill.runs.run import RunDirectory
from rollmill.runs.saved import url_of
from rollmill.runs.shared import outbox
from rollmill.runs.shared.addresses import announce_gateway, find_gateway, key_of
from rollmill.runs.shared.outbox import Outbox, bring, send_report
from rollmill.runs.shared.presence import Presence
from rollmill.storage.objects import Objects
from tests.runs.conftest import make_config
from tests.storage.serving import new_bucket, s3_environment, s3_server


def test_logs_and_events_arrive_once_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "SEGMENT", 64)
    objects, there, here = Objects.open(tmp_path / "store"), tmp_path / "there", tmp_path / "here"
    (there / "logs").mkdir(parents=True)
    log = there / "logs" / "trainer.log"
    written = b""
    for stream in range(2):  # the process that sends starts again
        sender = Outbox(objects, there, ("logs/trainer.log", "events/trainer.jsonl"))
        for number in range(9):
            line = f"{stream} {number} {'x' * 11 * number}\n".encode()
            with log.open("ab") as file:
                file.write(line)
            written += line
            sender.send()
            if number % 3 == 0:
                bring(objects, here)
    bring(objects, here)
    bring(objects, here)
    assert (here / "logs" / "trainer.log").read_bytes() == written and not (here / "events").exists()
    # a host that is lost in the middle of a line does not swallow the first line of its successor
    with log.open("ab") as file:
        file.write(b"cut sho")
    sender.send()
    bring(objects, here)
    sender = Outbox(objects, there, ("logs/trainer.log",))
    with log.open("ab") as file:
        file.write(b"next\n")
    sender.send()
    bring(objects, here)
    assert (here / "logs" / "trainer.log").read_bytes() == written + b"cut sho\nnext\n"
    # what comes from a directory is not brought back to it, and much to send leaves time for other things
    bring(objects, there)
    assert log.read_bytes() == written + b"cut shonext\n"
    with log.open("ab") as file:
        file.write(b"x" * 640)
    calls: list[None] = []
    sender.send(lambda: calls.append(None))
    assert len(calls) > 10
    # only logs and events of the run's directory can be written by it
    for name in ("run.json", "logs/a/b.log", "logs/run.json"):
        objects.put(f"{outbox.FOLDER}/{name}/0a-000000", b"evil")
    for name in outbox.REPORT:
        (there / name).write_text(name)
    send_report(objects, there)
    bring(objects, here)
    assert {path.name for path in here.iterdir() if "brought" not in path.name} == {"logs", *outbox.REPORT}


def test_a_supervisor_says_where_it_is_and_is_asked_to_stop(tmp_path: Path) -> None:
    presence = Presence(Objects.open(tmp_path))
    assert presence.where() is None and not presence.asked_to_stop()
    presence.renew("node 10.0.0.7", 0.0)
    where = presence.where()
    assert where is not None and where.startswith("node 10.0.0.7, since 19")
    presence.ask_to_stop()
    assert presence.asked_to_stop()
    presence.forget_stop()
    presence.leave()
    assert presence.where() is None and not presence.asked_to_stop()


def test_a_run_is_named_by_the_url_of_its_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_environment(s3_server()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run = RunDirectory.create(tmp_path / "runs", make_config(f"store={new_bucket()!r}"))
    url = str(run.home_store)
    with pytest.raises(ConfigError, match="holds no run"):
        open_by_url(url)
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="cannot be read") as refused:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        patch.setattr(saved, "PATIENCE_S", 0.2)
        open_by_url(url)
    assert "credentials of the environment" in str(refused.value.hint)
    describe_run(run)
    described = Objects.open(url).get("cluster/run.json")
    assert not any(secret.encode() in described for secret in run.secrets.values())
    assert url_of(Path(url)) == url and url_of(Path("runs/demo")) is None
    assert open_run(Path(url)) == run  # it began on this host
    Objects.open(url).put("cluster/run.json", described.replace(b'"format": 1', b'"format": 0'))
    with pytest.raises(ConfigError, match=f"{url}/cluster/run.json has format 0"):
        open_by_url(url)
    describe_run(run)
    (run.path / "run.json").unlink()
    elsewhere = open_run(Path(url))
    assert (elsewhere.id, elsewhere.config, elsewhere.home_store) == (run.id, run.config, url)
    assert elsewhere.path.is_relative_to(tmp_path / "home") and open_run(Path(url)) == elsewhere
    assert not set(elsewhere.secrets.values()) & set(run.secrets.values())

    # a gateway without a port of its own takes one, and says in the store where it is
    assert find_gateway(run) == run.url("gateway")
    assert find_gateway(elsewhere) is None
    there = announce_gateway(replace(elsewhere, host="127.0.0.9"))
    assert find_gateway(elsewhere) == f"http://127.0.0.9:{there.ports['gateway']}"
    # started again where its sessions are, it has the same port; another one if somebody has taken that
    (there.path / "gateway").mkdir(parents=True)
    again = replace(elsewhere, host="127.0.0.9")
    assert announce_gateway(again).ports == there.ports
    with socket.create_server(("127.0.0.9", there.ports["gateway"])):
        assert announce_gateway(again).ports != there.ports
    Objects.open(url).put(key_of("gateway"), json.dumps({"url": "http://127.0.0.9:99999"}).encode())
    assert announce_gateway(again).ports["gateway"] in PORTS
    Objects.open(url).put(key_of("gateway"), json.dumps({"url": "file:///etc/passwd"}).encode())
    assert find_gateway(elsewhere) is None


def test_ray_needs_stores_that_all_nodes_reach_and_a_cluster() -> None:
    from rollmill.kinds import build

    for setting, problem in (
        ("store='s3://bucket'", "needs a database"),
        ("database='postgresql://mill@db/mill'", "needs a store"),
    ):
        config = make_config("cluster={kind='ray'}", setting)
        with pytest.raises(ConfigError, match=problem):
            build(config.cluster).check(config)
    pytest.importorskip("ray")
    both = ("store='s3://bucket'", "database='postgresql://mill@db/mill'")
    config = make_config("cluster={kind='ray',address='127.0.0.1:1'}", *both)
    with pytest.raises(ConfigError, match="Connection refused"):
        build(config.cluster).check(config)
