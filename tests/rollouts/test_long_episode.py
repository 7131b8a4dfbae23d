"""A long episode in a short window: 40,000 tokens in contexts of at most 1024. The model is a script."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollmill.chat.format import assistant_message
from rollmill.chat.formats.compact import SPECIAL_TOKENS, CompactFormat
from rollmill.chat.tokenizer import Tokenizer, train_tokenizer
from rollmill.demo.coding import CodingConfig, CodingHarness
from rollmill.demo.coding_tools import tool_schemas
from rollmill.environments.harness import HarnessResult
from rollmill.environments.harnesses.summary import SummaryConfig
from rollmill.environments.task import Task
from rollmill.errors import MachineError
from rollmill.gateway.app import make_app
from rollmill.gateway.config import EngineEndpoint, GatewayConfig
from rollmill.gateway.gateway_parts import GatewayInputs
from rollmill.machines.namespace.client import NamespaceHost
from rollmill.rollouts.gateway_client import GatewayClient
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.training.batching import TokenRule
from rollmill.training.config import RLConfig
from rollmill.training.lineage import Lineage
from rollmill.training.rl.selection import segment_sequences
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Sampling, Trajectory

REQUEST, FILE, ADMIN = "Please sum up.", "log.txt", "admin"
TEXT = "".join(
    f"line {number} of the log says that step {number % 7} took {number * 37 % 91} ms\n" for number in range(400)
)
TOKENS, WINDOW = 40_000, 1024
LONGEST_ANSWER = 60  # tokens
POLICY = {"line": "main", "number": 0, "form": "bf16", "digest": "script"}


class ScriptedEngine:
    """Reads until it has been given TOKENS tokens of context, then says that it is done."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._format, self._request = CompactFormat(tokenizer), tokenizer.encode(REQUEST)
        self._left = TOKENS
        self._known = 0  # tokens of the context that it has answered last
        self.longest = self.summaries = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/health", self._health)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        serves = {"kind": "line", "name": "main", "context": WINDOW}
        state = {"engine": "script", "region": "home", "running": 0, "waiting": 0, "paused": False}
        return web.json_response({**state, "policy": POLICY, "serves": serves})

    async def _generate(self, request: web.Request) -> web.Response:
        context = json.loads(await request.read())["tokens"]
        fits = len(context) + LONGEST_ANSWER <= WINDOW
        tokens = self._answer(context) if fits else []
        self.longest = max(self.longest, len(context) + len(tokens) if fits else 0)
        facts = {"tokens": tokens, "logprobs": [-0.5] * len(tokens), "policy": [0] * len(tokens)}
        facts |= {"policies": [POLICY], "oldest_kv_policy": POLICY, "finish": "stop" if fits else "length"}
        return web.Response(body=json.dumps(facts).encode() + b"\n")

    def _answer(self, context: list[int]) -> list[int]:
        self._left -= len(context) - self._known if len(context) > self._known else len(context)
        self._known = len(context)
        if context[-len(self._request) - 1 : -1] == self._request:
            self.summaries += 1
            text = f"The log was read {self.summaries} times. What remains is to read it again."
            return self._format.render_answer(assistant_message(text, []), tool_schemas())
        call = ("done", "{}") if self._left <= 0 else ("read", json.dumps({"path": FILE}))
        return self._format.render_answer(assistant_message(None, [call]), tool_schemas())


@contextlib.asynccontextmanager
async def open_gateway(
    directory: Path, tokenizer: Tokenizer, engine: ScriptedEngine
) -> AsyncIterator[tuple[GatewayClient, TrajectoryStore]]:
    objects = Objects.open(directory / "store")
    store = TrajectoryStore(open_database(f"sqlite:///{directory}/mill.db"), objects)
    async with TestServer(engine.app()) as served:
        endpoints = [EngineEndpoint(str(served.make_url("")), "home")]
        given = GatewayInputs(
            GatewayConfig(),
            CompactFormat(tokenizer),
            tokenizer,
            store,
            objects,
            directory / "gateway",
            ADMIN,
            endpoints,
        )
        async with TestServer(make_app(given)) as gateway:
            async with GatewayClient(str(gateway.make_url("")).rstrip("/"), ADMIN) as client:
                await client.wait_until_serving(0)
                yield client, store


async def play(directory: Path, tokenizer: Tokenizer, engine: ScriptedEngine) -> tuple[HarnessResult, Trajectory]:
    settings = SummaryConfig(request=REQUEST)
    harness = CodingHarness(CodingConfig(max_turns=1_000_000, max_tool_output=WINDOW // 3, summaries=settings))
    task = Task("log", "Read the log.", files={FILE: TEXT.encode()})
    async with open_gateway(directory, tokenizer, engine) as (client, store), contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(harness.close)
        host = NamespaceHost()
        stack.push_async_callback(host.close)
        machine = await host.create(task.image, task.files)
        stack.push_async_callback(machine.close)
        store.create("long", "g", task.id, ["long"], {})
        key = await client.open_session("long", traffic="rollout")
        sampling = Sampling(max_tokens=WINDOW // 16)
        result = await harness.run(task, machine, base_url=f"{client.base_url}/v1", api_key=key, sampling=sampling)
        await client.seal("long", None)
        return result, store.load("long")


async def test_a_long_episode_in_a_short_window(tmp_path: Path) -> None:
    """Many contexts make one chain, and every sampled token of it is trained on."""
    tokenizer = Tokenizer(train_tokenizer([TEXT, REQUEST], 512, SPECIAL_TOKENS))
    engine = ScriptedEngine(tokenizer)
    try:
        result, trajectory = await play(tmp_path, tokenizer, engine)
    except MachineError as error:
        if error.message.startswith("cannot enter namespaces"):
            pytest.skip(str(error))
        raise
    segments = trajectory.segments
    assert result.stop == "done" and sum(len(segment.tokens) for segment in segments) >= TOKENS
    assert [segment.cause for segment in segments] == ["start", *["summary"] * engine.summaries]
    assert len(segments) >= 40
    rule = TokenRule(Lineage("main", {"main": 0}), base=0, max_staleness=0)
    found, masked = segment_sequences(segments, 1.0, rule, RLConfig())
    sequences = list(filter(None, found))
    assert max(len(sequence.tokens) for sequence in sequences) < engine.longest <= WINDOW
    sampled = sum(int(segment.sampled.sum()) for segment in segments)
    assert sum(len(sequence.targets) for sequence in sequences) == sampled and not masked.total()
