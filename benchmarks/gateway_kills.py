"""kill -9 of a gateway's workers under load: what is lost, and what new connections notice.

    python -m benchmarks.gateway_kills [--quick] [--workers N]

Rollouts talk through the gateway to a stub engine and retry when a connection breaks, as a harness does. A random
worker is killed 50 times. After each kill four new connections ask something. At the end every session is sealed, and
its record is compared with what its client has received.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.gateway import CONSOLE, Figures, free_port, port_of, process, up, write_texts
from benchmarks.gateway_load import family, percentile
from benchmarks.gateway_stub import ADMIN, KEY
from benchmarks.output import at_most, finish
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.trajectory_store import TrajectoryStore

ROLLOUTS, FRESH = 8, 4


class Rollout:
    """Talks on until it is told to stop. `messages` is what it has sent and received."""

    def __init__(self, http: aiohttp.ClientSession, url: str, id: str) -> None:
        self._http, self._url, self.id = http, url, id
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": f"rollout {id}"}]
        self.retries = 0

    @property
    def answers(self) -> int:
        return len(self.messages) // 2

    async def run(self, enough: asyncio.Event) -> None:
        key = (await self.admin("/sessions", {"trajectory": self.id}))["key"]
        while not enough.is_set():
            body = await self._persistent(key)
            self.messages.append(body["choices"][0]["message"])
            self.messages.append({"role": "user", "content": "go on"})

    async def admin(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                status, answer = await ask(self._http, self._url + path, ADMIN, body)
                if status == 200:
                    return answer
            await asyncio.sleep(0.05)

    async def _persistent(self, key: str) -> dict[str, Any]:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                status, body = await ask(
                    self._http, f"{self._url}/v1/chat/completions", key, {"messages": self.messages, "max_tokens": 64}
                )
                if status == 200:
                    return body
            self.retries += 1
            await asyncio.sleep(0.05)


async def ask(http: aiohttp.ClientSession, url: str, key: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with http.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as response:
        return response.status, await response.json()


async def served(http: aiohttp.ClientSession, url: str, text: str) -> float | None:
    """Seconds until a new connection has its answer; None if it fails."""
    started = time.perf_counter()
    with contextlib.suppress(aiohttp.ClientError):
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 64}
        status, _ = await ask(http, f"{url}/v1/chat/completions", KEY, body)
        return time.perf_counter() - started if status == 200 else None
    return None


async def kill_workers(url: str, pid: int, kills: int, rollouts: list[Rollout]) -> tuple[list[float], int]:
    """Returns the seconds of new connections, and how many failed."""
    seconds: list[float | None] = []
    chooser = random.Random(0)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        for kill in range(kills):
            goal = sum(rollout.answers for rollout in rollouts) + len(rollouts)
            while sum(rollout.answers for rollout in rollouts) < goal:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            os.kill(chooser.choice(family(pid)[1:]), signal.SIGKILL)
            seconds += await asyncio.gather(*[served(http, url, f"{kill} {number}") for number in range(FRESH)])
    good = [each for each in seconds if each is not None]
    return good, len(seconds) - len(good)


async def measure(arguments: argparse.Namespace, directory: Path) -> tuple[Figures, dict[str, Any]]:
    write_texts(directory)
    kills = 5 if arguments.quick else 50
    store = TrajectoryStore(open_database(f"sqlite:///{directory}/mill.db"), Objects.open(directory / "store"))
    ids = [f"rollout-{number}" for number in range(ROLLOUTS)]
    store.create("run", "group", "task", ids, {})
    stub, url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    module = [sys.executable, "-m"]
    enough = asyncio.Event()
    with process(*module, "benchmarks.gateway_stub", port_of(stub), directory / "answer.json"):
        await up(stub, "/health")
        options = [port_of(url), stub, directory, arguments.workers]
        with process(*module, "benchmarks.gateway_served", *options) as gateway:
            await up(url, "/health")
            async with aiohttp.ClientSession() as http:
                rollouts = [Rollout(http, url, id) for id in ids]
                talks = [asyncio.create_task(rollout.run(enough)) for rollout in rollouts]
                started = time.perf_counter()
                seconds, failed = await kill_workers(url, gateway.pid, kills, rollouts)
                elapsed = time.perf_counter() - started
                enough.set()
                await asyncio.gather(*talks)
                for rollout in rollouts:
                    await rollout.admin(f"/sessions/{rollout.id}/seal", {"submission_key": None})
    lost = branches = 0
    for rollout in rollouts:
        trajectory = store.load(rollout.id)
        said = [message["content"] for message in trajectory.messages]
        got = [message["content"] for message in rollout.messages[:-1]]
        lost += sum(mine != recorded for mine, recorded in zip(got, said, strict=False)) + max(0, len(got) - len(said))
        branches += len(trajectory.segments) - 1
    figures = {
        "workers": float(arguments.workers),
        "kills": float(kills),
        "seconds": elapsed,
        "answers": float(sum(rollout.answers for rollout in rollouts)),
        "retries": float(sum(rollout.retries for rollout in rollouts)),
        "new_connections": float(len(seconds) + failed),
        "new_connection_p50_ms": percentile(seconds, 0.5) * 1000,
        "new_connection_longest_ms": max(seconds) * 1000,
        "lost": float(lost),
        "branches": float(branches),
        "new_connections_failed": float(failed),
    }
    bars = {name: at_most(figures[name], 0) for name in ("lost", "branches", "new_connections_failed")}
    return figures, bars


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="5 kills instead of 50")
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gateway-kills-") as directory:
        figures, bars = asyncio.run(measure(arguments, Path(directory)))
    for name, value in figures.items():
        CONSOLE.print(f"{name:28} {value:10.1f}")
    finish("gateway_kills", figures, bars)


if __name__ == "__main__":
    main()
