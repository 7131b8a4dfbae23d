"""Several engines against one, Ray against local, an engine lost, an engine added, and what a step costs in S3.

    python -m benchmarks.fleet [--quick] [--no-ray] [--base RUN] [--steps N] [--engines 1 2 4] [--repeats N]

The time of decoding is a SIMULATION: an engine has PLACES requests at a time, and each token of a request waits
TOKEN_S, as on a GPU that is the bottleneck. Everything else is real: gateway, sessions, records, engine processes, an
S3 server, Ray. So the ratios say what gateway, launcher and registration cost, not how fast a GPU is: say "simulated
decode time" wherever they are quoted.

Clients ask as rollouts do and never wait: there are always more of them than places. Launchers take turns. Every figure
is the median of the repeats, beside its spread: the largest over the smallest, minus 1. A few RL steps are trained too,
and objects and bytes in S3 are counted; --base names a mid-trained run for them, otherwise one is made.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import Field
from rich.console import Console

from benchmarks.output import at_least, at_most, finish
from rollmill.cluster.addresses import find_gateway
from rollmill.cluster.drive import drive
from rollmill.cluster.launcher import Launcher
from rollmill.cluster.launchers.local import LocalLauncher
from rollmill.cluster.ports import free_ports
from rollmill.cluster.run import RunConfig, RunDirectory
from rollmill.cluster.scale import Engines, ask_scale
from rollmill.config import Config, load_config
from rollmill.demo import CONFIG as DEMO
from rollmill.inference.embedded.kind import Embedded
from rollmill.inference.engine import EngineContext, GenerateChunk, GenerateRequest
from rollmill.kinds import build
from rollmill.rollouts.client import GatewayClient
from rollmill.storage.objects import Objects

PLACES, TOKEN_S, TOKENS = 4, 0.05, 32
KEYS = {"AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
BRIEF = ["evals.tasks=1", "evals.fresh_tasks=0", "evals.family_tasks=0", "evals.greedy=false"]
CONSOLE = Console(highlight=False)


class SlowedConfig(Config):
    token_s: float = Field(TOKEN_S, description="Seconds that each token of a request waits.")
    places: int = Field(PLACES, description="Requests at a time.")


class Slowed:
    """A kind of engine: the embedded one, with simulated decode time."""

    def __init__(self, config: SlowedConfig) -> None:
        self._config = config

    def open(self, context: EngineContext) -> SlowedEngine:
        return SlowedEngine(Embedded().open(context), self._config)


class SlowedEngine:
    def __init__(self, engine: Any, config: SlowedConfig) -> None:
        self._engine, self._token_s, self._places = engine, config.token_s, asyncio.Semaphore(config.places)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def __aenter__(self) -> SlowedEngine:
        await self._engine.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._engine.__aexit__(*error)

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[GenerateChunk]:
        async with self._places, contextlib.aclosing(self._engine.generate(request, stream=stream)) as chunks:
            async for chunk in chunks:
                await asyncio.sleep(self._token_s * len(chunk.tokens))
                yield chunk


class Clients:
    """Rollouts of one turn each. `done` counts those that were answered."""

    def __init__(self, run: RunDirectory, count: int) -> None:
        self._run, self._count = run, count
        self.done = self.failed = 0

    async def run(self, until: Callable[[], bool], tick: Callable[[], None]) -> None:
        key = self._run.secrets["rollout_key"]
        async with GatewayClient(lambda: find_gateway(self._run), key) as gateway, aiohttp.ClientSession() as http_:
            await gateway.wait_until_serving(0, patience_s=300)
            tasks = [asyncio.create_task(self._client(gateway, http_, number)) for number in range(self._count)]
            while not until():
                tick()
                await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _client(self, gateway: GatewayClient, http_: aiohttp.ClientSession, number: int) -> None:
        for turn in range(1_000_000):
            trajectory = f"{time.time_ns():x}-{number}-{turn}"
            key = await gateway.open_session(trajectory)
            body = {"messages": [{"role": "user", "content": f"{number} {turn}"}], "max_tokens": TOKENS}
            headers = {"Authorization": f"Bearer {key}"}
            url = f"{gateway.base_url}/v1/chat/completions"
            with contextlib.suppress(aiohttp.ClientError):
                async with http_.post(url, json=body, headers=headers) as answer:
                    self.done += answer.status == 200
                    self.failed += answer.status != 200
            with contextlib.suppress(Exception):
                await gateway.abandon(trajectory)


def create(root: Path, name: str, *overrides: str) -> RunDirectory:
    return RunDirectory.create(root, load_config(RunConfig, DEMO, [*BRIEF, f"name={name}", *overrides]))


def fleet_run(root: Path, name: str, bucket: str, *overrides: str) -> RunDirectory:
    """A run with one published version, whose engines are slowed."""
    run = create(
        root,
        name,
        f"store='{bucket}'",
        f"database='sqlite:///{root / name}.db'",
        f"modules='{Path(__file__).parents[1]}'",
        "engines=[{kind='benchmarks.fleet:Slowed'}]",
        "stages.midtrain.steps=1",
        *overrides,
    )
    subprocess.run([sys.executable, "-m", "rollmill.cluster.role", "trainer", str(run.path), "midtrain"], check=True)
    return run


@contextlib.contextmanager
def served(run: RunDirectory, engines: int, ray: bool) -> Iterator[tuple[RunDirectory, Launcher, Engines]]:
    ask_scale(run, [f"engines={engines}"])
    launcher: Launcher = build(run.config.cluster).open(run) if ray else LocalLauncher(run)
    try:
        launcher.start("gateway", service=True)
        fleet = Engines(run, launcher, ("line", "midtrain", run.config.form))
        fleet.adjust()
        yield run, launcher, fleet
    finally:
        launcher.stop_roles() if ray else launcher.stop()


def alive(run: RunDirectory) -> int:
    """How many engines the gateway can ask now."""
    import json

    with contextlib.suppress(OSError, ValueError, KeyError), urllib.request.urlopen(f"{find_gateway(run)}/health") as a:
        return sum(engine["alive"] for engine in json.loads(a.read())["engines"])
    return 0


def rate(run: RunDirectory, engines: int, seconds: float, ray: bool = False) -> float:
    """Answered rollouts per second, in steady state."""
    with served(run, engines, ray) as (_, launcher, fleet):
        clients = Clients(run, 2 * PLACES * engines)
        marks: list[tuple[float, int]] = []

        def until() -> bool:
            if not marks:
                if clients.done >= 2 * PLACES * engines and alive(run) == engines:
                    marks.append((time.monotonic(), clients.done))
                return False
            return time.monotonic() - marks[0][0] > seconds

        def tick() -> None:
            launcher.watch()
            fleet.adjust()

        asyncio.run(clients.run(until, tick))
        began, before = marks[0]
        return (clients.done - before) / (time.monotonic() - began)


def disturbed(run: RunDirectory, ray: bool = False) -> dict[str, float]:
    """Seconds from the death of one of two engines to two that serve, and from `scale` to a third one's first token."""
    with served(run, 2, ray) as (_, launcher, fleet):
        clients, figures, state = Clients(run, 8), {}, {"since": 0.0, "phase": 0.0}

        def until() -> bool:
            now, phase = time.monotonic(), state["phase"]
            if phase == 0 and clients.done >= 8 and alive(run) == 2:
                os.kill(_pid(run, "engine-home-2"), signal.SIGKILL)
                state.update(since=now, phase=1)
            elif phase == 1 and alive(run) < 2:
                state["phase"] = 2
            elif phase == 2 and alive(run) == 2:
                figures["lost_to_full_s"] = now - state["since"]
                ask_scale(run, ["engines=3"])
                state.update(since=now, phase=3)
            elif phase == 3 and _sampled(run, "engine-home-3"):
                figures["scale_to_token_s"] = now - state["since"]
                return True
            return False

        def tick() -> None:
            launcher.watch()
            fleet.adjust()

        asyncio.run(clients.run(until, tick))
        return {**figures, "failed_requests": float(clients.failed)}


def _pid(run: RunDirectory, role: str) -> int:
    title = f"rollmill {role} ".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found = (entry / "cmdline").read_bytes()
            if found.startswith(title) and (str(run.path).encode() in found or run.id.encode() in found):
                return int(entry.name)
    raise SystemExit(f"{role} does not run")


def _sampled(run: RunDirectory, engine: str) -> bool:
    """Whether an engine has sampled a token, as the gateway's and its own metrics tell."""
    from rollmill.gateway.routing.fleet import Fleet
    from rollmill.storage.database import open_database

    fleet = Fleet(open_database(run.database_url), run.fleet, "")
    url = next((each.url for each in fleet.registered() if each.name == engine), None)
    if url is None:
        return False
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
        return any(
            line.startswith("rollmill_engine_sampled_tokens_total") and float(line.split()[-1]) > 0 for line in lines
        )
    return False


def store_costs(root: Path, bucket: str, base: RunDirectory, steps: int) -> dict[str, float]:
    """Objects and bytes that RL steps add to S3: all, weights alone, trajectories alone."""
    run = create(root, "steps", f"store='{bucket}'", f"stages.rl.steps={steps}", "stages.rl.groups_per_step=2")
    source, target = Objects.open(base.home_store), Objects.open(run.home_store)
    for key in source.list(""):
        target.create(key, source.get(key))
    before = {key: target.head(key) or 0 for key in target.list("")}
    drive(run)
    added = {key: target.head(key) or 0 for key in target.list("") if key not in before}
    figures: dict[str, float] = {}
    for name, prefix in (("all", ""), ("weights", "weights/"), ("trajectories", "trajectories/")):
        sizes = [size for key, size in added.items() if key.startswith(prefix)]
        figures[f"objects_per_step_{name}"] = len(sizes) / steps
        figures[f"bytes_per_step_{name}"] = sum(sizes) / steps
    return figures


@contextlib.contextmanager
def s3() -> Iterator[str]:
    """A moto server. Yields the URL of a prefix in a bucket."""
    [port] = free_ports(1)
    server = subprocess.Popen(
        [str(Path(sys.executable).parent / "moto_server"), "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                connection.request("PUT", "/fleet")
                connection.getresponse()
                break
            time.sleep(0.1)
        os.environ.update({**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"})
        yield "s3://fleet/runs"
    finally:
        server.kill()
        server.wait()


@contextlib.contextmanager
def ray_node() -> Iterator[str]:
    """A Ray cluster of one node: this host. Yields its address."""
    port = next(port for port in free_ports(50) if port > 20_000)  # Ray gives lower ones to its workers
    program = str(Path(sys.executable).parent / "ray")
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "300"}
    environment = {**os.environ, **settings, "PYTHONPATH": os.getcwd()}
    options = ["--num-cpus=16", "--include-dashboard=false", "--include-log-monitor=false", "--block"]
    with tempfile.TemporaryFile() as log:
        node = subprocess.Popen(
            [program, "start", "--head", f"--port={port}", "--node-ip-address=127.0.0.2", *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            while b"Ray runtime started" not in os.pread(log.fileno(), 1 << 20, 0):
                if node.poll() is not None:
                    raise SystemExit(f"Ray does not start: {os.pread(log.fileno(), 1 << 20, 0).decode()}")
                time.sleep(0.2)
            yield f"127.0.0.2:{port}"
        finally:
            import ray

            ray.shutdown()  # a driver whose cluster has ended aborts the process, and nobody sees why
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGTERM)
            node.wait()


def midtrained(root: Path) -> RunDirectory:
    """A run whose first stage is trained, for RL steps that have something to learn."""
    run = create(root, "base", "stages.midtrain.steps=140", "stages.midtrain.training.threads=1")
    subprocess.run([sys.executable, "-m", "rollmill.cluster.role", "trainer", str(run.path), "midtrain"], check=True)
    return run


def measure(
    measured: dict[str, list[float]], run: RunDirectory, engines: Sequence[int], seconds: float, where: str
) -> None:
    """Append one repeat of everything that is measured with one launcher."""
    for count in engines:
        measured.setdefault(f"samples_per_s_{where}_{count}", []).append(rate(run, count, seconds, where == "ray"))
    for name, value in disturbed(run, where == "ray").items():
        measured.setdefault(f"{name}_{where}", []).append(value)
    CONSOLE.print(
        f"{where}: " + ", ".join(f"{name} {each[-1]:.2f}" for name, each in measured.items() if where in name)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat, no RL steps")
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--base", type=Path, help="a mid-trained run, for what a step costs in S3")
    parser.add_argument("--steps", type=int, default=6, help="RL steps, for what a step costs in S3; 0: none")
    parser.add_argument(
        "--engines", type=int, nargs="+", default=[1, 2, 4], help="numbers of engines to compare; has 2"
    )
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measured rate")
    arguments = parser.parse_args()
    seconds, repeats = (5.0, 1) if arguments.quick else (arguments.seconds, arguments.repeats)
    figures: dict[str, float] = {"load_before": os.getloadavg()[0], "repeats": repeats}
    measured: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        root, bucket = Path(directory), stack.enter_context(s3())
        local = fleet_run(root, "fleet", bucket)
        there = None
        if not arguments.no_ray:
            address = stack.enter_context(ray_node())
            cluster = f"cluster={{kind='ray',address='{address}',scratch='{root}/nodes'}}"
            there = replace(fleet_run(root, "ray", bucket, cluster), ports={})  # its gateway says where it is
        for _ in range(repeats):
            measure(measured, local, arguments.engines, seconds, "local")
            if there is not None:
                measure(measured, there, (2,), seconds, "ray")
        if arguments.steps and not arguments.quick:
            base = RunDirectory.open(arguments.base) if arguments.base is not None else midtrained(root)
            figures |= store_costs(root, bucket, base, arguments.steps)
    for name, each in measured.items():
        figures[name] = statistics.median(each)
        figures[f"spread_{name}"] = max(each) / min(each) - 1 if min(each) else 0.0
    figures["load_after"] = os.getloadavg()[0]
    bars = {
        f"speedup_{engines}": at_least(
            figures[f"samples_per_s_local_{engines}"] / figures["samples_per_s_local_1"], bar
        )
        for engines, bar in ((2, 1.8), (4, 3.4))
        if {1, engines} <= set(arguments.engines)
    }
    if there is not None:
        figures["ray_overhead"] = figures["samples_per_s_local_2"] / figures["samples_per_s_ray_2"] - 1
        spread = max(figures["spread_samples_per_s_local_2"], figures["spread_samples_per_s_ray_2"])
        bars["ray_overhead"] = at_most(figures["ray_overhead"], max(0.03, spread))
    finish("fleet", figures, bars)


if __name__ == "__main__":
    main()
