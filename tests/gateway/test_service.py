"""The gateway's role process as a service starts it: several workers behind HTTPS. Requests in it are malformed, slow,
huge and abandoned too."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollmill.chat.formats.choice import format_of
from rollmill.chat.tokenizer import Tokenizer
from rollmill.gateway.routing.fleet import RENEW_S
from rollmill.gateway.workers import Workers
from rollmill.inference.engine_wire import WIRE
from rollmill.runs.free_ports import free_ports
from rollmill.runs.run import RunDirectory
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.trajectory_store import TrajectoryStore
from tests.gateway.conftest import USER, Answers, Door, Mill, until
from tests.gateway.serve import ADMIN, LIVE
from tests.gateway.stand_in import StandIn
from tests.gateway.test_fuzz import CHAT, MALFORMED, fuzz, post
from tests.gateway.test_operations import write_certificate
from tests.runs.conftest import make_config

COUNT = 2


class Service:
    def __init__(self, run: RunDirectory, process: subprocess.Popen[bytes], door: Door, tls: ssl.SSLContext) -> None:
        self.run, self.process, self.door, self.tls = run, process, door, tls

    @property
    def workers(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def descriptors(self) -> int:
        """Open files and sockets of all workers."""
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in self.workers)

    async def send(self, data: bytes, *, close: bool = False) -> int | None:
        """Sends raw bytes over TLS. Returns the status; None if the connection ends without one."""
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            port = self.run.ports["gateway"]
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=self.tls)
            try:
                writer.write(data)
                await writer.drain()
                line = b"" if close else await asyncio.wait_for(reader.readline(), 60)
                return int(line.split()[1]) if line else None
            finally:
                writer.transport.abort()
        return None


def start(run: RunDirectory) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "rollmill.launch.role", "gateway", str(run.path)])


@contextlib.asynccontextmanager
async def service(mill: Mill, tokenizer: Tokenizer, engine: StandIn, *overrides: str) -> AsyncIterator[Service]:
    directory = mill.directory
    write_certificate(directory)
    files = [f"gateway.tls_cert={directory}/cert.pem", f"gateway.tls_key={directory}/key.pem"]
    created = RunDirectory.create(directory, make_config(*files, f"gateway.workers={COUNT}", *overrides))
    run = created.make_service("serve-1", "127.0.0.1", free_ports(1)[0])
    tokenizer.save(run.tokenizer)
    engine.token = run.secrets["engine_token"]
    registered = {"url": (await mill.engine(engine)).url.rstrip("/"), "region": "home", "kind": "stand-in"}
    process = start(run)
    tls = ssl.create_default_context(cafile=str(directory / "cert.pem"))
    tls.check_hostname = False
    trajectories = TrajectoryStore(open_database(run.database_url), Objects.open(run.home_store))
    try:
        connector = aiohttp.TCPConnector(ssl=tls, force_close=True)  # each request reaches any worker
        async with aiohttp.ClientSession(connector=connector) as http:
            door = Door(run.url("gateway"), trajectories, http)

            async def serves() -> bool:
                body = {**registered, "form": "bf16", "wire": WIRE, "capacity": 8, "renews": False}
                with contextlib.suppress(aiohttp.ClientError):
                    status, _ = await door.admin("PUT", "/engines/one", body, token=run.secrets["engine_token"])
                    return status == 200 and (await door.health())["status"] == "ok"
                return False

            async def stay() -> None:
                while True:
                    await asyncio.sleep(RENEW_S)
                    await serves()

            await until(serves)
            staying = asyncio.create_task(stay())
            yield Service(run, process, door, tls)
            staying.cancel()
    finally:
        process.kill()
        process.wait()


async def ask(served: Service, name: str, messages: list[Any]) -> dict[str, Any]:
    """A streamed answer in the conversation `name`, as its last event."""
    key = served.run.secrets["production_key"]
    headers = {"Authorization": f"Bearer {key}", "x-rollmill-session": name}
    body = {"messages": messages, "stream": True, "max_tokens": 8}
    async with served.door.http.post(served.door.url + CHAT, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        events = (await response.text()).split("\n\n")
    assert events[-2] == "data: [DONE]"
    return dict(json.loads(events[-3].removeprefix("data: ")))


async def test_workers_serve_https_survive_a_kill_and_stop_when_asked(
    mill: Mill, tokenizer: Tokenizer, answers: Answers
) -> None:
    owner = Workers(0, [""] * COUNT).owner
    names = [next(f"chat-{n}" for n in range(100) if owner(f"chat-{n}") == number) for number in range(COUNT)]
    text = answers.text("one two three")
    assert format_of(tokenizer).parse(text, []) == {"role": "assistant", "content": "one two three"}
    async with service(mill, tokenizer, StandIn([text])) as served:
        first = {name: (await ask(served, name, [USER]))["rollmill"] for name in names}
        before = served.workers
        assert len(before) == COUNT
        os.kill(before[0], signal.SIGKILL)
        said = [USER, {"role": "assistant", "content": "one two three"}, USER]
        for name in names * 2:  # through any worker, also while one is being restarted
            told = (await ask(served, name, said))["rollmill"]
            assert told["trajectory"] == first[name]["trajectory"]

        async def all_again() -> bool:
            return len(served.workers) == COUNT and (await served.door.health())["problems"] == []

        await until(all_again)
        assert before[1] in served.workers
        plain = served.door.url.replace("https", "http")
        async with aiohttp.ClientSession() as http:
            try:
                async with http.get(f"{plain}/health") as response:
                    assert response.status >= 400
            except aiohttp.ClientError:
                pass  # no HTTP without TLS
        served.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(served.process.wait, 60) == 0


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, COUNT])
async def test_idle_connections_and_slow_headers_are_closed(mill: Mill, tokenizer: Tokenizer, workers: int) -> None:
    settings = (f"gateway.workers={workers}", "gateway.idle_s=0.3")
    async with service(mill, tokenizer, StandIn([]), *settings) as served:

        async def until_closed(data: bytes) -> bytes:
            """All that the gateway sends before it closes the connection, which stays open on this side."""
            reader, writer = await asyncio.open_connection("127.0.0.1", served.run.ports["gateway"], ssl=served.tls)
            try:
                writer.write(data)
                async with asyncio.timeout(60):  # less than the time without the setting
                    return await reader.read()
            finally:
                writer.transport.abort()

        head = b"GET /nowhere HTTP/1.1\r\nHost: x\r\n"
        silent, slow, answered = await asyncio.gather(*map(until_closed, (b"", head, head + b"\r\n")))
        assert (silent, slow) == (b"", b"")
        assert answered.startswith(b"HTTP/1.1 404") and b"connection: close" not in answered.lower()


@pytest.mark.slow
async def test_malformed_slow_and_abandoned_requests_get_no_500_and_leak_nothing_with_workers(
    mill: Mill, tokenizer: Tokenizer, answers: Answers
) -> None:
    engine = StandIn([answers.text("one two three four")], token_delay_s=0.01)
    limits = ["gateway.body_wait_s=0.2", "gateway.max_body_bytes=1048576"]
    async with service(mill, tokenizer, engine, *limits) as served:
        secrets = {LIVE.encode(): served.run.secrets["production_key"].encode()}
        secrets[ADMIN.encode()] = served.run.secrets["admin_token"].encode()

        def keyed(data: bytes) -> bytes:
            for given, real in secrets.items():
                data = data.replace(b"Bearer " + given, b"Bearer " + real)
            return data

        for number in range(8):  # all connections between workers, and to the engine, are open
            await ask(served, f"warm-{number}", [USER])
        before, sessions = served.descriptors(), await served.door.sessions()
        streamed = json.dumps({"messages": [USER], "stream": True, "max_tokens": 50}).encode()
        for _ in range(3):
            statuses = [await served.send(keyed(data)) for data in MALFORMED]
            assert [each for each in statuses if each is not None and not 200 <= each < 500] == [], statuses
            assert await served.send(keyed(post(b"x" * (2 << 20)))) in (413, None)
            assert await served.send(keyed(post(b"{", length=100))) == 408
            cut = [keyed(post(b"{", length=100)), b"POST /v1/chat", keyed(post(streamed)), b"\x16\x03\x01\x02\x00"]
            await asyncio.gather(*[served.send(data, close=True) for data in cut * 4])
            named = keyed(post(streamed)).replace(b"Host: x", b"Host: x\r\nx-rollmill-session: gone")
            await asyncio.gather(*[served.send(named, close=True) for _ in range(4)])

        async def as_before() -> bool:
            async with served.door.http.get(f"{served.door.url}/sessions", headers=admin(served)) as response:
                listed = (await response.json())["sessions"]
            in_flight = sum(each["in_flight"] for each in listed)
            return not in_flight and len(listed) <= sessions + 20 and served.descriptors() <= before + 8

        await until(as_before)
        assert (await served.door.health())["problems"] == []
        assert "error" not in await ask(served, "warm-0", [USER])


@pytest.mark.slow
async def test_requests_made_from_the_openapi_document_get_no_500_with_workers(
    mill: Mill, tokenizer: Tokenizer, answers: Answers
) -> None:
    async with service(mill, tokenizer, StandIn([answers.text("x")])) as served:
        names = ("production_key", "admin_token", "rollout_key")
        await fuzz(served.door, *(served.run.secrets[name] for name in names), verify=False)
        assert (await served.door.health())["problems"] == []


def admin(served: Service) -> dict[str, str]:
    return {"Authorization": f"Bearer {served.run.secrets['admin_token']}"}
