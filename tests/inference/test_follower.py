"""Engines that follow a line through real stores, and the engine process."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from rollmill import telemetry
from rollmill.errors import EngineError
from rollmill.inference.embedded.engine import EmbeddedEngine
from rollmill.inference.engine import WeightSwitch
from rollmill.inference.follower import EngineFollower, PinnedSource, UpdateSource
from rollmill.inference.server import make_app, serving
from rollmill.models.config import ModelConfig
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights.reading.leases import Leases
from rollmill.weights.reading.line_follower import LineFollower, Update
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.regions.collection import collect
from rollmill.weights.regions.mirror import Mirror
from rollmill.weights.writing.publisher import Publisher
from tests.inference.world import ENGINE, TINY, engine_at, generate, make_update, request, until


class Line:
    """The trainer's side of the store."""

    def __init__(
        self, path: Path, model: ModelConfig = TINY, name: str = "main", shift: int = 0, snapshot_every: int = 25
    ) -> None:
        self.objects = Objects.open(path)
        self.store = WeightStore(self.objects)
        self._model, self._name, self._shift = model, name, shift
        self._publisher = Publisher(self.store, name, snapshot_every=snapshot_every)
        self.digests: list[str] = []

    def publish(self) -> None:
        number = len(self.digests)
        parent = Version(self._name, number - 1) if number else None
        tensors = make_update(number + self._shift, self._model).tensors
        manifest = self._publisher.publish(number, tensors, parent)
        self.digests.append(manifest.digest)


@asynccontextmanager
async def following(
    engine: EmbeddedEngine, source: UpdateSource, poll_seconds: float = 0.01
) -> AsyncIterator[EngineFollower]:
    follower = EngineFollower(engine, source, poll_seconds)
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
    async with engine_at(None) as engine, following(engine, LineFollower(line.store, "main")):
        task = asyncio.create_task(generate(engine, request(max_tokens=240)))
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
    source = LineFollower(WeightStore(away), "main", mirror=Mirror(line.objects, away))
    async with engine_at(None) as engine, following(engine, source):
        for number in range(3):
            line.publish()
            await until(serves(engine, number))
            assert engine.health()["policy"]["digest"] == line.digests[number]
    assert WeightStore(away).head("main") == 2


async def test_a_pinned_engine_stays_where_it_is(tmp_path: Path) -> None:
    line, away = Line(tmp_path / "home"), Objects.open(tmp_path / "away")
    pinned = PinnedSource(WeightStore(away), Version("main", 1), "bf16", Mirror(line.objects, away))
    async with engine_at(None) as engine, following(engine, pinned) as follower:
        line.publish()
        await until(lambda: follower.problem is not None)
        assert "main@1" in str(follower.problem)
        for _ in range(2):
            line.publish()
        await until(serves(engine, 1))
        await asyncio.sleep(0.05)
        assert serves(engine, 1)() and follower.problem is None


async def test_the_version_of_a_pinned_engine_is_not_collected(tmp_path: Path) -> None:
    line = Line(tmp_path / "store", snapshot_every=1)
    for _ in range(4):
        line.publish()
    pinned = PinnedSource(line.store, Version("main", 1), "bf16", holder="eval-1-engine-home")
    async with engine_at(None) as engine, following(engine, pinned):
        await until(serves(engine, 1))
        assert {(lease.holder, lease.number) for lease in Leases(line.objects, "main").held()} == {
            ("eval-1-engine-home", 1)
        }
        assert 1 in collect(line.store, "main", keep=1).kept
        assert pinned.again() is not None  # as for an engine that could not apply it
    assert collect(line.store, "main", keep=1).kept == (3,)


async def test_a_damaged_object_leaves_the_engine_at_the_last_good_version(tmp_path: Path) -> None:
    line = Line(tmp_path / "store")
    line.publish()
    async with engine_at(None) as engine, following(engine, LineFollower(line.store, "main")) as follower:
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
            assert {policy.number for policy in (await generate(engine, request())).policies} == {0}
            for key in packs:
                line.objects.put(key, good[key])
        await until(serves(engine, 1))


async def test_weights_an_engine_refuses_are_tried_again_and_reported(tmp_path: Path) -> None:
    line = Line(tmp_path / "store")
    other = TINY.model_copy(update={"layers": 1})
    async with engine_at(None, model=other) as engine, following(engine, LineFollower(line.store, "main")) as follower:
        line.publish()
        await until(lambda: follower.problem is not None)
        assert "another model" in str(follower.problem)
        assert engine.health()["policy"] is None


async def test_bad_memory_on_the_host_is_found_by_the_engine_and_healed(tmp_path: Path) -> None:
    line = Line(tmp_path / "store")
    line.publish()
    source = LineFollower(line.store, "main")
    first = source.poll()
    assert first is not None and source._course.host is not None
    source._course.host._memory["embedding"][10] ^= 1
    source._course.served = None  # so that it gives the same version out again
    async with engine_at(None) as engine, following(engine, source) as follower:
        await until(lambda: follower.problem is not None)
        assert "do not have digest" in str(follower.problem) and engine.health()["policy"] is None
        await until(serves(engine, 0))
        assert follower.problem is None


async def test_an_update_is_never_applied_after_its_image_has_moved_on(tmp_path: Path) -> None:
    """The engine refuses a version, and the next one comes. Then all of the next one is applied."""
    line = Line(tmp_path / "store")
    line.publish()
    async with engine_at(None) as engine:
        apply, refused = engine.apply, []

        async def refusing(update: Update) -> WeightSwitch:
            if update.policy.number == 1 and len(refused) < 2:
                refused.append(update)
                line.publish()
                raise EngineError("not now")
            return await apply(update)

        engine.apply = refusing  # type: ignore[method-assign]
        async with following(engine, LineFollower(line.store, "main")) as follower:
            await until(serves(engine, 0))
            line.publish()
            await until(lambda: bool(refused))
            await until(serves(engine, len(line.digests) - 1))
            assert engine.health()["policy"]["digest"] == line.digests[-1]
            await until(lambda: follower.problem is None)  # cleared just after the switch


async def test_a_hint_ends_a_long_wait(tmp_path: Path) -> None:
    line = Line(tmp_path / "store")
    line.publish()
    source, release = LineFollower(line.store, "main"), threading.Event()
    source.wait = lambda _: release.wait()  # type: ignore[assignment, method-assign, return-value]
    try:
        async with engine_at(None) as engine, following(engine, source) as follower:
            await until(serves(engine, 0))
            for number in (1, 2):
                line.publish()
                follower.hint()
                await until(serves(engine, number))
    finally:
        release.set()


async def test_the_store_is_polled_rarely_when_nothing_happens(tmp_path: Path) -> None:
    line = Line(tmp_path / "store")
    line.publish()
    source = LineFollower(line.store, "main")
    waits: list[float] = []
    wait = source.wait

    def noted(seconds: float) -> None:
        waits.append(seconds)
        wait(min(seconds, 0.01))

    source.wait = noted  # type: ignore[method-assign]
    async with engine_at(None) as engine, following(engine, source) as follower:
        await until(serves(engine, 0))
        for idle, least, most in ((20.0, 0.99, 1.5), (10_000.0, 2.0, 2.0)):
            follower._happened_at = time.monotonic() - idle
            waits.clear()
            await until(lambda: len(waits) > 2)
            assert least <= waits[-1] <= most
        line.publish()
        await until(serves(engine, 1))
        waits.clear()
        await until(lambda: bool(waits))
        assert waits[0] < 1.0, "polling is frequent again"


async def test_lending_and_recalling_under_load(tmp_path: Path) -> None:
    line, other = Line(tmp_path / "store"), Line(tmp_path / "store", name="rl", shift=100)
    line.publish()
    for _ in range(2):
        other.publish()
    async with engine_at(None) as engine, following(engine, LineFollower(line.store, "main")) as follower:
        app = make_app(engine, follower)
        async with serving(app, "127.0.0.1", 0) as runner, aiohttp.ClientSession() as client:
            url = "http://{}:{}".format(*runner.addresses[0][:2])
            await until(serves(engine, 0))
            task = asyncio.create_task(generate(engine, request(max_tokens=240)))
            lent = await (await client.post(f"{url}/lend", json={"line": "rl"})).json()
            assert lent["lent"] == "rl"
            await until(lambda: engine.health()["policy"]["digest"] == other.digests[1])
            assert (await client.post(f"{url}/lend", json={"line": "more"})).status == 400
            other.publish()
            await until(lambda: engine.health()["policy"]["digest"] == other.digests[2])
            line.publish()
            back = await (await client.post(f"{url}/recall")).json()
            assert back["lent"] is None and back["policy"]["line"] == "main"
            await until(serves(engine, 1))
            got = await task
    assert len(got.tokens) == 240 and {policy.line for policy in got.policies} <= {"main", "rl"}


SERVE = """
import json, sys
from rollmill.config import validate_config
from rollmill.inference.config import EngineConfig
from rollmill.inference.engine import EngineContext
from rollmill.inference.server import serve_engine
from rollmill.models.config import ModelConfig
from rollmill.storage.objects import Objects
from rollmill.weights.reading.weight_store import WeightStore

config, model, store, port = sys.argv[1:]
settings = validate_config(EngineConfig, json.loads(config), "test")
shape = validate_config(ModelConfig, json.loads(model), "test")
context = EngineContext("engine-home", "home", shape, settings, "cpu", "bf16", False, None)
serve_engine(context, WeightStore(Objects.open(store)), line="main", port=int(port))
"""


def _served_digest(port: int) -> str | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            policy = json.load(response)["policy"]
            return policy and policy["digest"]
    except OSError:
        return None


@pytest.mark.slow
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
        assert [lease.number for lease in Leases(line.objects, "main").held()] == [1]
        line.publish()
        process.kill()  # at some step of following
        await process.wait()
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVE, *arguments)
        await until(lambda: _served_digest(port) == line.digests[2])
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        assert Leases(line.objects, "main").held() == []
    finally:
        if process.returncode is None:
            process.kill()


@pytest.mark.parametrize("module", ["config", "engine_wire", "engine", "follower", "server"])
def test_importing_needs_no_torch(module: str) -> None:
    code = f"import sys, rollmill.inference.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
