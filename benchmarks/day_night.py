"""Production by day, training by night, on the same engines: `python -m benchmarks.day_night [--quick] [--days N]`.

Production's load is SIMULATED: a curve of a minute per day, arrivals drawn from it. The time of decoding is
SIMULATED too: an engine has PLACES requests at a time, and each token waits TOKEN_S. So engines do not take the cores
from each other, as engines on GPUs do not. Everything else is real: a gateway of production and one of training, engine
processes, weights that a publisher goes on publishing, registrations, and the lender of `rollmill serve`.

Days with and without lending take turns. Figures: production's latency, tokens of rollouts, seconds of every return.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from pydantic import Field

from benchmarks.output import at_least, at_most, finish
from rollmill.config import Config, load_config
from rollmill.demo import CONFIG as DEMO
from rollmill.gateway.config import LendingConfig
from rollmill.inference.embedded.kind import Embedded
from rollmill.inference.engine import EngineContext, GenerateChunk, GenerateRequest
from rollmill.launch.launchers.local import LocalLauncher
from rollmill.launch.services import Target, health, serving
from rollmill.rollouts.gateway_client import GatewayClient
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.runs.shared.addresses import find_gateway
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights.format.tensors import HostTensor
from rollmill.weights.reading.channels import Channels
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.writing.publisher import Publisher

KIND = "benchmarks.day_night:Slowed"
PLACES, TOKEN_S = 4, 0.05  # few requests per second: the cores of the host should not matter
ENGINES = 3  # of production; training has one of its own
ANSWER, ROLLOUT = 16, 48  # tokens
NIGHT, DAY = 0.5, 8.0  # requests of production per second; an engine answers 5
LENDING = LendingConfig(line="rl", quiet_s=2.0, return_s=2.0)
VERSION_S = 4.0  # between two versions of training's line


class SlowedConfig(Config):
    token_s: float = Field(TOKEN_S, description="Seconds that each token of a request waits.")
    places: int = Field(PLACES, description="Requests at a time.")


class Slowed:
    """A kind of engine: the embedded one, with SIMULATED decode time. Each token of a request waits, as on a GPU that
    is the bottleneck. So engines on a few CPU cores speed each other up as engines with a GPU each do."""

    def __init__(self, config: SlowedConfig) -> None:
        self._config = config

    def open(self, context: EngineContext) -> SlowedEngine:
        return SlowedEngine(Embedded().open(context), self._config)


class SlowedEngine:
    """Its health counts requests for as long as they take with the simulated time."""

    def __init__(self, engine: Any, config: SlowedConfig) -> None:
        self._engine, self._token_s, self._places = engine, config.token_s, asyncio.Semaphore(config.places)
        self._asked, self._most = 0, config.places

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def __aenter__(self) -> SlowedEngine:
        await self._engine.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._engine.__aexit__(*error)

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[GenerateChunk]:
        self._asked += 1
        try:
            async with self._places, contextlib.aclosing(self._engine.generate(request, stream=stream)) as chunks:
                async for chunk in chunks:
                    await asyncio.sleep(self._token_s * len(chunk.tokens))
                    yield chunk
        finally:
            self._asked -= 1

    def health(self) -> dict[str, Any]:
        running = min(self._asked, self._most)
        return {**self._engine.health(), "running": running, "waiting": self._asked - running}


def rate(share: float) -> float:
    """Requests per second at this share of a day: night, a morning rush, day, evening."""
    return float(np.interp(share, [0.0, 0.45, 0.5, 0.8, 0.9, 1.0], [NIGHT, NIGHT, DAY, DAY, NIGHT, NIGHT]))


class Day:
    """One day of production beside rollouts that never rest."""

    def __init__(self, run: RunDirectory, service: RunDirectory, seconds: float, seed: int) -> None:
        self._run, self._service, self._seconds, self._random = run, service, seconds, random.Random(seed)
        self.latencies: list[float] = []
        self.failed = self.rollout_tokens = self.rollouts_failed = 0

    async def pass_(self, rollouts: int) -> None:
        key = self._run.secrets["rollout_key"]
        limit = aiohttp.TCPConnector(limit=0)
        async with (
            GatewayClient(lambda: find_gateway(self._run), key) as gateway,
            aiohttp.ClientSession(connector=limit) as client,
        ):
            await gateway.wait_until_serving(0, patience_s=300)
            working = [asyncio.create_task(self._work(gateway, client, number)) for number in range(rollouts)]
            asking: list[asyncio.Task[None]] = []
            began = time.monotonic()
            while (passed := time.monotonic() - began) < self._seconds:
                asking.append(asyncio.create_task(self._ask(client, len(asking))))
                await asyncio.sleep(self._random.expovariate(rate(passed / self._seconds)))
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            await asyncio.gather(*asking)

    async def _ask(self, client: aiohttp.ClientSession, number: int) -> None:
        body = {"messages": [{"role": "user", "content": f"Question {number}."}], "max_tokens": ANSWER}
        headers = {"Authorization": f"Bearer {self._service.secrets['production_key']}"}
        began = time.perf_counter()
        url = f"{self._service.url('gateway')}/v1/chat/completions"
        try:
            async with client.post(url, json=body, headers=headers) as answer:
                told = await answer.json()
        except (aiohttp.ClientError, ValueError):
            self.failed += 1
            return
        if answer.status != 200:
            self.failed += 1
            return
        missing = ANSWER - told["usage"]["completion_tokens"]  # an answer that ended early is as if it had not
        self.latencies.append(time.perf_counter() - began + missing * TOKEN_S)

    async def _work(self, gateway: GatewayClient, client: aiohttp.ClientSession, number: int) -> None:
        for turn in range(1_000_000):
            trajectory = f"{time.time_ns():x}-{number}-{turn}"
            key = await gateway.open_session(trajectory)
            body = {"messages": [{"role": "user", "content": f"{number} {turn}"}], "max_tokens": ROLLOUT}
            url, headers = f"{gateway.base_url}/v1/chat/completions", {"Authorization": f"Bearer {key}"}
            with contextlib.suppress(aiohttp.ClientError):
                async with client.post(url, json=body, headers=headers) as answer:
                    told = await answer.json()
                    good = answer.status == 200
                    self.rollout_tokens += told["usage"]["completion_tokens"] if good else 0
                    self.rollouts_failed += not good
            with contextlib.suppress(Exception):
                await gateway.abandon(trajectory)


def make_run(root: Path) -> tuple[RunDirectory, Version]:
    """A run with the weights of production, and a line `rl` that begins with them."""
    settings = (
        f"modules='{Path(__file__).parents[1]}'",
        f"engines=[{{kind='{KIND}',count={ENGINES},token_s={TOKEN_S},places={PLACES}}}]",
        f"engine.max_batch={PLACES}",
        "gateway.workers=1",
        "stages.midtrain.steps=1",
    )
    run = RunDirectory.create(root, load_config(RunConfig, DEMO, ["name=day-night", *settings]))
    subprocess.run([sys.executable, "-m", "rollmill.launch.role", "trainer", str(run.path), "midtrain"], check=True)
    store = WeightStore(Objects.open(run.home_store))
    head = store.head("midtrain", run.config.form)
    assert head is not None
    live = Version("midtrain", head)
    Channels(store.objects).move("live", live)
    return run, live


async def publish(run: RunDirectory, live: Version) -> None:
    """Training's line grows, as if a trainer worked. Each version differs from the last in a few values."""
    store = WeightStore(Objects.open(run.home_store))
    held = store.hold(live, run.config.form).tensors
    tensors = {name: HostTensor(each.dtype, each.shape, each.data.copy()) for name, each in held.items()}
    head = store.head("rl", run.config.form)
    publisher, number = Publisher(store, "rl", form=run.config.form), 0 if head is None else head + 1
    changed = max((each.data for each in tensors.values()), key=len)
    while True:
        changed[2 * number % len(changed)] ^= 1
        parent = Version("rl", number - 1) if number else live
        await asyncio.to_thread(publisher.publish, number, tensors, parent)
        number += 1
        await asyncio.sleep(VERSION_S)


@contextlib.contextmanager
def training(run: RunDirectory) -> Iterator[LocalLauncher]:
    """The gateway of training and one engine of its own."""
    launcher = LocalLauncher(run)
    try:
        launcher.start("gateway", service=True)
        launcher.start(run.config.engine_specs[0].role, "line", "rl", run.config.form, service=True)
        yield launcher
    finally:
        launcher.stop()


async def one_day(run: RunDirectory, live: Version, seconds: float, seed: int) -> tuple[Day, list[dict[str, Any]]]:
    publishing = asyncio.create_task(publish(run, live))
    try:
        target = Target("channel", "live", live, run.config.form)
        with training(run) as trainer, serving(run, target) as (service, cluster):
            day = Day(run, service, seconds, seed)
            while sum(each["alive"] for each in (health(service) or {}).get("engines", [])) < ENGINES:
                cluster.watch()
                await asyncio.sleep(0.2)
            passing = asyncio.create_task(day.pass_(4 * (ENGINES + 1)))
            while not passing.done():
                trainer.watch()
                cluster.watch()
                await asyncio.wait([passing], timeout=0.2)
            passing.result()
            lines = [line for file in service.events.glob("*") for line in file.read_text().splitlines()]
            return day, [event for event in map(json.loads, lines) if event["kind"] in ("lend", "returned")]
    finally:
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short day each")
    parser.add_argument("--days", type=int, default=3, help="days with and days without lending")
    given = parser.parse_args()
    days, seconds = (1, 30.0) if given.quick else (given.days, 60.0)
    passed: dict[str, list[Day]] = {"apart": [], "lent": []}
    events: list[dict[str, Any]] = []
    figures: dict[str, float] = {"load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as directory:
        run, live = make_run(Path(directory))
        lending = replace(run, config=run.config.model_copy(update={"lending": LENDING}))
        for number in range(days):
            for name, which in (("apart", run), ("lent", lending)):
                day, told = asyncio.run(one_day(which, live, seconds, number))
                passed[name].append(day)
                events += told
                p99 = float(np.percentile(day.latencies, 99))
                print(
                    f"day {number + 1}, {name}: {len(day.latencies)} answers, p99 {p99:.3f} s, "
                    f"{day.failed} failed; {day.rollout_tokens} tokens of rollouts (load and decode time simulated)"
                )
    tokens = {name: sum(day.rollout_tokens for day in each) for name, each in passed.items()}
    for name, each in passed.items():
        whole = [latency for day in each for latency in day.latencies]
        figures |= {f"p{part}_{name}_s": float(np.percentile(whole, part)) for part in (50, 99)}
        figures[f"p99_spread_{name}_s"] = float(np.ptp([np.percentile(day.latencies, 99) for day in each]))
        figures |= {f"answers_{name}": len(whole), f"failed_{name}": sum(day.failed for day in each)}
        figures[f"rollout_tokens_per_s_{name}"] = tokens[name] / (days * seconds)
        figures[f"rollouts_failed_{name}"] = sum(day.rollouts_failed for day in each)
    returns = [event["seconds"] for event in events if event["kind"] == "returned"]
    figures |= {"loans": sum(event["kind"] == "lend" for event in events), "returns": len(returns)}
    figures |= {"slowest_return_s": max(returns, default=0.0), "median_return_s": statistics.median(returns or [0.0])}
    figures["load_after"] = os.getloadavg()[0]
    bars = {
        "p99_ratio": at_most(figures["p99_lent_s"] / figures["p99_apart_s"], 1.1),
        "production_failed": at_most(figures["failed_lent"], 0),
        "rollout_tokens_ratio": at_least(tokens["lent"] / max(tokens["apart"], 1), 1.2),
        "slowest_return_s": at_most(figures["slowest_return_s"], LENDING.return_s),
        "returns": at_least(len(returns), days),
    }
    finish("day_night", figures, bars)


if __name__ == "__main__":
    main()
