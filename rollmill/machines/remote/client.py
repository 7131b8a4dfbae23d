"""[machine] kind = "remote": machines of other hosts, placed by image and load. asyncio, in the dispatcher.

A host that does not answer gets no machine for a while. A machine whose host is lost raises MachineError: the episode
is tried again, and lands on another host. Requests are not repeated: a command might run twice.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
from pydantic import Field, TypeAdapter, ValidationError

from rollmill.config import Config
from rollmill.errors import ConfigError, MachineError, NoCapacity, TaskError
from rollmill.keepalive import keepalive_connector
from rollmill.machines.framed_machine import Answer, FramedMachine
from rollmill.machines.guest import frames as wire
from rollmill.machines.host_choice import Place, Placement
from rollmill.machines.machine import Capabilities, MachineHost, Snapshot
from rollmill.machines.remote.outward import Workers
from rollmill.machines.remote.ports import CHANNEL, RemotePort
from rollmill.tls import server_context

_CAPABILITIES = TypeAdapter(Capabilities)
_CONNECT_S = 5.0
_ANSWER_S = 60.0  # beyond the time of the command itself
_FIRST_START_S = 240.0  # a host may have to fetch the image, or to boot its template
_RENEW_S = 15.0
_LOOK_S = 0.5  # between two looks for room, by all that wait
_ASKED_AT_ONCE = 64  # hosts
_ANSWERED: dict[str, tuple[str, type]] = {"snapshot": ("snapshot", str), "fork": ("machines", list)}


class RemoteConfig(Config):
    """Settings of machines on other hosts."""

    hosts: list[str] = Field(
        [],
        description="URLs of `rollmill machines serve`, one per host. A machine goes to a host that has its image and "
        "is not much fuller than the others.",
    )
    key_env: str = Field(
        "ROLLMILL_MACHINES_KEY",
        description="Environment variable with the key of the hosts. The key stands in no file.",
    )
    listen: str | None = Field(
        None,
        pattern=r"^[^:]+:[0-9]+$",
        description="ADDRESS:PORT at which hosts that nobody can reach connect to this run, with `rollmill machines "
        "serve --connect URL`. Beyond one host use TLS.",
    )
    tls_cert: str | None = Field(None, description="Certificate for `listen`, as PEM: then HTTPS.")
    tls_key: str | None = Field(None, description="Private key of `tls_cert`, as PEM.")
    patience_s: float = Field(
        60.0,
        ge=0,
        description="How long a machine may wait for room, in seconds. Then the episode fails as one that the "
        "infrastructure lost, and is tried again.",
    )


class HostLost(MachineError):
    """A host of machines does not answer, or has forgotten a machine."""


class RemoteHost(MachineHost):
    """Creates machines on several hosts. One per event loop."""

    def __init__(self, config: RemoteConfig) -> None:
        self.config = config
        self._key = os.environ.get(config.key_env, "")
        if not self._key:
            raise ConfigError(
                f"the environment has no {config.key_env}, the key of the hosts of machines",
                hint="`rollmill machines serve` uses the variable of the same name",
            )
        if not config.hosts and config.listen is None:
            raise ConfigError("no host of machines is named", hint="set `machine.hosts`, `machine.listen`, or both")
        self.workers: Workers | None = None
        self._placement = Placement([Place(url.rstrip("/"), 1 << 20) for url in config.hosts])
        self._session: aiohttp.ClientSession | None = None
        self._machines: dict[str, RemoteMachine] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._looking: asyncio.Task[list[str | None]] | None = None
        self._looked_at = 0.0
        self._joining: set[asyncio.Task[str | None]] = set()

    async def create(
        self, image: str, files: Mapping[str, bytes] | None = None, *, snapshot: Snapshot | None = None
    ) -> RemoteMachine:
        await self.start()
        deadline = time.monotonic() + self.config.patience_s
        while True:
            try:
                return await self._create(image, files or {}, snapshot)
            except NoCapacity as error:
                if time.monotonic() + error.retry_after_s > deadline:
                    raise
                await asyncio.sleep(max(error.retry_after_s, 0.05))
                await self._look_together()  # others may have ended machines of theirs

    async def start(self) -> None:
        """Ask every host for its capacity. MachineError if none answers."""
        async with self._starting:
            if self._session is not None:
                return
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
            headers = {"Authorization": f"Bearer {self._key}"}
            self._session = aiohttp.ClientSession(timeout=timeout, headers=headers, connector=keepalive_connector())
            try:
                await self._listen()
                asked = await self._look()
                problems = [problem for problem in asked if problem is not None]
                if problems and len(problems) == len(asked) and self.workers is None:
                    raise MachineError(
                        f"no host of machines answers: {problems[0]}", hint="`machine.hosts` lists their URLs"
                    )
            except BaseException:  # the next caller starts anew
                await self.close()
                raise
            self._renewing = asyncio.create_task(self._renew())

    async def _listen(self) -> None:
        """Let hosts connect that nobody can reach."""
        if self.config.listen is None:
            return
        tls = None
        if self.config.tls_cert is not None:
            tls = server_context(self.config.tls_cert, self.config.tls_key, "machine.tls_cert")
        address, _, port = self.config.listen.rpartition(":")
        self.workers = Workers(self._key, self._join)
        try:
            await self.workers.start(address, int(port), tls)
        except OSError as error:
            raise MachineError(f"cannot listen at {self.config.listen} for hosts of machines: {error}") from None

    async def _join(self, url: str) -> None:
        self._placement.add(place := Place(url, 0))
        self._joining.add(task := asyncio.create_task(self._introduce(place)))
        task.add_done_callback(self._joining.discard)

    async def export(self, snapshot: Snapshot) -> Snapshot | None:
        if isinstance(snapshot.state, bytes):
            return snapshot
        place, name = snapshot.state
        try:
            _, state = await self.ask(
                place, "GET", f"/snapshots/{name}", b"", timeout_s=_ANSWER_S, max_body=wire.MAX_BODY
            )
        except OSError:
            return None
        return Snapshot(snapshot.image, state)

    async def release(self, snapshot: Snapshot) -> None:
        if isinstance(snapshot.state, bytes):
            return
        place, name = snapshot.state
        assert self._session is not None
        async with self._session.delete(f"{place.name}/snapshots/{name}"):
            pass

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        if self._looking is not None:
            self._looking.cancel()
        for machine in list(self._machines.values()):
            with contextlib.suppress(MachineError):
                await machine.close()
        if self.workers is not None:
            await self.workers.close()
            self.workers = None
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _create(self, image: str, files: Mapping[str, bytes], snapshot: Snapshot | None) -> RemoteMachine:
        """On one host. If that host does not answer, on another one: nothing of the episode has run yet."""
        header: dict[str, Any] = {"image": image, "files": [[path, len(data)] for path, data in files.items()]}
        body = b"".join(files.values())
        if snapshot is not None and isinstance(snapshot.state, bytes):
            header, body, snapshot = {**header, "state": True}, body + snapshot.state, None
        frame = wire.pack(header, body)
        if not self._placement.places:
            raise NoCapacity("no host of machines has connected yet", retry_after_s=0.5)
        for _ in self._placement.places:
            place = self._placement.take(image, time.monotonic())
            if snapshot is not None:  # its state is on one host only
                self._placement.failed(place, time.monotonic(), host_is_down=False)
                place, name = snapshot.state
                place.starting += 1
                frame = wire.pack({**header, "snapshot": name}, b"".join(files.values()))
            began = time.monotonic()
            try:
                answer, _ = await self.ask(place, "POST", "/machines", frame, timeout_s=_FIRST_START_S)
            except NoCapacity:
                self._placement.failed(place, time.monotonic(), host_is_down=False)
                raise
            except HostLost as error:
                self._placement.failed(place, time.monotonic(), host_is_down=True)
                lost = error
                if snapshot is not None:
                    raise
                continue
            except BaseException:
                self._placement.failed(place, time.monotonic(), host_is_down=False)
                raise
            self._placement.started(place, time.monotonic() - began)
            if "task" in answer:
                self._placement.ended(place)
                raise TaskError(str(answer["task"]), hint=answer.get("hint"))
            return self.adopt(place, answer)
        raise lost

    def adopt(self, place: Place, answer: dict[str, Any]) -> RemoteMachine:
        try:
            able = _CAPABILITIES.validate_python(answer["capabilities"])
            machine = RemoteMachine(self, place, str(answer["id"]), str(answer["image"]), able)
        except (KeyError, ValidationError):
            self._placement.ended(place)
            raise MachineError(f"the host {place.name} answered nonsense to a request for a machine") from None
        self._machines[machine.id] = machine
        return machine

    def ended(self, machine: RemoteMachine) -> None:
        if self._machines.pop(machine.id, None) is not None:
            self._placement.ended(machine.place)

    async def ask(
        self, place: Place, method: str, path: str, frame: bytes, *, timeout_s: float, max_body: int = 0
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request and check its answer. HostLost: the host does not answer; MachineError: it says it failed."""
        if self._session is None:
            raise MachineError("the hosts of machines were closed")
        limit = wire.LENGTHS.size + wire.MAX_HEADER + max_body
        try:
            async with asyncio.timeout(timeout_s + _ANSWER_S):
                async with self._session.request(method, place.name + path, data=frame) as response:
                    _check_status(
                        place, response, (await response.content.read(500)) if response.status != 200 else b""
                    )
                    data = await _read_up_to(response, limit)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise HostLost(f"the host {place.name} does not answer: {error!r}") from None
        try:
            header, body = wire.unpack(data)
        except wire.WireError as error:
            raise MachineError(f"the host {place.name} answered nonsense: {error!r}") from None
        if "failed" in header:
            raise MachineError(str(header["failed"])[:1000], hint=header.get("hint"))
        if "errno" in header:
            raise OSError(int(header["errno"]), str(header.get("message")), header.get("path"))
        return header, body

    async def open_channel(self, place: Place, path: str) -> aiohttp.ClientWebSocketResponse:
        """A WebSocket to a host. HostLost: it does not answer, or does not want it."""
        if self._session is None:
            raise MachineError("the hosts of machines were closed")
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await self._session.ws_connect(place.name + path, **CHANNEL)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise HostLost(f"the host {place.name} does not answer: {error!r}") from None

    async def _look(self) -> list[str | None]:
        at_once = asyncio.Semaphore(_ASKED_AT_ONCE)

        async def ask(place: Place) -> str | None:
            async with at_once:
                return await self._introduce(place)

        return list(await asyncio.gather(*(ask(place) for place in self._placement.places)))

    async def _look_together(self) -> None:
        """Look once for all that wait for room: many may wait for many hosts."""
        if self._looking is None or (self._looking.done() and time.monotonic() - self._looked_at > _LOOK_S):
            self._looking, self._looked_at = asyncio.create_task(self._look()), time.monotonic()
        await asyncio.shield(self._looking)

    async def _introduce(self, place: Place) -> str | None:
        """Learn the capacity of a host. Returns what is wrong with it."""
        assert self._session is not None
        try:
            async with asyncio.timeout(_CONNECT_S * 2), self._session.get(f"{place.name}/machines") as response:
                if response.status != 200:
                    raise ValueError(f"status {response.status}: {(await response.text())[:200]}")
                facts = await response.json(content_type=None)
            counts = {name: int(facts[name]) for name in ("capacity", "starts", "running")}
            self._placement.learn(place, **counts)
            return None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError) as error:
            self._placement.lost(place, time.monotonic())
            return f"{place.name}: {error!r}"

    async def _renew(self) -> None:
        """Begin the leases of our machines anew. A host that does not answer shows at the next request."""
        while True:
            await asyncio.sleep(_RENEW_S)
            at_once, ids = asyncio.Semaphore(_ASKED_AT_ONCE), collections.defaultdict(list)
            for machine in self._machines.values():
                ids[machine.place].append(machine.id)
            await asyncio.gather(*(self._renew_on(place, its, at_once) for place, its in ids.items()))

    async def _renew_on(self, place: Place, ids: list[str], at_once: asyncio.Semaphore) -> None:
        with contextlib.suppress(MachineError, OSError):
            # a host that hangs must not cost machines of others their leases
            async with at_once, asyncio.timeout(_RENEW_S / 3):
                await self.ask(place, "POST", "/machines/renew", wire.pack({"ids": ids}), timeout_s=0.0)


class RemoteMachine(FramedMachine):
    limits_told = (*FramedMachine.limits_told, "machine")

    def __init__(self, host: RemoteHost, place: Place, identifier: str, image: str, capabilities: Capabilities) -> None:
        self._host = host
        self.place = place
        self.id = identifier
        self.image = image
        self.capabilities = capabilities
        self._closed = False
        self._ports: list[RemotePort] = []

    async def request(
        self, header: dict[str, Any], body: bytes = b"", *, timeout_s: float = 0.0, max_body: int = wire.MAX_BODY
    ) -> Answer | None:
        path, frame = f"/machines/{self.id}/{header['op']}", wire.pack(header, body)
        reply, data = await self._host.ask(self.place, "POST", path, frame, timeout_s=timeout_s, max_body=max_body)
        try:
            return self.checked(header["op"], reply), data
        except wire.WireError as error:
            raise MachineError(f"the host {self.place.name} answered nonsense: {error}") from None

    async def listen(self) -> tuple[socket.socket, int]:
        port = RemotePort(lambda path: self._host.open_channel(self.place, f"/machines/{self.id}/{path}"))
        self._ports.append(port)
        return await port.listen()

    async def snapshot(self) -> Snapshot:
        return Snapshot(self.image, (self.place, str((await self._ask("snapshot", {}))["snapshot"])))

    async def fork(self, count: int = 1) -> list[RemoteMachine]:
        made = (await self._ask("fork", {"count": count}))["machines"]
        self.place.running += len(made)
        return [self._host.adopt(self.place, answer) for answer in made]

    async def prepare(self) -> None:
        await self._ask("prepare", {})

    async def pause(self) -> None:
        await self._ask("pause", {})

    async def resume(self) -> None:
        await self._ask("resume", {})

    async def close(self) -> None:
        """End the machine. If its host does not answer, its lease ends it."""
        if self._closed:
            return
        self._closed = True
        for port in self._ports:
            await port.close()
        try:
            with contextlib.suppress(HostLost):
                await self._host.ask(self.place, "DELETE", f"/machines/{self.id}", b"", timeout_s=0.0)
        finally:
            self._host.ended(self)

    async def _ask(self, operation: str, header: dict[str, Any]) -> dict[str, Any]:
        reply, _ = await self.request({"op": operation, **header}, max_body=0) or ({}, b"")
        wanted = _ANSWERED.get(operation)
        if wanted is not None and not isinstance(reply.get(wanted[0]), wanted[1]):
            raise MachineError(f"the host {self.place.name} answered nonsense to {operation!r}")
        return reply


def _check_status(place: Place, response: aiohttp.ClientResponse, text: bytes) -> None:
    said = text.decode("utf-8", "replace")
    if response.status == 503:
        try:
            after = min(max(float(response.headers.get("Retry-After", "1")), 0.0), 60.0)
        except ValueError:
            after = 1.0
        raise NoCapacity(f"{place.name}: {said}", retry_after_s=after)
    if response.status in (404, 502, 504):
        raise HostLost(f"{place.name}: {said or response.reason}")
    if response.status == 401:
        raise MachineError(f"{place.name}: {said}", hint="`machine.key_env` names the variable with the key")
    if response.status != 200:
        raise MachineError(f"{place.name} answered with status {response.status}: {said}")


async def _read_up_to(response: aiohttp.ClientResponse, limit: int) -> bytes:
    data = bytearray()
    async for part in response.content.iter_chunked(1 << 20):
        data += part
        if len(data) > limit:
            raise aiohttp.ClientPayloadError(f"more than {limit} bytes")
    return bytes(data)
