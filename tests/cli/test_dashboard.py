"""`rollmill dashboard`: who needs a key is decided by --host. The server that it would start is asked in its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from rollmill.gateway.access.keys import KeyStore
from rollmill.runs.run import RunDirectory
from rollmill.storage.database import open_database
from tests.cli.conftest import Told
from tests.runs.conftest import make_config


async def test_beyond_loopback_every_visitor_needs_a_key(
    tmp_path: Path, rollmill: Callable[..., Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory.create(tmp_path, make_config())
    served: list[web.Application] = []

    def run_app(app: web.Application, **_: Any) -> None:  # the real one does not return
        served.append(app)

    monkeypatch.setattr(web, "run_app", run_app)
    told = rollmill("dashboard", run.path, "--host", "0.0.0.0")
    assert told.code == 1 and "has no database yet, so nobody can have a key" in told.err and not served
    store = KeyStore(open_database(run.database_url), run.id)
    (_, secret), (_, other) = store.create(["read"]), store.create(["production"])
    told = rollmill("dashboard", run.database_url, "--host", "0.0.0.0")
    assert told.code == 1 and "--run ID shows one run" in told.err and not served
    told = rollmill("dashboard", run.path, "--host", "0.0.0.0")
    assert told.code == 0 and "Every visitor needs a key" in told.out and "unencrypted" in told.out
    told = rollmill("dashboard", run.path)
    assert told.code == 0 and "http://127.0.0.1:" in told.out and "needs a key" not in told.out
    far, near = served
    async with TestClient(TestServer(far)) as client:
        keys = {"": 401, "Bearer wrong": 401, f"Bearer {other}": 403, f"Bearer {secret}": 200}
        for key, status in keys.items():
            assert (await client.get("/", headers={"Authorization": key} if key else {})).status == status, key
    async with TestClient(TestServer(near)) as client:
        assert (await client.get("/")).status == 200
