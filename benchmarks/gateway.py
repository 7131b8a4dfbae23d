"""The gateway's speed: requests per second, added latency, many streams; beside LiteLLM's proxy.

    python -m benchmarks.gateway [--quick] [--workers N]     everything, in less than eight minutes
    python -m benchmarks.gateway --streams                             2,000 streams, held for ten minutes

A stub engine answers at once with 64 tokens. Requests continue conversations of 2,000 tokens; every sixth one starts a
new conversation. Everything is recorded, with fsync. Load generator, stub and gateway are processes of their own and
share this machine's cores; the first two do as little as they can. LiteLLM's proxy gets the same requests in front of
the same stub in the same run. It is installed once, into an environment of its own in build/; without it, the bar that
compares the two is left out, and the output says so.

Added latency is the difference of two percentiles: through the gateway, and at the stub itself, both at half of the
gateway's highest rate, in short turns one after the other. It is the time from the request to the last byte of the
answer, so it holds the wait for the disk. The disk's fsync time is measured before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from rich.console import Console
from rich.table import Table

from benchmarks.gateway_sides import ADMIN, KEY, TOKENS, cpu_seconds, resident_mib
from benchmarks.output import at_least, at_most, finish
from rollmill.chat.format import assistant_message
from rollmill.chat.formats.choice import format_of
from rollmill.chat.tokenizer import Tokenizer
from rollmill.demo.tokenizer import demo_tokenizer
from rollmill.gateway.app import make_app
from rollmill.gateway.config import EngineEndpoint, GatewayConfig
from rollmill.gateway.gateway_parts import GatewayInputs
from rollmill.gateway.workers import Workers
from rollmill.launch.gateway_workers import BACKLOG, run_workers
from rollmill.launch.roles.gateway import prepare_process
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.trajectory_store import TrajectoryStore

CONSOLE = Console(width=120)
HISTORY_TOKENS = 2000
STREAM_PAUSE_MS = 500  # 2 tokens per second
LITELLM = "litellm[proxy]==1.103.7"
Figures = dict[str, float]


async def load(*arguments: object) -> dict[str, Any]:
    """What the load generator found."""
    command = [sys.executable, "-m", "benchmarks.gateway_sides", *map(str, arguments)]
    running = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        printed, _ = await running.communicate()
    except asyncio.CancelledError:
        running.kill()
        raise
    if running.returncode:
        raise RuntimeError("the load generator failed: its error is above")
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


async def hold_streams(url: str, count: int, tokens: int, pid: int) -> Figures:
    """`count` streams at 2 tokens per second at the same time, from a process of their own. Returns how many ended
    well, their tokens, the time between two tokens, and the gateway's memory and CPU."""
    before, highest, used, started = resident_mib(pid), 0.0, cpu_seconds(pid), time.monotonic()
    arguments = ["-m", "benchmarks.gateway_sides", "streams", port_of(url), count, tokens, STREAM_PAUSE_MS]
    pipe = asyncio.subprocess.PIPE
    load = await asyncio.create_subprocess_exec(sys.executable, *map(str, arguments), stdout=pipe)
    assert load.stdout is not None
    found: dict[str, Any] = {}
    async for line in load.stdout:
        found = json.loads(line)
        highest = max(highest, resident_mib(pid))
        if "open" in found:
            told = ", ".join(f"{value} {name}" for name, value in found.items())
            CONSOLE.print(f"{time.monotonic() - started:5.0f} s: streams: {told}; gateway {highest:.0f} MiB")
    if await load.wait() or "faults" not in found:
        raise RuntimeError("the load generator failed: its error is above")
    if found["faults"]:
        CONSOLE.print(f"streams that did not end well: {found['faults']}")
    return {
        "streams": count,
        "streams_ended": found["ended"],
        "streams_failed": sum(found["faults"].values()),
        "streams_tokens": found["tokens"],
        "streams_tokens_asked": count * tokens,
        "streams_s": tokens * STREAM_PAUSE_MS / 1000,
        "streams_between_p50_ms": found["between_p50_ms"],
        "streams_between_p99_ms": found["between_p99_ms"],
        "streams_between_longest_ms": found["between_longest_ms"],
        "streams_cpu_ms_per_token": (cpu_seconds(pid) - used) * 1000 / (count * tokens),
        "streams_mib": highest,
        "idle_mib": before,
    }


def fsync_seconds(directory: Path, times: int) -> list[float]:
    """Of appends of 4 KiB with fsync, on the disk of the session log."""
    seconds = []
    with (directory / "fsync").open("ab", buffering=0) as file:
        for _ in range(times):
            started = time.perf_counter()
            file.write(b"x" * 4096)
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - started)
    return seconds


@contextlib.contextmanager
def process(*arguments: object, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    running = subprocess.Popen(list(map(str, arguments)), **options)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def up(url: str, path: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < deadline:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with http.get(url + path) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"{url} did not start within {seconds:g} s")


@contextlib.contextmanager
def litellm_proxy(program: str, stub: str, directory: Path) -> Iterator[tuple[str, int]]:
    port = free_port()
    model = {"model": "openai/stub", "api_base": f"{stub}/v1", "api_key": "x"}
    config = {
        "model_list": [{"model_name": "rollmill", "litellm_params": model}],
        "general_settings": {"master_key": KEY},
    }
    (directory / "litellm.json").write_text(json.dumps(config))  # JSON is YAML too
    log = (directory / "litellm.log").open("wb")
    environment = {**os.environ, "LITELLM_TELEMETRY": "False", "PYTHONPATH": "", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    arguments = [program, "--config", directory / "litellm.json", "--host", "127.0.0.1", "--port", port]
    with process(*arguments, env=environment, stdout=log, stderr=log, cwd=directory) as running:
        yield f"http://127.0.0.1:{port}", running.pid


def litellm_program() -> str | None:
    """The `litellm` in build/litellm, installed if it is not there."""
    home = Path(__file__).parents[1] / "build" / "litellm"
    program, done = home / "bin" / "litellm", home / "installed"
    if not done.exists():
        CONSOLE.print(f"installing {LITELLM} into {home.relative_to(home.parents[1])}, once")
        pip = [home / "bin" / "python", "-m", "pip", "install", "-q", LITELLM]
        try:
            subprocess.run([sys.executable, "-m", "venv", home], check=True)
            subprocess.run(pip, check=True, env={**os.environ, "PYTHONPATH": ""})
        except (subprocess.CalledProcessError, OSError) as error:
            CONSOLE.print(f"LiteLLM cannot be installed: {error}")
            return None
        done.touch()
    return str(program)


async def measure(arguments: argparse.Namespace, directory: Path) -> tuple[Figures, dict[str, Any]]:
    write_texts(directory)
    seconds = 3.0 if arguments.quick else 10.0
    litellm = None if arguments.streams else litellm_program()
    fsync_ms = statistics.median(fsync_seconds(directory, 50)) * 1000
    figures: Figures = {"fsync_ms": fsync_ms, "load_before": os.getloadavg()[0]}
    bars: dict[str, Any] = {}
    stub, url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    module = [sys.executable, "-m", "benchmarks.gateway_sides"]
    with process(*module, "engine", port_of(stub), directory / "answer.json"):
        await up(stub, "/health")
        options = [port_of(url), stub, directory, arguments.workers]
        with process(sys.executable, "-m", "benchmarks.gateway", "serve", *options) as gateway:
            await up(url, "/health")
            if not arguments.streams:
                await rates("", url, directory, seconds, gateway.pid, figures)
                for stream in (False, True):
                    await compare(url, stub, directory, seconds, stream, figures, bars)
            count, tokens = (200, 20) if arguments.quick else (2000, 1200 if arguments.streams else 120)
            figures |= await hold_streams(url, count, tokens, gateway.pid)
            bars["streams_ended"] = at_least(figures["streams_ended"], count)
        if litellm:
            with litellm_proxy(litellm, stub, directory) as (other, pid):
                await up(other, "/health/liveliness")
                await rates("litellm_", other, directory, seconds, pid, figures)
            for name in ("requests_per_s", "stream_requests_per_s"):
                figures[f"times_litellm_{name}"] = figures[name] / figures[f"litellm_{name}"]
                bars[f"times_litellm_{name}"] = at_least(figures[f"times_litellm_{name}"], 5.0)
    if not litellm and not arguments.streams:
        CONSOLE.print("LiteLLM was not measured")
    figures["load_after"] = os.getloadavg()[0]
    return figures, bars


def port_of(url: str) -> str:
    return url.rpartition(":")[2]


def write_texts(directory: Path) -> None:
    """The tokenizer of the gateway, the words of conversations, and the tokens of the stub's answer."""
    tokenizer = demo_tokenizer(512)
    tokenizer.save(directory / "tokenizer.json")
    text = "the function returns the sum of its arguments and raises an error if one of them is not a number " * 200
    per_word = len(tokenizer.encode(text)) / len(text.split(" "))
    (directory / "words.txt").write_text(" ".join(text.split(" ")[: int(2 * HISTORY_TOKENS / per_word)]))
    said = assistant_message("the sum of two numbers is a number " * 20, [])
    whole = format_of(tokenizer).render_answer(said, [])
    (directory / "answer.json").write_text(json.dumps([*whole[: TOKENS - 1], whole[-1]]))


async def rates(name: str, url: str, directory: Path, seconds: float, pid: int, figures: Figures) -> None:
    for kind, stream in (("", False), ("stream_", True)):
        found = await load("rate", directory, port_of(url), pid, seconds, stream)
        figures |= {f"{name}{kind}{figure}": value for figure, value in found.items()}


async def compare(
    url: str, stub: str, directory: Path, seconds: float, stream: bool, figures: Figures, bars: dict[str, Any]
) -> None:
    """Added latency at half load."""
    name = "stream" if stream else "whole"
    rate = figures["stream_requests_per_s" if stream else "requests_per_s"] / 2
    found = await load("latency", directory, port_of(url), port_of(stub), rate, seconds, stream)
    figures[f"half_load_{name}_requests_per_s"] = rate
    for label, bar in (("p50", 2.0), ("p99", 10.0)):
        added = found["through"][label] - found["direct"][label]
        figures[f"added_{name}_{label}_ms"] = added
        figures[f"direct_{name}_{label}_ms"] = found["direct"][label]
        bars[f"added_{name}_{label}_ms"] = at_most(added, bar)


def serve(port: int, engine: str, directory: Path, count: int) -> None:
    """The gateway that is measured, in a process of its own."""
    tokenizer = Tokenizer.load(directory / "tokenizer.json")
    form = format_of(tokenizer)

    def build(workers: Workers) -> web.Application:
        objects = Objects.open(directory / "store")
        trajectories = TrajectoryStore(open_database(f"sqlite:///{directory}/mill.db"), objects)
        config = GatewayConfig(engine_requests=4096, queue_requests=4096)
        endpoints = [EngineEndpoint(engine, "home")]
        log = directory / "gateway"
        given = GatewayInputs(config, form, tokenizer, trajectories, objects, log, ADMIN, endpoints, KEY)
        app = make_app(given, workers)
        prepare_process()
        return app

    if count == 1:
        web.run_app(build(Workers()), host="127.0.0.1", port=port, print=None, access_log=None, backlog=BACKLOG)
        return
    with socket.create_server(("127.0.0.1", port), backlog=BACKLOG) as listening:
        run_workers(build, listening, directory / "gateway", count)


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        return serve(int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under a minute: shorter runs, 200 streams once")
    parser.add_argument("--streams", action="store_true", help="only 2,000 streams, held for ten minutes")
    parser.add_argument("--workers", type=int, default=1, help="worker processes of our gateway")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gateway-") as directory:
        figures, bars = asyncio.run(measure(arguments, Path(directory)))
    table = Table(title="gateway")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:.2f}")
    CONSOLE.print(table)
    finish("gateway", figures, bars)


if __name__ == "__main__":
    main()
