"""Engines that follow a line through real stores, and the engine process."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollmill import telemetry
from rollmill.inference.embedded.engine import EmbeddedEngine
from rollmill.inference.follower import EngineFollower, Pinned, UpdateSource
from rollmill.models.config import ModelConfig
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights.follower import Follower
from rollmill.weights.publisher import Publisher
from rollmill.weights.store import WeightStore
from rollmill.weights.transfer import Mirror
from tests.inference.world import ENGINE, TINY, answer, engine_at, make_update, request, until


class Line:
    """A trainer's side of the store."""

    def __init__(self, path: Path, model: ModelConfig = TINY) -> None:
        self.objects = Objects.open(path)
        self.store = WeightStore(self.objects)
        self._model = model
        self._publisher = Publisher(self.store, "main")
        self.digests: list[str] = []

    def publish(self) -> None:
        number = len(self.digests)
        parent = Version("main", number - 1) if number else None
        manifest = self._publisher.publish(number, make_update(number, self._model).tensors, parent)
        self.digests.append(manifest.digest)


@asynccontextmanager
async def following(engine: EmbeddedEngine, source: UpdateSource) -> AsyncIterator[EngineFollower]:
    follower = EngineFollower(engine, source, poll_seconds=0.01)
    task = asyncio.create_task(follower.run())
    try:
        yield follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def serves(engine: EmbeddedEngine, number: int) -> Callable[[], bool]:
    return lambda: (engine.health()["policy"] or {}).get("number") == number


async def test_an_engine_follows_its_line_while_it_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(tmp_path / "store")
    monkeypatch.setattr(telemetry, "_file", None)  # later tests write no events
    telemetry.open_events(tmp_path / "events", "engine-test")
    async with engine_at(None) as engine, following(engine, Follower(line.store, "main")):
        task = asyncio.create_task(answer(engine, request(max_tokens=240)))
        line.publish()
        await until(lambda: engine.metrics()["sampled_tokens_total"] > 5)
        line.publish()
        await until(serves(engine, 1))
        got = await task
    assert got.policies[0].number == 0
    assert {policy.digest for policy in got.policies} <= set(line.digests)
    applied = [event for event in telemetry.read_events(tmp_path / "events") if event["kind"] == "apply"]
    assert [event["version"] for event in applied] == [0, 1]
    assert [event["digest"] for event in applied] == line.digests
    assert all(event["pause_seconds"] > 0 and event["since_publish_seconds"] > 0 for event in applied)
    kinds = {event["kind"] for event in telemetry.read_events(tmp_path / "events")}
    assert {"engine", "busy"} <= kinds


async def test_an_engine_in_another_region_serves_the_same_bytes_from_its_own_store(tmp_path: Path) -> None:
    line, away = Line(tmp_path / "home"), Objects.open(tmp_path / "away")
    source = Follower(WeightStore(away), "main", mirror=Mirror(line.objects, away))
    async with engine_at(None) as engine, following(engine, source):
        for number in range(3):
            line.publish()
            await until(serves(engine, number))
            assert engine.health()["policy"]["digest"] == line.digests[number]
    assert WeightStore(away).head("main") == 2


async def test_a_pinned_engine_stays_where_it_is(tmp_path: Path) -> None:
    line, away = Line(tmp_path / "home"), Objects.open(tmp_path / "away")
    pinned = Pinned(WeightStore(away), Version("main", 1), "bf16", Mirror(line.objects, away))
    async with engine_at(None) as engine, following(engine, pinned) as follower:
        line.publish()
        await until(lambda: follower.problem is not None)
        assert "main@1" in str(follower.problem)
        for _ in range(2):
            line.publish()
        await until(serves(engine, 1))
        await asyncio.sleep(0.05)
        assert serves(engine, 1)() and follower.problem is None


async def test_a_damaged_object_leaves_the_engine_at_the_last_good_version(tmp_path: Path) -> None:
    line = Line(tmp_path / "store")
    line.publish()
    async with engine_at(None) as engine, following(engine, Follower(line.store, "main")) as follower:
        await until(serves(engine, 0))
        await engine.pause()
        known = set(line.objects.list())
        line.publish()
        packs = [key for key in line.objects.list() if key not in known and "/packs/" in key]
        good = {key: line.objects.get(key) for key in packs}
        for key in packs:
            line.objects.put(key, good[key][: len(good[key]) // 2])
        await until(lambda: follower.problem is not None or serves(engine, 1)())
        if follower.problem is not None:  # it may have read the bytes before they were damaged
            await engine.resume()
            assert {policy.number for policy in (await answer(engine, request())).policies} == {0}
            for key in packs:
                line.objects.put(key, good[key])
        await until(serves(engine, 1))


async def test_weights_an_engine_refuses_are_tried_again_and_reported(tmp_path: Path) -> None:
    line = Line(tmp_path / "store")
    other = TINY.model_copy(update={"layers": 1})
    async with engine_at(None, model=other) as engine, following(engine, Follower(line.store, "main")) as follower:
        line.publish()
        await until(lambda: follower.problem is not None)
        assert "another model" in str(follower.problem)
        assert engine.health()["policy"] is None


SERVE = """
import json, sys
from rollmill.config import validate_config
from rollmill.inference.config import EngineConfig
from rollmill.inference.server import serve_engine
from rollmill.models.config import ModelConfig
from rollmill.storage.objects import Objects
from rollmill.weights.store import WeightStore

config, model, store, port = sys.argv[1:]
serve_engine(
    validate_config(EngineConfig, json.loads(config), "test"),
    validate_config(ModelConfig, json.loads(model), "test"),
    WeightStore(Objects.open(store)),
    line="main", name="engine-home", region="home", port=int(port),
)
"""


def _served_digest(port: int) -> str | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            policy = json.load(response)["policy"]
            return policy and policy["digest"]
    except OSError:
        return None


async def test_the_engine_process_serves_follows_and_ends(tmp_path: Path) -> None:
    line = Line(tmp_path / "store")
    line.publish()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [ENGINE.model_dump_json(), TINY.model_dump_json(), str(tmp_path / "store"), str(port)]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVE, *arguments)
    try:
        await until(lambda: _served_digest(port) == line.digests[0])
        line.publish()
        await until(lambda: _served_digest(port) == line.digests[1])
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()


@pytest.mark.parametrize("module", ["config", "wire", "engine", "follower", "server"])
def test_importing_needs_no_torch(module: str) -> None:
    code = f"import sys, rollmill.inference.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
