"""The remote harness: an agent that lives elsewhere, behind a URL of yours, takes an episode over HTTP.

Your service has three routes. Each request carries `Authorization: Bearer TOKEN`, if you set `token_variable`.

    PUT    URL/episodes/ID    {"id", "task", "messages", "files": {path: base64}, "submission": [path] or "diff",
                               "model": {"base_url", "api_key"}, "sampling": {…}, "lease_s"}
                              begin this episode. Sent again after a lost answer: the same ID must not begin twice
    GET    URL/episodes/ID    {"state": "running"}, or
                              {"state": "done", "files": {path: base64}, "stop": "done", "note": "for people"}
                              it may wait up to ten seconds before it answers; 404: begin it again
    DELETE URL/episodes/ID    nobody waits for it any more

Each GET renews the lease: an episode that nobody asked about for `lease_s` seconds may be ended. The agent asks the
model at `base_url` with the key of its session, with the sampling that it is given. The files it hands in are written
to a machine, and graded there by the task's own rewards.

A service that cannot be reached, or that answers with an error status, is an infrastructure failure. What it hands in
is the agent's: files that cannot be read or do not fit are graded as nothing, and so is an agent that is late.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import os
from pathlib import PurePosixPath
from typing import Any, Literal

import aiohttp
from pydantic import Field

from rollmill.backoff import Backoff
from rollmill.config import Config
from rollmill.environments.harness import Harness, HarnessResult
from rollmill.environments.harnesses.model import RETRY_STATUS, sampling_fields
from rollmill.environments.task import Task, WholeDiff
from rollmill.errors import ConfigError, HarnessError
from rollmill.keepalive import keepalive_connector
from rollmill.machines.machine import Machine
from rollmill.strict import StrictModel, parse_json
from rollmill.types import Sampling

_UNREACHABLE = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)
_MOST_STARTS = 4  # a service that forgets an episode more often than this is broken
_NOTE = 600  # characters


class RemoteConfig(Config):
    url: str = Field(min_length=1, description="Where your agent service is: it has the route URL/episodes/ID.")
    token_variable: str = Field("", description="Environment variable with the service's bearer token. Empty: none.")
    model_url: str = Field(
        "", description="Where the service reaches the gateway, up to and with /v1. Empty: at the address it has here."
    )
    poll_s: float = Field(1.0, gt=0, description="Seconds between two questions whether an episode is done.")
    lease_s: float = Field(
        60.0, gt=0, description="After this many seconds without a question, the service may end it."
    )
    request_deadline_s: float = Field(
        120.0, gt=0, description="Seconds to wait for a service that cannot be reached before the episode fails."
    )
    max_bytes: int = Field(16 << 20, ge=1024, description="Most bytes that an agent may hand in, in base64.")


class _State(StrictModel):
    state: Literal["running", "done"]
    files: dict[str, str] = Field(default_factory=dict)
    stop: Literal["done", "answer", "max_turns", "length", "error"] = "done"
    note: str = ""


class _UnknownEpisode(Exception):
    """The service does not know this episode."""


class RemoteHarness(Harness):
    """One per dispatcher: all episodes share its connections."""

    name = "remote"

    def __init__(self, config: RemoteConfig) -> None:
        self.config = config
        self._session: aiohttp.ClientSession | None = None

    def preflight(self) -> None:
        self._token()

    async def run(
        self, task: Task, machine: Machine, *, base_url: str, api_key: str, sampling: Sampling
    ) -> HarnessResult:
        # one per session, so the same after a lost answer, and nobody learns the key from it
        identity = hashlib.sha256(f"episode {api_key}".encode()).hexdigest()[:32]
        episode = self._describe(identity, task, self.config.model_url or base_url, api_key, sampling)
        call = _Call(self._client(), self.config, f"{self.config.url.rstrip('/')}/episodes/{identity}", self._token())
        try:
            data = await self._play(call, episode)
        except asyncio.CancelledError:  # its time is over
            if call.problem is not None:
                raise HarnessError(call.problem) from None
            raise
        finally:
            await call.end()
        return await _hand_in(data, machine)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _describe(self, identity: str, task: Task, base_url: str, api_key: str, sampling: Sampling) -> dict[str, Any]:
        return {
            "id": identity,
            "task": task.id,
            "messages": task.messages,
            "files": {path: base64.b64encode(data).decode() for path, data in task.files.items()},
            "submission": "diff" if isinstance(task.submission, WholeDiff) else list(task.submission),
            "model": {"base_url": base_url, "api_key": api_key},
            "sampling": sampling_fields(sampling, 0),
            "lease_s": self.config.lease_s,
        }

    async def _play(self, call: _Call, episode: dict[str, Any]) -> bytes:
        """Begin the episode and wait for its end. Returns what the service said last."""
        for _ in range(_MOST_STARTS):
            await call.ask("PUT", episode)
            try:
                while True:
                    data = await call.ask("GET")
                    if not _is_running(data):
                        return data
                    await asyncio.sleep(self.config.poll_s)
            except _UnknownEpisode:
                continue
        raise HarnessError(f"{call.url}: the agent service forgets its episodes", hint="does it restart all the time?")

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=keepalive_connector())
        return self._session

    def _token(self) -> str:
        if not self.config.token_variable:
            return ""
        try:
            return os.environ[self.config.token_variable]
        except KeyError:
            raise ConfigError(
                f'[harness] kind = "remote": the environment variable {self.config.token_variable} is not set',
                hint="set it to the token of your agent service where the run is started",
            ) from None


class _Call:
    """Requests about one episode, retried while the service cannot be reached."""

    def __init__(self, session: aiohttp.ClientSession, config: RemoteConfig, url: str, token: str) -> None:
        self._session = session
        self._config = config
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.url = url
        self.problem: str | None = None  # why the service cannot be asked right now

    async def ask(self, method: str, body: dict[str, Any] | None = None) -> bytes:
        backoff = Backoff(0.1, 5.0, patience=self._config.request_deadline_s, jitter=0.5)
        while True:
            try:
                status, data = await self._send(method, body, max(backoff.left(), 0.1))
                if status < 300:
                    self.problem = None
                    return data
                self.problem = f"{self.url} answered {status}: {data[:300].decode('utf-8', 'replace')}"
                if status == 404 and method == "GET":
                    raise _UnknownEpisode
                if status not in (*RETRY_STATUS, 500):
                    raise HarnessError(self.problem, hint="the agent service's log says why it refuses")
            except _UNREACHABLE as error:
                self.problem = f"{self.url} cannot be reached: {error!r}"
            pause = backoff.failed()
            if pause > backoff.left():
                raise HarnessError(self.problem, hint="is the agent service running? see `harness.url`")
            await asyncio.sleep(pause)

    async def end(self) -> None:
        """Best effort: the lease ends it otherwise."""
        with contextlib.suppress(*_UNREACHABLE, asyncio.CancelledError):
            await self._send("DELETE", None, 2.0)

    async def _send(self, method: str, body: dict[str, Any] | None, timeout_s: float) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.request(
            method, self.url, json=body, headers=self._headers, timeout=timeout, allow_redirects=False
        ) as response:
            data = bytearray()
            while part := await response.content.read(1 << 16):
                data += part
                if len(data) > self._config.max_bytes:
                    response.close()  # the rest is not read, and what is read is no JSON
                    return response.status, bytes(data[:1000])
            return response.status, bytes(data)


def _is_running(data: bytes) -> bool:
    try:
        return parse_json(data, _State).state == "running"
    except ValueError:
        return False


async def _hand_in(data: bytes, machine: Machine) -> HarnessResult:
    """Write what the agent hands in to the machine. What cannot be read or written is not handed in."""
    try:
        answer = parse_json(data, _State)
        files = {_checked(path): base64.b64decode(text, validate=True) for path, text in answer.files.items()}
    except (ValueError, binascii.Error) as error:
        note = f"it handed in nothing that can be read: {error}"
        return HarnessResult("error", turns=0, tool_calls=0, note=note[:_NOTE])
    notes = [answer.note[:_NOTE]] if answer.note else []
    for path, content in files.items():
        try:
            await machine.write(path, content)
        except OSError as error:
            notes.append(f"{path} cannot be written: {error.strerror}")
    return HarnessResult(answer.stop, turns=0, tool_calls=0, note="; ".join(notes)[: 2 * _NOTE])


def _checked(path: str) -> str:
    """ValueError for a path that leaves the work directory."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise ValueError(f"{path[:100]!r} is not a path in the work directory")
    return str(pure)
