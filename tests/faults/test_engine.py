"""The real engine process in a region with a keeper: damage, kill -9, and hints that are lost, repeated or wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollmill.inference.engine_wire import chunk_from_json, request_to_json
from rollmill.storage.objects import Objects
from rollmill.weights import Publisher, WeightStore
from tests.faults.roles import LINE
from tests.faults.world import World, delta_path, free_port
from tests.inference.world import ENGINE, TINY, make_update, request

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
context = EngineContext("engine", "away", shape, settings, "cpu", "bf16", False, None)
serve_engine(context, WeightStore(Objects.open(store)), line="rl", port=int(port))
"""


class RealEngine:
    def __init__(self, store: Path) -> None:
        self._port = free_port()
        arguments = [ENGINE.model_dump_json(), TINY.model_dump_json(), str(store), str(self._port)]
        self._command = [sys.executable, "-c", SERVE, *arguments]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def post(self, path: str, body: bytes) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", body or None, timeout=20) as response:
            return bytes(response.read())

    def serves(self, digest: str, problem: str | None = None) -> bool:
        """Whether it serves those weights, reports them, and answers with them."""
        try:
            health: dict[str, Any] = json.loads(self.post("/health", b""))
        except OSError:
            return False  # it is still starting
        said = health["problem"]
        if (health["policy"] or {}).get("digest") != digest or (said is None) != (problem is None):
            return False
        answer = chunk_from_json(self.post("/generate", request_to_json(request(max_tokens=3))))
        return (problem or "") in (said or "") and {policy.digest for policy in answer.policies} == {digest}


@contextmanager
def running(store: Path) -> Iterator[RealEngine]:
    engine = RealEngine(store)
    try:
        yield engine
    finally:
        engine.kill()


@pytest.mark.slow
def test_an_engine_behind_faults_and_hints(world: World) -> None:
    away = world.folder / "away"
    publisher = Publisher(WeightStore(Objects.open(world.home)), LINE)
    updates = [make_update(number) for number in range(5)]
    digests = [update.policy.digest for update in updates]

    def publish(number: int) -> None:
        publisher.publish(number, updates[number].tensors)

    keeper = world.keeper(world.home, anchor_every=50)
    with running(away) as engine:
        publish(0)  # no hint is sent for it
        world.until(lambda: engine.serves(digests[0]), seconds=60)

        for body in (b'{"version": 999}', b'{"version": -1}', b'{"version": "x"}', b"[]", b"{", b"\xff"):
            engine.post("/hint", body)
        assert engine.serves(digests[0])
        publish(1)
        for _ in range(20):
            engine.post("/hint", b'{"version": 1}')
        world.until(lambda: engine.serves(digests[1]))

        keeper.freeze()
        publish(2)
        engine.post("/hint", b'{"version": 2}')  # the hint arrives before the version
        assert engine.serves(digests[1])
        pack = delta_path(world.home, 2)
        whole = pack.read_bytes()
        pack.write_bytes(whole[:-1])
        keeper.thaw()
        world.until_problem(keeper, f"{LINE}@2", "is truncated")
        engine.post("/hint", b'{"version": 2}')
        assert engine.serves(digests[1])
        pack.write_bytes(whole)
        world.until(lambda: engine.serves(digests[2]))

        local = away / delta_path(world.home, 2).relative_to(world.home)
        engine.kill()
        keeper.freeze()
        for number in (3, 4):
            publish(number)
        local.write_bytes(whole[::-1])
        engine.start()
        world.until(lambda: engine.serves(digests[1], f"{LINE}@2 cannot be restored, serving {LINE}@1"), seconds=60)
        local.write_bytes(whole)
        keeper.thaw()
        engine.post("/hint", b"{}")
        world.until(lambda: engine.serves(digests[4]))
