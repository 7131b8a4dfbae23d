"""Several engines against one, Ray against local, an engine lost, an engine added, and what a step costs in S3.

    python -m benchmarks.fleet [--quick] [--only engines ray steps] [--base RUN] [--repeats N]

Three parts, each shorter than 5 minutes on two quiet cores:

    engines   on this host: the rate of one engine; `scale` to two, until the second one's first token; their rate; one
              is killed, until its successor's first token; the rate of four
    ray       the same with one and two engines, here and on Ray in turns; every second repeat begins with Ray
    steps     objects and bytes that RL steps add to S3; --base names a mid-trained run, otherwise one is made

The time of decoding is a SIMULATION (fleet_engine.py). Everything else is real: gateway, sessions, records, engine
processes, an S3 server, Ray. So the ratios say what gateway, launcher and registration cost, not how fast a GPU is: say
"simulated decode time" wherever they are quoted.

Clients ask as rollouts do and never wait: there are always twice as many as places. Every figure is the median of the
repeats, beside its spread: the largest over the smallest, minus 1. Ratios are made within a repeat.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from benchmarks.fleet_engine import KIND, PLACES
from benchmarks.fleet_places import ray_node, s3
from benchmarks.output import at_least, at_most, finish
from rollmill.config import load_config
from rollmill.demo import CONFIG as DEMO
from rollmill.gateway.routing.fleet import Fleet
from rollmill.kinds import build
from rollmill.launch.launcher import Launcher
from rollmill.launch.rescale import Engines, ask_scale
from rollmill.launch.supervise import drive
from rollmill.rollouts.gateway_client import GatewayClient
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.runs.shared.addresses import find_gateway
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects

TOKENS = 16
BRIEF = ["evals.tasks=1", "evals.fresh_tasks=0", "evals.family_tasks=0", "evals.greedy=false"]
PARTS = ("engines", "ray", "steps")
CONSOLE = Console(highlight=False)


class Clients:
    """Rollouts of one turn each. `done` counts those that were answered."""

    def __init__(self, run: RunDirectory) -> None:
        self._gateway = GatewayClient(lambda: find_gateway(run), run.secrets["rollout_key"])
        self._tasks: list[asyncio.Task[None]] = []
        self.done = self.failed = 0

    async def __aenter__(self) -> Clients:
        self._http = aiohttp.ClientSession()
        await self._gateway.__aenter__()
        await self._gateway.wait_until_serving(0, patience_s=300)
        return self

    async def __aexit__(self, *error: Any) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._gateway.__aexit__(*error)
        await self._http.close()

    def ask(self, engines: int) -> None:
        """From now on there are enough clients for `engines` engines."""
        for number in range(len(self._tasks), 2 * PLACES * engines):
            self._tasks.append(asyncio.create_task(self._client(number)))

    async def rate(self, seconds: float) -> float:
        """Answered rollouts per second, in steady state: begins when every client had an answer on average."""
        begin = self.done + len(self._tasks)
        await until(lambda: self.done >= begin)
        began, before = time.monotonic(), self.done
        await asyncio.sleep(seconds)
        return (self.done - before) / (time.monotonic() - began)

    async def _client(self, number: int) -> None:
        for turn in range(1_000_000):
            trajectory = f"{time.time_ns():x}-{number}-{turn}"
            key = await self._gateway.open_session(trajectory)
            body = {"messages": [{"role": "user", "content": f"{number} {turn}"}], "max_tokens": TOKENS}
            headers = {"Authorization": f"Bearer {key}"}
            url = f"{self._gateway.base_url}/v1/chat/completions"
            with contextlib.suppress(aiohttp.ClientError):
                async with self._http.post(url, json=body, headers=headers) as answer:
                    self.done += answer.status == 200
                    self.failed += answer.status != 200
            with contextlib.suppress(Exception):
                await self._gateway.abandon(trajectory)


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
        f"engines=[{{kind='{KIND}'}}]",
        "stages.midtrain.steps=1",
        *overrides,
    )
    subprocess.run([sys.executable, "-m", "rollmill.launch.role", "trainer", str(run.path), "midtrain"], check=True)
    return run


async def turn(run: RunDirectory, launcher: Launcher, counts: Sequence[int], seconds: float) -> dict[str, float]:
    """Everything that is measured with one launcher, once. The launcher has started nothing yet."""
    ask_scale(run, [f"engines={counts[0]}"])
    launcher.start("gateway", service=True)
    seen, figures = Seen(run), {}
    async with tended(launcher, Engines(run, launcher, ("line", "midtrain", run.config.form))), Clients(run) as clients:
        for count in counts:
            began = time.monotonic()
            if count != counts[0]:
                ask_scale(run, [f"engines={count}"])
            clients.ask(count)
            for number in range(1, count + 1):
                await until(lambda number=number: seen.samples(number))  # type: ignore[misc]
                if count == 2 and number == 2 and count != counts[0]:
                    figures["scale_to_token_s"] = time.monotonic() - began
            figures[f"samples_per_s_{count}"] = await clients.rate(seconds)
            if count == 2:
                figures["lost_to_full_s"] = await lose_one(seen)
        return {**figures, "failed_requests": float(clients.failed)}


async def lose_one(seen: Seen) -> float:
    """Seconds from the death of the second engine to its successor's first token."""
    began, killed = time.monotonic(), seen.pid(2)
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    await until(lambda: seen.pid(2) not in (None, killed) and seen.samples(2))
    return time.monotonic() - began


@contextlib.asynccontextmanager
async def tended(launcher: Launcher, engines: Engines) -> AsyncIterator[None]:
    """What a supervisor does, in a thread: it must not delay the clients of this process."""
    ended = threading.Event()

    def tend() -> None:
        while not ended.wait(0.2):
            engines.adjust()
            launcher.watch()

    tending = asyncio.create_task(asyncio.to_thread(tend))
    try:
        yield
    finally:
        ended.set()
        await tending


async def until(condition: Callable[[], object]) -> None:
    while not await asyncio.to_thread(condition):  # noqa: ASYNC110
        await asyncio.sleep(0.1)


class Seen:
    """What the database and the system tell about the engines of a run."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._fleet = run, Fleet(open_database(run.database_url), run.fleet, "")

    def samples(self, number: int) -> bool:
        """Whether an engine has sampled a token, as its own metrics tell."""
        name = _engine(number)
        url = next((each.url for each in self._fleet.registered() if each.name == name), None)
        if url is None:
            return False
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
            sampled = [line for line in lines if line.startswith("rollmill_engine_sampled_tokens_total")]
            return any(float(line.split()[-1]) > 0 for line in sampled)
        return False

    def pid(self, number: int) -> int | None:
        title, places = f"rollmill {_engine(number)} ".encode(), (str(self._run.path).encode(), self._run.id.encode())
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                found = (entry / "cmdline").read_bytes()
                if found.startswith(title) and any(place in found for place in places):
                    return int(entry.name)
        return None


def _engine(number: int) -> str:
    return "engine-home" if number == 1 else f"engine-home-{number}"


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


def midtrained(root: Path) -> RunDirectory:
    """A run whose first stage is trained, for RL steps that have something to learn."""
    run = create(root, "base", "stages.midtrain.steps=140", "stages.midtrain.training.threads=1")
    subprocess.run([sys.executable, "-m", "rollmill.launch.role", "trainer", str(run.path), "midtrain"], check=True)
    return run


def measure(
    measured: dict[str, list[float]], run: RunDirectory, counts: Sequence[int], seconds: float, where: str
) -> None:
    """Append one repeat of everything that is measured with one launcher."""
    launcher: Launcher = build(run.config.cluster).open(run)
    began = time.monotonic()
    try:
        figures = asyncio.run(turn(run, launcher, counts, seconds))
    finally:
        launcher.stop_roles() if where == "ray" else launcher.stop()  # Ray stays connected
    for name, value in figures.items():
        measured.setdefault(f"{name}_{where}", []).append(value)
    told = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
    CONSOLE.print(f"{where}: {told} ({time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f})", soft_wrap=True)


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def compare(measured: dict[str, list[float]]) -> tuple[dict[str, float], dict[str, Any]]:
    """The medians with their spread, and the bars."""
    one = measured.get("samples_per_s_1_local", [])
    for engines in (2, 4):
        if one and (many := measured.get(f"samples_per_s_{engines}_local")):
            measured[f"speedup_{engines}"] = ratios(many, one)
    if "samples_per_s_2_ray" in measured:
        measured["local_over_ray"] = ratios(measured["samples_per_s_2_beside_ray"], measured["samples_per_s_2_ray"])
    figures: dict[str, float] = {}
    for name, each in measured.items():
        figures[name] = statistics.median(each)
        figures[f"spread_{name}"] = max(each) / min(each) - 1 if min(each) else 0.0
    bars = {
        name: at_least(figures[name], bar) for name, bar in (("speedup_2", 1.8), ("speedup_4", 3.4)) if name in figures
    }
    if "local_over_ray" in figures:
        overhead, spread = figures["local_over_ray"] - 1, figures["spread_local_over_ray"]
        bars["ray_overhead"] = at_most(overhead, max(0.03, spread))
    return figures, bars


def measure_engines(root: Path, bucket: str, repeats: int, seconds: float) -> dict[str, list[float]]:
    measured: dict[str, list[float]] = {}
    run = fleet_run(root, "fleet", bucket)
    for _ in range(repeats):
        measure(measured, run, (1, 2, 4), seconds, "local")
    return measured


def measure_ray(root: Path, bucket: str, repeats: int, seconds: float) -> dict[str, list[float]]:
    measured: dict[str, list[float]] = {}
    with ray_node() as address:
        cluster = f"cluster={{kind='ray',address='{address}',scratch='{root}/nodes'}}"
        there = replace(fleet_run(root, "ray", bucket, cluster), ports={})  # its gateway says where it is
        turns = [(fleet_run(root, "here", bucket), "beside_ray"), (there, "ray")]
        for repeat in range(repeats):
            for run, where in turns if repeat % 2 == 0 else reversed(turns):
                measure(measured, run, (1, 2), seconds, where)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat, no RL steps")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="these parts and no others")
    parser.add_argument("--base", type=Path, help="a mid-trained run, for what a step costs in S3")
    parser.add_argument("--steps", type=int, default=4, help="RL steps, for what a step costs in S3")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measured rate")
    arguments = parser.parse_args()
    seconds, repeats = (5.0, 1) if arguments.quick else (arguments.seconds, arguments.repeats)
    began, load = time.monotonic(), os.getloadavg()[0]
    measured: dict[str, list[float]] = {}
    costs: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory, s3() as bucket:
        root = Path(directory)
        if "engines" in arguments.only:
            measured |= measure_engines(root, bucket, repeats, seconds)
        if "ray" in arguments.only:
            measured |= measure_ray(root, bucket, repeats, seconds)
        if "steps" in arguments.only and not arguments.quick:
            base = RunDirectory.open(arguments.base) if arguments.base is not None else midtrained(root)
            costs = store_costs(root, bucket, base, arguments.steps)
    figures, bars = compare(measured)
    loads = {"load_before": load, "load_after": os.getloadavg()[0]}
    finish("fleet", {"repeats": repeats, "seconds": time.monotonic() - began, **loads, **figures, **costs}, bars)


if __name__ == "__main__":
    main()
