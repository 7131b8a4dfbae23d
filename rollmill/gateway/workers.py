"""Several worker processes behind one address. A session belongs to one worker: the hash of its name says which.

    client ──► any worker ──(the session is another's)──► Unix socket of that worker ──► answer, the same way back

All workers accept from one listening socket. Each has a session log of its own (`log_directory`), so a worker that dies
is started again with its sessions, and the others go on meanwhile. Ids that a worker makes itself hash to that worker:
whoever sends one back reaches it. A conversation without a name belongs to the worker that the hash of its opening
names, so that its later requests reach the same one.

A request for a worker that is being restarted waits for it. It is sent again if the worker died before it answered:
the session's log decides whether the recorded answer is repeated.

A run may have several gateways, each with workers: replicas.py says which gateway a session belongs to. A request for
another gateway goes there, and any worker there passes it on to the right one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import socket
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from aiohttp import web
from yarl import URL

from rollmill.backoff import Backoff
from rollmill.chat.format import Message
from rollmill.errors import GatewayError
from rollmill.gateway.access.access import given_key
from rollmill.gateway.access.account import current_account
from rollmill.gateway.access.keys import SESSION_KEY
from rollmill.gateway.config import GatewayConfig
from rollmill.gateway.replicas import HEADER, Gateways
from rollmill.gateway.wire.streams import send

T = TypeVar("T")
_PEER_S = 10.0  # how long a worker may take to answer another one
_GLANCE_S = 2.0  # the same for /health and /metrics: who asks for them waits only a few seconds
_LOOK_S = 0.25  # how often the clients of forwarded requests are looked at
_OF_CONNECTION = frozenset(
    "connection content-length expect host keep-alive te trailer transfer-encoding upgrade".split()
)


def log_directory(directory: Path, worker: int) -> Path:
    """Where a worker keeps its session log. That of worker 0 is where a gateway without workers has it."""
    return directory if worker == 0 else directory / f"worker-{worker}"


def log_directories(directory: Path) -> list[Path]:
    """All that exist."""
    return [directory, *sorted(directory.glob("worker-*"))] if directory.exists() else []


def opening(messages: Sequence[Message]) -> str:
    """What all requests of one conversation begin with: the messages before the first answer."""
    ends = (index for index, message in enumerate(messages) if message["role"] == "assistant")
    return json.dumps([[message["role"], message["content"]] for message in messages[: next(ends, len(messages))]])


def share(config: GatewayConfig, workers: Workers) -> GatewayConfig:
    """The settings of one worker: places and queue are divided, and one worker deletes what is too old."""
    gateways = workers.gateways
    engines = workers.count * (gateways.count if gateways else 1)  # an engine is asked by all gateways
    if engines == 1:
        return config
    divided = {
        "engine_requests": -(-config.engine_requests // engines),
        "queue_requests": -(-config.queue_requests // workers.count),
    }
    first = workers.number == 0 and (gateways is None or gateways.number == 0)
    return config.model_copy(update=divided | ({} if first else {"retention_days": None}))


class Workers:
    """This worker and the others. `sockets` are the paths of their Unix sockets, by number; `limits` is the file in
    which they share the limits of keys, `metrics` the directory of their metrics. `placed` has the worker of each
    session that is not where the hash of its id says: a client named it, and the number of workers was another one
    when it began. `gateways`: if the run has several."""

    def __init__(
        self,
        number: int = 0,
        sockets: Sequence[str] = ("",),
        limits: int | None = None,
        metrics: Path | None = None,
        *,
        placed: Mapping[str, int] = {},
        patience_s: float = 30.0,
        gateways: Gateways | None = None,
    ) -> None:
        self.number = number
        self.limits, self.metrics = limits, metrics
        self.count = len(sockets)
        self.gateways = gateways
        self.shares = self.count > 1 or gateways is not None  # whether a session may be elsewhere
        self._sockets = sockets
        self._placed = placed
        self._patience_s = patience_s
        self.reader_wait_s = GatewayConfig().reader_wait_s  # see the setting
        self._clients: dict[int, aiohttp.ClientSession] = {}
        self._to_gateways: aiohttp.ClientSession | None = None
        self._waiting: dict[asyncio.Task[Any], web.Request] = {}  # exchanges with others, and for whom

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The connections to the other workers are open in the block."""
        others = {number: path for number, path in enumerate(self._sockets) if number != self.number}
        self._clients = {number: _client(path) for number, path in others.items()}
        self._to_gateways = self.gateways.client() if self.gateways is not None else None
        looking = asyncio.create_task(self._drop_abandoned()) if self.shares else None
        try:
            yield
        finally:
            if looking is not None:
                looking.cancel()
            for client in (*self._clients.values(), *([self._to_gateways] if self._to_gateways else [])):
                await client.close()

    def owner(self, name: str) -> int:
        if name in self._placed:
            return self._placed[name]
        return int.from_bytes(hashlib.blake2b(name.encode(errors="replace"), digest_size=8).digest()) % self.count

    def has_name(self, name: str) -> bool:
        """Whether sessions of this name belong to this gateway."""
        return self.gateways is None or self.gateways.owner(name) == self.gateways.number

    def fresh(self, prefix: str = "") -> str:
        """A new id that belongs to this worker of this gateway."""
        while True:
            name = prefix + uuid.uuid4().hex
            if self.has_name(name) and (self.count == 1 or self.owner(name) == self.number):
                return name

    def elsewhere(self, http: web.Request, name: str) -> bool:
        """Whether this request about the session `name` is for another worker, or for another gateway."""
        if not self.shares or is_from_worker(http):
            return False
        return self._other_gateway(http, name) is not None or (self.count > 1 and self.owner(name) != self.number)

    def _other_gateway(self, http: web.Request, name: str) -> int | None:
        """The other gateway that the session belongs to; None if this one answers."""
        gateways = self.gateways
        if gateways is None or gateways.is_from_gateway(http) or (owner := gateways.owner(name)) == gateways.number:
            return None
        return None if gateways.is_away(owner) and _may_be_answered_here(http) else owner

    async def forward(self, http: web.Request, name: str) -> web.StreamResponse:
        """The answer of the worker that the session `name` belongs to. If that is one of another gateway which cannot
        be reached, a production request is answered here."""
        gateway = self._other_gateway(http, name)
        owner = Peer(self.owner(name)) if gateway is None else Peer(gateway, gateway=True)
        body = await http.read()
        current_account().forwarded = True  # the other worker counts it
        repeatable = not http.path.endswith("/v1/feedback")  # feedback without an id would be there twice
        pauses = Backoff(0.02, 0.5, patience=self._patience_s)
        while True:
            try:
                return await self._watched(http, self._exchange(owner, http, body))
            except (aiohttp.ClientError, OSError):
                if self.gateways is not None and owner.gateway:
                    self.gateways.failed(owner.number)
                    if _may_be_answered_here(http):
                        current_account().forwarded = False
                        return await http.match_info.handler(http)
                if not repeatable or pauses.left() <= 0:
                    raise GatewayError(
                        "the worker of this session is being restarted", status=503, hint="try again"
                    ) from None
                await asyncio.sleep(pauses.failed())
            except _BrokenOff as error:
                raise ConnectionResetError(str(error)) from None

    async def ask_others(self, http: web.Request) -> list[bytes]:
        """What the other workers answer to the same request, each for its own sessions, and the other gateways. Raises
        503 if one does not."""
        answers, silent = await self.ask_those_alive(http, 200, wait_s=_PEER_S, gateways=True)
        if silent:
            raise GatewayError(silent[0], status=503, hint="try again")
        return answers

    async def ask_those_alive(
        self, http: web.Request, *statuses: int, wait_s: float = _GLANCE_S, gateways: bool = False
    ) -> tuple[list[bytes], list[str]]:
        """What the other workers of this gateway answer, and with `gateways` the other gateways; and one sentence about
        each that does not answer with one of the statuses in time."""
        if is_from_worker(http):
            return [], []
        body, peers = await http.read(), [Peer(number) for number in self._clients]
        if gateways and self.gateways is not None and not self.gateways.is_from_gateway(http):
            peers += [Peer(number, gateway=True) for number in self.gateways.others]
        found = await asyncio.gather(*[self._ask(peer, http, body, statuses, wait_s) for peer in peers])
        silent = [peer for peer, answer in zip(peers, found, strict=True) if answer is None]
        answers = [answer for answer in found if answer is not None]
        return answers, [f"{peer} does not answer; it may be starting" for peer in silent]

    async def _ask(
        self, peer: Peer, http: web.Request, body: bytes, statuses: Sequence[int], wait_s: float
    ) -> bytes | None:
        try:
            async with asyncio.timeout(wait_s), self._send(peer, http, body) as response:
                answer = await response.read()
                return answer if response.status in statuses else None
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def _exchange(self, owner: Peer, http: web.Request, body: bytes) -> web.StreamResponse:
        async with self._send(owner, http, body) as response:
            headers = {name: value for name, value in response.headers.items() if name.lower() not in _OF_CONNECTION}
            if response.content_length is not None:
                return web.Response(body=await response.read(), status=response.status, headers=headers)
            relayed = web.StreamResponse(status=response.status, headers=headers)
            try:
                return await relay(http, response, relayed, self.reader_wait_s)
            except (aiohttp.ClientError, OSError):
                if relayed.prepared:  # the client has a part of it: that it ends early must show
                    _abort(http)
                    raise _BrokenOff("the worker died in the middle of an answer") from None
                raise

    @contextlib.asynccontextmanager
    async def _send(self, to: Peer, http: web.Request, body: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        dropped = _OF_CONNECTION | {"content-encoding"}  # aiohttp has decompressed the body
        headers = [(name, value) for name, value in http.headers.items() if name.lower() not in dropped]
        client, base = self._clients.get(to.number), "http://worker"
        if to.gateway:
            assert self.gateways is not None
            client, base = self._to_gateways, await self.gateways.url(to.number)
            headers = [(name, value) for name, value in headers if name.lower() != HEADER]
            headers.append((HEADER, self.gateways.proof))
        assert client is not None, "use it in the block of `running`"
        url = URL(f"{base}{http.raw_path}", encoded=True)
        async with client.request(
            http.method, url, data=body or None, headers=headers, allow_redirects=False
        ) as response:
            yield response

    async def _watched(self, http: web.Request, exchange: Coroutine[Any, Any, T]) -> T:
        """Cancels the exchange when the client disconnects, so that the other worker notices it too."""
        task = asyncio.create_task(exchange)
        self._waiting[task] = http
        try:
            await asyncio.wait([task])
        finally:
            del self._waiting[task]
            if not task.done():  # this task itself is cancelled
                task.cancel()
        if task.cancelled():
            raise _BrokenOff("the client has disconnected")
        return task.result()

    async def _drop_abandoned(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for task, http in list(self._waiting.items()):
                if http.transport is None or http.transport.is_closing():
                    task.cancel()


@dataclass(frozen=True)
class Peer:
    """Another worker of this gateway, or another gateway."""

    number: int
    gateway: bool = False

    def __str__(self) -> str:
        return f"gateway {self.number + 1}" if self.gateway else f"worker {self.number}"


async def relay(
    http: web.Request, source: aiohttp.ClientResponse, to: web.StreamResponse, reader_wait_s: float
) -> web.StreamResponse:
    """Passes an answer on piece by piece."""
    async for piece in source.content.iter_any():
        if not to.prepared:
            await to.prepare(http)
        await send(http, functools.partial(to.write, piece), len(piece), reader_wait_s)
    await to.prepare(http)  # if there was nothing to relay
    await send(http, to.write_eof, 0, reader_wait_s)
    return to


class _BrokenOff(Exception):
    """A forwarded request cannot be repeated: its client has disconnected, or has a part of the answer."""


def _abort(http: web.Request) -> None:
    if http.transport is not None:
        http.transport.abort()


def _may_be_answered_here(http: web.Request) -> bool:
    """Whether any gateway can answer a request: one of production that continues nothing which only its own gateway
    knows. Its body has been read."""
    asks = http.method == "POST" and "/v1/" in http.path and not http.path.endswith("/v1/feedback")
    of_session = given_key(http).startswith(SESSION_KEY)
    return asks and not of_session and not _continues(http._read_bytes or b"")


def _continues(body: bytes) -> bool:
    """Whether the request continues an answer that one gateway has stored."""
    if b'"previous_response_id"' not in body:
        return False
    try:
        return json.loads(body).get("previous_response_id") is not None
    except (ValueError, AttributeError, RecursionError):
        return True


def is_from_worker(http: web.Request) -> bool:
    """Whether another worker sent it: it came through the Unix socket, and is answered here."""
    found = http.transport.get_extra_info("socket") if http.transport is not None else None
    return found is not None and found.family == socket.AF_UNIX


def _client(path: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(path, limit=0, keepalive_timeout=3600.0),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
    )
