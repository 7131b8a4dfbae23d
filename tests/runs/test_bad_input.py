"""What is wrong with a fleet is said before anything starts, with the remedy.

Too few GPUs: test_devices.py. An engine of another release: tests/gateway/test_fleet.py. Files of TLS: test_tls.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from rollmill.errors import ConfigError
from rollmill.runs.preflight import check_here
from rollmill.runs.run import RunDirectory
from rollmill.storage import storage_probe as probe
from tests.runs.conftest import make_config
from tests.storage.serving import new_bucket, s3_environment, s3_server


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3_environment(s3_server()).items():
        monkeypatch.setenv(name, value)
    return new_bucket()


def refusal(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        check_here(make_config(*overrides))
    assert raised.value.hint
    return raised.value


def test_a_database_at_a_wrong_address() -> None:
    refused = refusal("database='postgresql+psycopg://mill@127.0.0.1:1/mill?connect_timeout=2'")
    assert "the database cannot be used" in refused.message and "127.0.0.1" in refused.message
    assert "running and reachable from this host" in str(refused.hint)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_clocks_that_differ(database_url: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_here(make_config(f"database={database_url!r}", f"store={bucket!r}"))
    now = time.time
    monkeypatch.setattr(probe.time, "time", lambda: now() + 3600)
    assert "the clock of the database is 3600 s behind" in refusal(f"database={database_url!r}").message
    monkeypatch.setattr(probe.time, "time", lambda: now() - 3600)
    refused = refusal(f"store={bucket!r}")
    assert "ahead of that of this host" in refused.message and "NTP" in str(refused.hint)


def test_a_bucket_without_permission(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for S3 that allows nothing: moto allows everything."""

    class Denies(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Denies) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        refused = refusal(f"store={bucket!r}")
        server.shutdown()
    assert "cannot be used" in refused.message and "must allow to write, read and delete" in str(refused.hint)


def test_two_runs_with_one_name(make_run: Callable[..., RunDirectory], tmp_path: Path) -> None:
    first = make_run("store='s3://bucket/runs'")
    with pytest.raises(ConfigError, match="already holds a run") as raised:
        make_run()
    assert "another `name`" in str(raised.value.hint)
    # on two hosts nobody sees the other's directory: ids keep them apart in the store and in the database
    second = RunDirectory.create(tmp_path / "elsewhere", first.config)
    assert second.config.name == first.config.name and second.home_store != first.home_store
    assert second.stage_key(second.config.stages[-1]) != first.stage_key(first.config.stages[-1])
