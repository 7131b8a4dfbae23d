"""One episode of a million tokens in a window of 8192: memory and time stay bounded. The model is a SCRIPT.

    python -m benchmarks.long_episode [--quick] [--tokens 1000000] [--window 8192]

Real: the coding harness with summaries, the machine, the gateway with its log and store, the trainer's batching.
Scripted: the engine. It reads one long file again and again, sums up when it is asked to, and refuses any context that
does not fit the window.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.output import at_least, at_most, finish
from rollmill.chat.format import assistant_message
from rollmill.chat.formats.compact import SPECIAL_TOKENS, CompactFormat
from rollmill.chat.tokenizer import Tokenizer, train_tokenizer
from rollmill.environments.harness import HarnessResult
from rollmill.environments.harnesses.coding import CodingHarness, HarnessConfig
from rollmill.environments.harnesses.summary import SummaryConfig
from rollmill.environments.harnesses.tools import tool_schemas
from rollmill.environments.task import Task
from rollmill.gateway.app import make_app
from rollmill.gateway.config import EngineEndpoint, GatewayConfig
from rollmill.machines.namespace.client import NamespaceHost
from rollmill.rollouts.gateway_client import GatewayClient
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.training.batching import TokenRule
from rollmill.training.config import RLConfig
from rollmill.training.lineage import Lineage
from rollmill.training.rl.selection import trainable_sequences
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Sampling, Trajectory

REQUEST, FILE, ADMIN = "Please sum up.", "log.txt", "benchmark-admin"
TEXT = "".join(
    f"line {number} of the log says that step {number % 7} took {number * 37 % 91} ms\n" for number in range(400)
)
LONGEST_ANSWER = 60  # tokens
_POLICY = {"line": "main", "number": 0, "form": "bf16", "digest": "script"}


class ScriptedEngine:
    """Reads until it has been given `tokens` tokens of context, then says that it is done."""

    def __init__(self, tokenizer: Tokenizer, tokens: int, window: int) -> None:
        self._format, self._request = CompactFormat(tokenizer), tokenizer.encode(REQUEST)
        self._left, self._window = tokens, window
        self._known = 0  # tokens of the context that it has answered last
        self.longest = self.summaries = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/health", self._health)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        serves = {"kind": "line", "name": "main", "context": self._window}
        state = {"engine": "script", "region": "home", "running": 0, "waiting": 0, "paused": False}
        return web.json_response({**state, "policy": _POLICY, "serves": serves})

    async def _generate(self, request: web.Request) -> web.Response:
        context = json.loads(await request.read())["tokens"]
        fits = len(context) + LONGEST_ANSWER <= self._window
        tokens = self._answer(context) if fits else []
        self.longest = max(self.longest, len(context) + len(tokens) if fits else 0)
        facts = {"tokens": tokens, "logprobs": [-0.5] * len(tokens), "policy": [0] * len(tokens)}
        facts |= {"policies": [_POLICY], "oldest_kv_policy": _POLICY, "finish": "stop" if fits else "length"}
        return web.Response(body=json.dumps(facts).encode() + b"\n")

    def _answer(self, context: list[int]) -> list[int]:
        self._left -= len(context) - self._known if len(context) > self._known else len(context)
        self._known = len(context)
        if context[-len(self._request) - 1 : -1] == self._request:
            self.summaries += 1
            text = f"The log was read {self.summaries} times. What remains is to read it again."
            return self._format.render_answer(assistant_message(text, []), tool_schemas())
        call = ("done", {}) if self._left <= 0 else ("read", {"path": FILE})
        return self._format.render_answer(assistant_message(None, [(call[0], json.dumps(call[1]))]), tool_schemas())


@dataclass
class Watch:
    """CPU seconds of every turn, and the memory of this process after it. Wall-clock time would tell what else runs."""

    seconds: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    _last: float = field(default_factory=time.process_time)

    def tick(self) -> None:
        now = time.process_time()
        self.seconds.append(now - self._last)
        self.bytes.append(resident())
        self._last = now


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@dataclass(frozen=True)
class Played:
    result: HarnessResult
    trajectory: Trajectory
    engine: ScriptedEngine
    watch: Watch


async def play(directory: Path, tokens: int, window: int) -> Played:
    tokenizer = Tokenizer(train_tokenizer([TEXT, REQUEST], 512, SPECIAL_TOKENS))
    engine, watch = ScriptedEngine(tokenizer, tokens, window), Watch()
    settings = SummaryConfig(request=REQUEST)
    config = HarnessConfig(max_turns=1_000_000, max_tool_output=window // 3, summaries=settings)
    harness = Ticking(config, watch)
    task = Task("log", "Read the log.", files={FILE: TEXT.encode()})
    async with open_gateway(directory, tokenizer, engine) as (client, store), contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(harness.close)
        host = NamespaceHost()
        stack.push_async_callback(host.close)
        machine = await host.create(task.image, task.files)
        stack.push_async_callback(machine.close)
        store.create("long", "g", task.id, ["long"], {})
        key = await client.open_session("long", traffic="rollout")
        sampling = Sampling(max_tokens=window // 16)
        result = await harness.run(task, machine, base_url=f"{client.base_url}/v1", api_key=key, sampling=sampling)
        await client.seal("long", None)
        return Played(result, store.load("long"), engine, watch)


class Ticking(CodingHarness):
    """Notes the time of every tool call."""

    def __init__(self, config: HarnessConfig, watch: Watch) -> None:
        super().__init__(config)
        self._watch = watch

    async def _call(self, machine: Any, call: Any) -> str | None:
        self._watch.tick()
        return await super()._call(machine, call)


@contextlib.asynccontextmanager
async def open_gateway(
    directory: Path, tokenizer: Tokenizer, engine: ScriptedEngine
) -> AsyncIterator[tuple[GatewayClient, TrajectoryStore]]:
    objects = Objects.open(directory / "store")
    store = TrajectoryStore(open_database(f"sqlite:///{directory}/mill.db"), objects)
    async with TestServer(engine.app()) as served:
        endpoints = [EngineEndpoint(str(served.make_url("")), "home")]
        parts = (CompactFormat(tokenizer), tokenizer, endpoints, store, objects, directory / "gateway", ADMIN)
        async with TestServer(make_app(GatewayConfig(), *parts)) as gateway:
            async with GatewayClient(str(gateway.make_url("")).rstrip("/"), ADMIN) as client:
                await client.wait_until_serving(0)
                yield client, store


def figures_of(played: Played) -> dict[str, float]:
    segments = played.trajectory.segments
    rule = TokenRule(Lineage("main", {"main": 0}), base=0, max_staleness=0)
    sequences, masked = trainable_sequences(segments, 1.0, rule, RLConfig())
    seconds, tenth = played.watch.seconds[1:], max(1, len(played.watch.seconds) // 10)
    return {
        "tokens": sum(len(segment.tokens) for segment in segments),
        "contexts": len(segments),
        "turns": played.result.turns,
        "longest_context": played.engine.longest,
        "longest_sequence": max(len(sequence.tokens) for sequence in sequences),
        "trained_tokens": sum(len(sequence.targets) for sequence in sequences),
        "sampled_tokens": sum(int(segment.sampled.sum()) for segment in segments),
        "masked_tokens": sum(Counter(masked).values()),
        "turn_cpu_ms_first_tenth": 1000 * statistics.median(seconds[:tenth]),
        "turn_cpu_ms_last_tenth": 1000 * statistics.median(seconds[-tenth:]),
        "memory_growth_mb": (max(played.watch.bytes) - played.watch.bytes[0]) / 1e6,
        "cpu_seconds": sum(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the tokens")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--window", type=int, default=8192)
    arguments = parser.parse_args()
    tokens = arguments.tokens // 10 if arguments.quick else arguments.tokens
    with tempfile.TemporaryDirectory() as folder:
        figures = figures_of(asyncio.run(play(Path(folder), tokens, arguments.window)))
    for name, value in figures.items():
        print(f"{name:22} {value:,.1f}")
    bars = {
        "tokens": at_least(figures["tokens"], tokens),
        "longest_context": at_most(figures["longest_context"], arguments.window),
        "every_answer_is_trained_on": at_least(figures["trained_tokens"], figures["sampled_tokens"]),
        "bytes_per_token": at_most(1e6 * figures["memory_growth_mb"] / figures["tokens"], 200),
        "last_turns_over_first": at_most(figures["turn_cpu_ms_last_tenth"] / figures["turn_cpu_ms_first_tenth"], 2),
    }
    finish("long_episode", figures, bars)


if __name__ == "__main__":
    main()
