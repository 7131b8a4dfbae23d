"""A run with the events of a whole run (simulated), real stores, and the dashboard over real HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from rollmill.config import load_config
from rollmill.dashboard.app import make_app
from rollmill.dashboard.run_source import Source
from rollmill.demo import CONFIG as DEMO
from rollmill.gateway.access.keys import KeyRing
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.storage.database import open_database
from tests.evals.synthetic import demo_run

Open = Callable[..., Awaitable[TestClient]]


@pytest.fixture
def run(tmp_path: Path, database_url: str) -> RunDirectory:
    """On both databases. 32 steps; its stages are called as in the demo's configuration."""
    config = load_config(RunConfig, DEMO, ['name="demo"', f'database="{database_url}"'])
    run = RunDirectory.create(tmp_path / "runs", config)
    script = demo_run(steps=32)
    for event in script.events:
        if event["kind"] == "step":
            event["stage"] = "rl"
    script.write(run.events)
    open_database(run.database_url)
    return run


@pytest.fixture
async def visit() -> AsyncIterator[Open]:
    """Serve a source and return a client of it."""
    async with AsyncExitStack() as stack:

        async def start(source: Source, keys: KeyRing | None = None) -> TestClient:
            return await stack.enter_async_context(TestClient(TestServer(make_app(source, keys))))

        yield start
