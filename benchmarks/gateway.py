"""The gateway's speed: requests per second, added latency, many streams; beside LiteLLM's proxy.

    python -m benchmarks.gateway [--quick] [--workers N]     everything, in less than eight minutes
    python -m benchmarks.gateway --streams                   2,000 streams, held for ten minutes

A stub engine answers at once with 64 tokens. Requests continue conversations of 2,000 tokens; every sixth one starts a
new conversation. Everything is recorded, with fsync. Client, stub and gateway share this machine's cores. LiteLLM's
proxy gets the same requests in front of the same stub in the same run. It is installed once, into an environment of its
own in build/; without it, the bar that compares the two is left out, and the output says so.

Added latency is the difference of two percentiles: through the gateway, and at the stub itself, both at half of the
gateway's highest rate, in short turns one after the other. The disk's fsync time is measured beside it, because an
answer waits for one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
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
from rich.console import Console
from rich.table import Table

from benchmarks.gateway_processes import KEY, TOKENS
from benchmarks.output import at_least, at_most, finish
from rollmill.demo.tokenizer import demo_tokenizer

CONSOLE = Console(width=120)
HISTORY_TOKENS, TURNS = 2000, 6
CONCURRENCY = 16
STREAM_PAUSE_MS = 500  # 2 tokens per second
LITELLM = "litellm[proxy]==1.103.7"
TURNS_OF_LATENCY = 5
Figures = dict[str, float]


class Conversations:
    """Bodies of requests: conversations of about 2,000 tokens, each continued for some turns."""

    def __init__(self, text: str) -> None:
        self._text = text.split(" ")
        self._random = random.Random(0)

    def new(self) -> list[dict[str, str]]:
        """Ten messages that nobody else has."""
        messages = []
        for index in range(9):
            start = self._random.randrange(len(self._text) // 2)
            words = self._text[start : start + len(self._text) // 18]
            content = f"{self._random.random()} " + " ".join(words)
            messages.append({"role": "assistant" if index % 2 else "user", "content": content})
        return messages


class Client:
    """One user: sends a request, appends the answer, sends the next."""

    def __init__(self, http: aiohttp.ClientSession, url: str, conversations: Conversations, stream: bool) -> None:
        self._http, self._url, self._conversations, self._stream = http, url, conversations, stream
        self._messages: list[dict[str, str]] = []
        self._turns = TURNS
        self._headers: dict[str, str] = {}

    async def ask(self) -> float:
        """Returns the seconds until the whole answer is there."""
        if self._turns == TURNS:
            self._messages, self._turns, self._headers = self._conversations.new(), 0, {}
        self._turns += 1
        body: dict[str, Any] = {"model": "rollmill", "messages": self._messages, "max_tokens": TOKENS}
        started = time.perf_counter()
        answer = await post(self._http, self._url, body | {"stream": self._stream}, self._headers)
        seconds = time.perf_counter() - started
        self._messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
        return seconds


async def post(http: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: dict[str, str]) -> str:
    """Returns the text of the answer. `headers` keeps the name of the session, which the gateway sends back."""
    sent = {"Authorization": f"Bearer {KEY}", **headers}
    async with http.post(f"{url}/v1/chat/completions", json=body, headers=sent) as response:
        data = await response.read()
        headers |= {name: response.headers[name] for name in ("x-rollmill-session",) if name in response.headers}
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {data[:300]!r}")
    if not body.get("stream"):
        return str(json.loads(data)["choices"][0]["message"]["content"] or "")
    events = [json.loads(line[6:]) for line in data.split(b"\n\n") if line.startswith(b"data: {")]
    if b"[DONE]" not in data:
        raise RuntimeError(f"{url}: the stream broke off")
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_connect=60)
    )


async def throughput(
    url: str, conversations: Conversations, seconds: float, pid: int, stream: bool = False
) -> tuple[float, float]:
    """Requests per second of `CONCURRENCY` users who never pause, and the server's CPU milliseconds per request.

    The second does not depend on what else runs on this machine.
    """
    async with session() as http:
        clients = [Client(http, url, conversations, stream) for _ in range(CONCURRENCY)]
        await asyncio.gather(*[client.ask() for client in clients])  # warm up
        started, used = time.perf_counter(), cpu_seconds(pid)
        done = 0

        async def work(client: Client) -> None:
            nonlocal done
            while time.perf_counter() - started < seconds:
                await client.ask()
                done += 1

        await asyncio.gather(*map(work, clients))
        return done / (time.perf_counter() - started), (cpu_seconds(pid) - used) / done * 1000


async def latencies(url: str, conversations: Conversations, rate: float, seconds: float, stream: bool) -> list[float]:
    """Seconds of each request at a fixed rate, whatever the answers take."""
    async with session() as http:
        idle = [Client(http, url, conversations, stream) for _ in range(4)]
        await asyncio.gather(*[client.ask() for client in idle])
        measured: list[float] = []

        async def one() -> None:
            client = idle.pop() if idle else Client(http, url, conversations, stream)
            measured.append(await client.ask())
            idle.append(client)

        async with asyncio.TaskGroup() as group:
            started = time.perf_counter()
            for index in range(int(rate * seconds)):
                await asyncio.sleep(max(0.0, started + index / rate - time.perf_counter()))
                group.create_task(one())
        return measured


async def hold_streams(url: str, count: int, tokens: int, pid: int) -> Figures:
    """`count` streams at 2 tokens per second at the same time, from a process of their own. Returns how many ended
    well, the time between two tokens, and the gateway's memory and CPU."""
    before, highest, used = resident_mib(pid), 0.0, cpu_seconds(pid)
    port, pipe = url.rpartition(":")[2], asyncio.subprocess.PIPE
    arguments = ["-m", "benchmarks.gateway_streams", port, count, tokens, STREAM_PAUSE_MS]
    load = await asyncio.create_subprocess_exec(sys.executable, *map(str, arguments), stdout=pipe)
    printed = asyncio.create_task(load.communicate())
    while not printed.done():
        highest = max(highest, resident_mib(pid))
        await asyncio.wait([printed], timeout=1.0)
    found = json.loads(printed.result()[0].splitlines()[-1])
    if found["faults"]:
        CONSOLE.print(f"streams that did not end well: {found['faults']}")
    return {
        "streams": count,
        "streams_ended": found["ended"],
        "streams_s": tokens * STREAM_PAUSE_MS / 1000,
        "streams_between_p50_ms": found["between_p50_ms"],
        "streams_between_p99_ms": found["between_p99_ms"],
        "streams_cpu_ms_per_token": (cpu_seconds(pid) - used) * 1000 / (count * tokens),
        "streams_mib": highest,
        "idle_mib": before,
    }


def family(pid: int) -> list[int]:
    """A process and its children: the workers of a gateway."""
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def resident_mib(pid: int) -> float:
    """Of a process and its children; memory that they share counts several times."""
    pages = sum(int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in family(pid))
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_seconds(pid: int) -> float:
    """Of a process and its children."""
    stats = [Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split() for each in family(pid)]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


def fsync_ms(directory: Path, times: int = 50) -> float:
    """The median of one append of 4 KiB with fsync, on the disk of the session log."""
    seconds = []
    with (directory / "fsync").open("ab", buffering=0) as file:
        for _ in range(times):
            started = time.perf_counter()
            file.write(b"x" * 4096)
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * 1000


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


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


async def measure(arguments: argparse.Namespace, directory: Path) -> tuple[Figures, dict[str, Any]]:
    conversations = make_conversations(directory)
    seconds = 3.0 if arguments.quick else 10.0
    litellm = None if arguments.streams else arguments.litellm or litellm_program()
    figures: Figures = {"fsync_ms": fsync_ms(directory), "load_before": os.getloadavg()[0]}
    bars: dict[str, Any] = {}
    stub, url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    module = [sys.executable, "-m", "benchmarks.gateway_processes"]
    with process(*module, "stub", stub.rpartition(":")[2], directory):
        await up(stub, "/health")
        with process(*module, "gateway", url.rpartition(":")[2], stub, directory, arguments.workers) as gateway:
            await up(url, "/health")
            if not arguments.streams:
                await rates("", url, conversations, seconds, gateway.pid, figures)
                for stream in (False, True):
                    await compare(url, stub, conversations, seconds, stream, figures, bars)
            count, tokens = (200, 20) if arguments.quick else (2000, 1200 if arguments.streams else 120)
            figures |= await hold_streams(url, count, tokens, gateway.pid)
            bars["streams_ended"] = at_least(figures["streams_ended"], count)
        if litellm:
            with litellm_proxy(litellm, stub, directory) as (other, pid):
                await up(other, "/health/liveliness")
                await rates("litellm_", other, conversations, seconds, pid, figures)
            for name in ("requests_per_s", "stream_requests_per_s"):
                figures[f"times_litellm_{name}"] = figures[name] / figures[f"litellm_{name}"]
                bars[f"times_litellm_{name}"] = at_least(figures[f"times_litellm_{name}"], 5.0)
    if not litellm and not arguments.streams:
        CONSOLE.print("LiteLLM was not measured")
    figures["load_after"] = os.getloadavg()[0]
    return figures, bars


def make_conversations(directory: Path) -> Conversations:
    """Also writes the tokenizer that stub and gateway use."""
    tokenizer = demo_tokenizer(512)
    tokenizer.save(directory / "tokenizer.json")
    text = "the function returns the sum of its arguments and raises an error if one of them is not a number " * 200
    per_word = len(tokenizer.encode(text)) / len(text.split(" "))
    return Conversations(" ".join(text.split(" ")[: int(2 * HISTORY_TOKENS / per_word)]))


async def rates(name: str, url: str, conversations: Conversations, seconds: float, pid: int, figures: Figures) -> None:
    for kind, stream in (("", False), ("stream_", True)):
        rate, cpu_ms = await throughput(url, conversations, seconds, pid, stream)
        figures |= {f"{name}{kind}requests_per_s": rate, f"{name}{kind}cpu_ms_per_request": cpu_ms}


async def compare(
    url: str,
    stub: str,
    conversations: Conversations,
    seconds: float,
    stream: bool,
    figures: Figures,
    bars: dict[str, Any],
) -> None:
    """Added latency at half load."""
    name = "stream" if stream else "whole"
    rate = figures["stream_requests_per_s" if stream else "requests_per_s"] / 2
    direct: list[float] = []
    through: list[float] = []
    for _ in range(TURNS_OF_LATENCY):
        direct += await latencies(stub, conversations, rate, seconds / TURNS_OF_LATENCY, stream)
        through += await latencies(url, conversations, rate, seconds / TURNS_OF_LATENCY, stream)
    figures[f"half_load_{name}_requests_per_s"] = rate
    for share, label, bar in ((0.5, "p50", 2.0), (0.99, "p99", 10.0)):
        added = (percentile(through, share) - percentile(direct, share)) * 1000
        figures[f"added_{name}_{label}_ms"] = added
        figures[f"direct_{name}_{label}_ms"] = percentile(direct, share) * 1000
        bars[f"added_{name}_{label}_ms"] = at_most(added, bar)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under a minute: shorter runs, 200 streams once")
    parser.add_argument("--streams", action="store_true", help="only 2,000 streams, held for ten minutes")
    parser.add_argument("--litellm", help="program of LiteLLM with its proxy; else it is installed into build/")
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
