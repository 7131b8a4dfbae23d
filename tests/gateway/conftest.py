from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from sqlalchemy import Engine

from rollmill.chat.format import assistant_message
from rollmill.chat.formats.compact import CompactFormat
from rollmill.chat.tokenizer import Tokenizer
from rollmill.gateway import garbage_policy
from rollmill.gateway.access.keys import KeyStore
from rollmill.gateway.app import make_app
from rollmill.gateway.config import EngineEndpoint, GatewayConfig
from rollmill.gateway.gateway_parts import GatewayInputs
from rollmill.gateway.recording.entries import LogEntry, scan_entries
from rollmill.gateway.routing.fleet import Fleet
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Trajectory
from tests.chat.conftest import TOOLS, tokenizer  # noqa: F401
from tests.gateway.serve import ADMIN, LIVE, GatewayServer
from tests.gateway.stand_in import StandIn

USER = {"role": "user", "content": "Fix add."}
ENGINE = "engine-secret"
_LONGEST_S = 240.0  # against hangs only: a broken promise may be one
QUICK = GatewayConfig(engine_wait_s=1.0, health_interval_s=0.02)


def read_entries(log: bytes) -> list[tuple[int, int, LogEntry]]:
    """Begin, end and contents of each entry of a session log."""
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(log)
        return list(scan_entries(file.fileno()))


def collect_as_usual() -> None:
    """Undo `garbage_policy.collect_little`."""
    gc.callbacks.remove(garbage_policy._leave)
    gc.set_threshold(700, 10, 10)
    gc.unfreeze()


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(_LONGEST_S):
        while not await holds():  # noqa: ASYNC110 - other processes and sockets cannot set an event
            await asyncio.sleep(0.01)


@pytest.fixture
def format(tokenizer: Tokenizer) -> CompactFormat:  # noqa: F811
    return CompactFormat(tokenizer)


@dataclass
class Answers:
    """Scripted answers as tokens."""

    format: CompactFormat

    def call(self, name: str, **arguments: Any) -> list[int]:
        return self.format.render_answer(assistant_message(None, [(name, json.dumps(arguments))]), TOOLS)

    def text(self, text: str) -> list[int]:
        return self.format.render_answer(assistant_message(text, []), TOOLS)


@pytest.fixture
def answers(format: CompactFormat) -> Answers:
    return Answers(format)


@dataclass
class Door:
    """A running gateway and its client."""

    url: str
    trajectories: TrajectoryStore
    http: aiohttp.ClientSession = field(repr=False)

    async def open(self, trajectory: str, **facts: Any) -> str:
        status, body = await self.admin("POST", "/sessions", {"trajectory": trajectory, **facts})
        assert status == 200, body
        return str(body["key"])

    async def admin(self, method: str, path: str, body: Any = None, token: str = ADMIN) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token}"}
        async with self.http.request(method, self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def ask(self, key: str, messages: Any, headers: Any = (), **fields: Any) -> tuple[int, Any]:
        body = {"model": "rollmill", "messages": messages, "tools": TOOLS, **fields}
        async with self.http.post(
            f"{self.url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}", **dict(headers)}
        ) as response:
            return response.status, await response.json()

    async def say(self, key: str, messages: list[Any], **fields: Any) -> dict[str, Any]:
        """Asks, and appends the answer to `messages`, as a client does."""
        status, body = await self.ask(key, messages, **fields)
        assert status == 200, body
        messages.append(body["choices"][0]["message"])
        return dict(body)

    async def seal(self, trajectory: str) -> Trajectory:
        status, body = await self.admin("POST", f"/sessions/{trajectory}/seal", {"submission_key": None})
        assert status == 200, body
        return self.trajectories.load(trajectory)

    async def health(self) -> dict[str, Any]:
        async with self.http.get(f"{self.url}/health") as response:
            return dict(await response.json())

    async def all_engines_up(self) -> bool:
        return all(engine["alive"] for engine in (await self.health())["engines"])

    async def sessions(self) -> int:
        return int((await self.health())["sessions"])

    async def metrics(self) -> str:
        async with self.http.get(f"{self.url}/metrics") as response:
            return await response.text()


@dataclass
class Mill:
    """Builds gateways over one directory, and the engines behind them."""

    directory: Path
    format: CompactFormat
    tokenizer: Tokenizer
    stack: contextlib.AsyncExitStack

    def log_entries(self) -> list[tuple[int, int, LogEntry]]:
        return read_entries((self.directory / "gateway" / "sessions.log").read_bytes())

    async def engine(self, stand_in: StandIn) -> EngineEndpoint:
        server = TestServer(stand_in.app())
        await self.stack.enter_async_context(server)
        return EngineEndpoint(str(server.make_url("")), "home")

    async def gateway(
        self, *engines: EngineEndpoint, config: GatewayConfig = QUICK, wait: bool = True, follows: bool = True
    ) -> Door:
        running = self.running(*engines, config=config, wait=wait, follows=follows)
        return await self.stack.enter_async_context(running)

    @contextlib.asynccontextmanager
    async def running(
        self, *engines: EngineEndpoint, config: GatewayConfig = QUICK, wait: bool = True, follows: bool = True
    ) -> AsyncIterator[Door]:
        """`follows`: engines may register; servers of others then answer only who asks for them."""
        objects = Objects.open(self.directory / "store")
        database = self.database()
        trajectories = TrajectoryStore(database, objects)
        given = GatewayInputs(
            config,
            self.format,
            self.tokenizer,
            trajectories,
            objects,
            self.directory / "gateway",
            ADMIN,
            engines,
            LIVE,
            keys=KeyStore(database, "run"),
            fleet=Fleet(database, "run", ENGINE) if follows else None,
            run="run",
        )
        async with GatewayServer(make_app(given)) as server, aiohttp.ClientSession() as http:
            door = Door(str(server.make_url("")).rstrip("/"), trajectories, http)
            if wait:
                await until(door.all_engines_up)
            yield door

    def database(self) -> Engine:
        """A connection of its own, until the test ends."""
        database = open_database(f"sqlite:///{self.directory}/mill.db")
        self.stack.callback(database.dispose)
        return database

    @property
    def fleet(self) -> Fleet:
        return Fleet(self.database(), "run", ENGINE)

    @property
    def keys(self) -> KeyStore:
        return KeyStore(self.database(), "run")

    def plan(self, *ids: str) -> None:
        """Creates the rows of trajectories, as the dispatcher does before it opens sessions."""
        objects = Objects.open(self.directory / "store")
        TrajectoryStore(self.database(), objects).create("run", "g", "t", ids, {})


@pytest.fixture
async def mill(tmp_path: Path, format: CompactFormat, tokenizer: Tokenizer) -> AsyncIterator[Mill]:  # noqa: F811
    async with contextlib.AsyncExitStack() as stack:
        yield Mill(tmp_path, format, tokenizer, stack)
