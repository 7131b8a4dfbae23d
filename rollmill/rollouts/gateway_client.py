"""The dispatcher's calls to the gateways: open the session of a trajectory, seal it, abandon it.

A run may have several gateways. The session of a trajectory is at the one that `gateway_of` names, see
rollmill/gateway/replicas.py.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp

from rollmill.backoff import Backoff
from rollmill.errors import GatewayError
from rollmill.gateway.replicas import gateway_of
from rollmill.keepalive import keepalive_connector
from rollmill.types import same_line

_FIRST_PAUSE_S = 0.05
_WATCH_S, _WATCH_TIMEOUT = 1.0, aiohttp.ClientTimeout(total=10.0)
_TURN_S = 5.0  # longest wait for one of several gateways to report what is served
_CONNECT_S = 5.0  # limit for connecting: a lost host does not refuse, it never answers
_UNREACHABLE = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)


Find = Callable[[], str | None]  # returns the current URL of a gateway; None if it is not known


@dataclass
class _Gateway:
    find: Find
    url: str = ""  # empty: not known yet
    away: float = 0.0
    away_since: float | None = None  # when it stopped answering; None: it answers
    moved: asyncio.Event = field(default_factory=asyncio.Event)  # set when `url` changes, then replaced

    def away_seconds(self) -> float:
        return self.away + (time.monotonic() - self.away_since if self.away_since is not None else 0.0)

    async def look(self) -> None:
        """Ask for its URL again: it may be on another host now."""
        found: str | None = await asyncio.to_thread(self.find)
        if found and found != self.url:
            self.url = found
            self.moved.set()
            self.moved = asyncio.Event()


class GatewayClient:
    """Calls to the gateway at a URL, with a key of the scope rollout. `forget` needs the scope admin. Each call retries
    for `patience_s` while the gateway restarts. `gateway` may be a function that returns its current URL, or one such
    function per gateway."""

    def __init__(self, gateway: str | Find | Sequence[Find], key: str, *, patience_s: float = 60.0) -> None:
        if isinstance(gateway, str):
            self._gateways = [_Gateway(lambda: gateway, gateway)]
        else:
            self._gateways = [_Gateway(find) for find in ([gateway] if callable(gateway) else gateway)]
        self._headers = {"Authorization": f"Bearer {key}"}
        self._patience_s = patience_s
        self._session: aiohttp.ClientSession | None = None
        self._watching: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(connector=keepalive_connector())
        for gateway in self._gateways:
            await gateway.look()
            self._watching.append(asyncio.create_task(self._watch(gateway, self._session)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for watching in self._watching:
            watching.cancel()
        if self._session is not None:
            await asyncio.gather(*self._watching, return_exceptions=True)
            await self._session.close()

    @property
    def base_url(self) -> str:
        """The URL of the first gateway; empty if it is not known."""
        return self._gateways[0].url

    def url_of(self, trajectory: str) -> str:
        """The URL of the gateway that has the session of a trajectory."""
        return self._of(trajectory).url

    async def moved(self, trajectory: str, url: str) -> None:
        """Return when the gateway of a trajectory is no longer at `url`: it was started again elsewhere."""
        gateway = self._of(trajectory)
        while gateway.url == url:
            await gateway.moved.wait()

    def _of(self, trajectory: str) -> _Gateway:
        return self._gateways[gateway_of(trajectory, len(self._gateways))]

    def away_seconds(self, trajectory: str = "") -> float:
        """For how long the gateway of a trajectory could not be reached since this client was opened, to about a
        second."""
        return self._of(trajectory).away_seconds()

    async def _watch(self, gateway: _Gateway, session: aiohttp.ClientSession) -> None:
        """Check once per second, for all rollouts of this process, whether the gateways answer."""
        answered = time.monotonic()
        while True:
            try:
                async with session.get(f"{gateway.url}/health", timeout=_WATCH_TIMEOUT):
                    answered = time.monotonic()
                    gateway.away, gateway.away_since = gateway.away_seconds(), None
            except (aiohttp.ClientError, TimeoutError):
                if gateway.away_since is None:
                    gateway.away_since = answered
                await gateway.look()
            await asyncio.sleep(_WATCH_S)

    async def open_session(self, trajectory: str, **facts: Any) -> str:
        """Returns the key for the harness. The gateway records every request with that key as `trajectory`."""
        return (await self._call("POST", "/sessions", {"trajectory": trajectory, **facts}, of=trajectory))["key"]

    async def seal(self, trajectory: str, submission_key: str | None) -> dict[str, Any]:
        """Store the session as one object; its trajectory is then finished. Safe to repeat."""
        body = {"submission_key": submission_key}
        return await self._call("POST", f"/sessions/{trajectory}/seal", body, of=trajectory)

    async def waited(self, trajectory: str) -> float:
        """Seconds that requests of this session have waited for an engine, those waiting now included."""
        return float((await self._call("GET", f"/sessions/{trajectory}", None, of=trajectory))["waited_seconds"])

    async def forget(self, user: str) -> dict[str, Any]:
        """Delete everything that was recorded of a production user."""
        return await self._call("POST", "/forget", {"user": user})

    async def abandon(self, trajectory: str) -> None:
        """Have the gateway forget a session that will not be finished."""
        await self._call("DELETE", f"/sessions/{trajectory}", None, of=trajectory)

    async def wait_until_serving(
        self, version: int, line: str = "", patience_s: float | None = None, *, of: str | None = None
    ) -> None:
        """Return once an engine serves `version` of `line` or a newer one: the gateway then asks no older engine. `of`:
        the trajectory whose gateway is asked; None: all gateways in turn, until one says so."""
        patience_s = self._patience_s if patience_s is None else patience_s
        deadline = asyncio.get_running_loop().time() + patience_s
        asked = self._gateways if of is None else [self._of(of)]
        for gateway in itertools.cycle(asked):
            try:  # one that is away must not take the time of the others
                told = await self._ask(gateway, "GET", "/health", None, _TURN_S if asked[1:] else patience_s)
            except GatewayError as error:
                if error.status != 503 or not asked[1:] or asyncio.get_running_loop().time() >= deadline:
                    raise
                continue
            served = [engine["policy"] for engine in told["engines"] if engine["alive"]]
            numbers = [policy["number"] for policy in served if not line or same_line(policy["line"], line)]
            if max(numbers, default=-1) >= version:
                return
            if asyncio.get_running_loop().time() >= deadline:
                raise GatewayError(
                    f"no engine serves version {version} after {patience_s:.0f} s; they are at {numbers}",
                    status=503,
                    hint="the logs of the engines say why they do not follow",
                )
            await asyncio.sleep(_FIRST_PAUSE_S)

    async def _call(
        self, method: str, path: str, body: Any, patience_s: float | None = None, *, of: str | None = None
    ) -> dict[str, Any]:
        """The answer of the gateway that has the session `of`, or of the first one."""
        return await self._ask(self._gateways[0] if of is None else self._of(of), method, path, body, patience_s)

    async def _ask(
        self, gateway: _Gateway, method: str, path: str, body: Any, patience_s: float | None
    ) -> dict[str, Any]:
        assert self._session is not None, "use as an async context manager"
        patience_s = self._patience_s if patience_s is None else patience_s
        backoff = Backoff(_FIRST_PAUSE_S, 1.0, patience=patience_s)
        while True:
            timeout = aiohttp.ClientTimeout(total=max(backoff.left(), 0.1), sock_connect=_CONNECT_S)
            try:
                async with self._session.request(
                    method, gateway.url + path, json=body, headers=self._headers, timeout=timeout
                ) as response:
                    if response.status < 400:
                        return await response.json()
                    problem = f"{method} {path} answered {response.status}: {(await response.text())[:500]}"
                    if response.status != 503:
                        raise GatewayError(problem, status=response.status)
            except aiohttp.ContentTypeError as error:
                problem = f"{gateway.url} is not a gateway: {error.message}"
            except aiohttp.InvalidURL:
                problem = "no gateway of the run has said where it is"
            except _UNREACHABLE as error:
                problem = f"{gateway.url} cannot be reached: {error or type(error).__name__}"
            pause = backoff.failed()
            if pause >= backoff.left():
                raise GatewayError(
                    f"{problem} (tried for {patience_s:.0f} s)",
                    status=503,
                    hint="is the gateway process running? its log is under logs/ of the run directory",
                )
            await asyncio.sleep(pause)
