"""Machines of other hosts: real services over real sockets, one of them killed, one of them lying."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from rollmill.errors import ConfigError, MachineError, NoCapacity, TaskError
from rollmill.machines.file_trees import get_tree, put_tree
from rollmill.machines.guest import frames as wire
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.machine import release
from rollmill.machines.remote import client
from rollmill.machines.remote.app import make_app
from rollmill.machines.remote.client import RemoteConfig, RemoteHost
from rollmill.machines.remote.outward import Workers, offer
from rollmill.machines.remote.service import Service
from tests.machines.conftest import start_host
from tests.machines.test_processes import until
from tests.processes import free_port

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEY = "a-key-of-the-service"
SERVE = "from rollmill.cli.main import main; main()"


@asynccontextmanager
async def listening(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> Service:
    return Service(await start_host(), KEY, capacity=3, starts=2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(service: Service) -> AsyncIterator[str]:
    async with listening(make_app(service)) as url:
        yield url


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_MACHINES_KEY", KEY)


@asynccontextmanager
async def remote(*urls: str, patience_s: float = 0.0) -> AsyncIterator[RemoteHost]:
    host = RemoteHost(RemoteConfig(hosts=list(urls), patience_s=patience_s))
    try:
        yield host
    finally:
        await host.close()


async def test_a_remote_machine_is_a_machine(url: str, service: Service, tmp_path: Path) -> None:
    async with remote(url) as host:
        machine = await host.create(BUILT_IN, {"main.py": b"print(6 * 7)"})
        result = await machine.exec(["python", "main.py"], env={"A": "b"})
        assert (result.output, result.exit_code, result.stopped) == (b"42\n", 0, None) and result.seconds > 0
        assert (await machine.exec(["cat"], stdin=b"in" * 50_000, max_output=100)).truncated
        assert (await machine.exec(["sleep", "60"], timeout_s=0.2)).stopped == "time"
        assert (await machine.exec(["id", "-u"], user="root")).output == b"0\n"
        with pytest.raises(PermissionError, match="no user 'x' here"):
            await machine.start(["true"], user="x")
        await machine.write("a/b", b"\0\xff")
        assert await machine.read("/work/a/b") == b"\0\xff"
        for path, number in (("gone", errno.ENOENT), ("a", errno.EISDIR)):
            with pytest.raises(OSError) as error:
                await machine.read(path)
            assert error.value.errno == number
        with pytest.raises(OSError):
            await machine.read("a/b", max_bytes=1)
        await get_tree(machine, "a", tmp_path / "a")
        await put_tree(machine, tmp_path, "trees")
        assert await machine.read("trees/a/b") == b"\0\xff"
        process = await machine.start(["sh", "-c", "echo up; sleep 60"])
        while (await process.state()).output != b"up\n":  # noqa: ASYNC110  another process
            await asyncio.sleep(0.01)
        assert (await process.state()).exit_code is None
        assert (await process.stop()).exit_code == -9 and (await process.stop()).exit_code == -9
        with pytest.raises(OSError):
            await machine.pause()  # as a namespace machine answers

        snapshot = await machine.snapshot()
        [copy] = await machine.fork()
        assert await copy.read("a/b") == b"\0\xff" and copy.capabilities == machine.capabilities
        await copy.close()
        again = await host.create(BUILT_IN, {"new": b"1"}, snapshot=snapshot)
        assert await again.read("a/b") == b"\0\xff" and await again.read("new") == b"1"
        await again.close()
        await release(host, snapshot)
        with pytest.raises(MachineError, match="not on this host any more"):
            await host.create(BUILT_IN, snapshot=snapshot)
        with pytest.raises(TaskError, match="does not exist"):
            await host.create("no-such-image")
        await machine.close()
        await machine.close()
        with pytest.raises(MachineError):
            await machine.exec(["true"])
    assert service.all() == []


_ASK = """
import socket, sys
ask = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20)
ask.sendall(sys.argv[2].encode() * 300_000)
ask.shutdown(socket.SHUT_WR)
answer = b""
while part := ask.recv(65536): answer += part
print(len(answer), set(answer.decode()))
"""


async def test_programs_reach_a_port_of_the_client_and_terminals_are_typed_into(url: str, service: Service) -> None:
    async with remote(url) as host:
        machine = await host.create(BUILT_IN)
        listener, port = await machine.listen()
        server = await asyncio.start_unix_server(_echo, sock=listener)
        asking = {word: await machine.start(["python", "-c", _ASK, str(port), word]) for word in "ab"}
        for word, process in asking.items():
            said = await until(process, b"}")
            assert said.output.decode() == f"300000 {{{word!r}}}\n"
        server.close()
        async with asyncio.timeout(30):
            while (await machine.exec(["python", "-c", _ASK, str(port), "c"])).exit_code == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.05)  # the port closes a moment after the socket
        typed = await machine.start(["sh"], pty=(24, 80))
        await typed.resize(30, 90)
        await typed.write(b"stty size; exit 3\n")
        assert b"30 90" in (await until(typed, b"30 90")).output
        (lent,) = service.all()
        assert lent.connections == {}
        await machine.close()


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def test_a_full_host_refuses_and_a_patient_caller_gets_the_next_place(url: str) -> None:
    async with remote(url) as host, remote(url, patience_s=30.0) as patient:
        machines = [await host.create(BUILT_IN) for _ in range(3)]
        with pytest.raises(NoCapacity, match="full"):
            await host.create(BUILT_IN)
        waiting = asyncio.create_task(patient.create(BUILT_IN))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await machines[0].close()
        assert (await (await waiting).exec(["true"])).exit_code == 0


async def test_many_that_wait_for_room_ask_a_host_as_seldom_as_a_few() -> None:
    asked = 0

    async def full(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.json_response({"capacity": 4, "starts": 2, "running": 4})

    app = web.Application()
    app.router.add_get("/machines", full)
    async with listening(app) as url, remote(url, patience_s=1.2) as host:
        waiting = [host.create(BUILT_IN) for _ in range(64)]
        refused = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(each, NoCapacity) for each in refused)
    assert 2 <= asked <= 5, "once at the start, then twice a second"


async def test_machines_of_a_client_that_has_gone_end_with_their_lease(url: str, service: Service) -> None:
    async with remote(url) as host:
        machine, other = await host.create(BUILT_IN), await host.create(BUILT_IN)
        service.find(machine.id).ends = time.monotonic()  # as if nobody had asked for a minute
        while machine.id in {lent.id for lent in service.all()}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        with pytest.raises(MachineError, match="not here any more"):
            await machine.exec(["true"])
        assert (await other.exec(["true"])).exit_code == 0


async def test_a_client_that_only_thinks_keeps_its_machines(
    url: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks nothing of them, but renews their leases."""
    monkeypatch.setattr(client, "_RENEW_S", 0.05)
    async with remote(url) as host:
        machine = await host.create(BUILT_IN)
        lent = service.find(machine.id)
        lent.ends = soon = time.monotonic() + 20.0
        while lent.ends == soon:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert lent.ends > soon and (await machine.exec(["true"])).exit_code == 0


async def test_without_the_key_nothing_is_answered(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with aiohttp.ClientSession() as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY[:-1]}):
            for method, path in (
                ("GET", "machines"),
                ("POST", "machines"),
                ("POST", "machines/renew"),
                ("POST", "machines/x/exec"),
                ("DELETE", "machines/x"),
                ("DELETE", "snapshots/x"),
            ):
                async with client.request(method, f"{url}/{path}", headers=headers) as answer:
                    assert answer.status == 401, path
        allowed = {"Authorization": f"Bearer {KEY}"}
        for body in (b"", b"x" * 100, wire.pack({}), wire.pack({"image": "a", "files": 1})):
            async with client.post(f"{url}/machines", headers=allowed, data=body) as answer:
                assert answer.status == 400, await answer.text()
    monkeypatch.setenv("ROLLMILL_MACHINES_KEY", "wrong")
    async with remote(url) as host:
        with pytest.raises(MachineError, match="401"):
            await host.create(BUILT_IN)
    monkeypatch.delenv("ROLLMILL_MACHINES_KEY")
    with pytest.raises(ConfigError, match="ROLLMILL_MACHINES_KEY"):
        RemoteHost(RemoteConfig(hosts=[url]))


async def test_a_host_that_dies_costs_its_episodes_one_retry() -> None:
    ports = [free_port(), free_port()]
    arguments = [[sys.executable, "-c", SERVE, "machines", "serve", "--port", str(port)] for port in ports]
    processes = [subprocess.Popen(each, stdout=subprocess.PIPE) for each in arguments]  # noqa: ASYNC220
    try:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        await asyncio.to_thread(_wait_until_served, ports)
        async with remote(*urls, patience_s=20.0) as host:
            machines = [await host.create(f"{BUILT_IN}") for _ in range(24)]
            by_host = {url: [each for each in machines if each.place.name == url] for url in urls}
            assert all(by_host.values())  # one alone would be much fuller
            os.kill(processes[0].pid, signal.SIGKILL)
            for machine in by_host[urls[0]]:
                with pytest.raises(MachineError, match="does not answer"):
                    await machine.exec(["true"])
                await machine.close()
            replaced = [await host.create(BUILT_IN) for _ in by_host[urls[0]]]
            assert {machine.place.name for machine in replaced} == {urls[1]}
            for machine in [*by_host[urls[1]], *replaced]:
                assert (await machine.exec(["true"])).exit_code == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _wait_until_served(ports: list[int]) -> None:
    import socket

    for port in ports:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff" * 64,
        wire.pack({}),
        wire.pack({"id": "x", "image": "y", "capabilities": {"kernel": "none"}}),
        wire.pack({"id": "x"}, b"more bytes than were asked for"),
        b"x" * (2 << 20),
    ],
)
async def test_a_host_that_answers_nonsense_is_an_infrastructure_failure(answer: bytes) -> None:
    async def nonsense(_: web.Request) -> web.Response:
        return web.Response(body=answer)

    async def load(_: web.Request) -> web.Response:
        return web.json_response({"capacity": 4, "starts": 4, "running": 0})

    app = web.Application()
    app.router.add_get("/machines", load)
    app.router.add_post("/machines", nonsense)
    async with listening(app) as url, remote(url) as host:
        with pytest.raises(MachineError):
            await host.create(BUILT_IN)


@pytest.mark.slow
async def test_a_host_that_nobody_can_reach_connects_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    host = RemoteHost(RemoteConfig(listen=f"127.0.0.1:{port}", patience_s=60.0))
    arguments = [sys.executable, "-c", SERVE, "machines", "serve", "--connect", f"http://127.0.0.1:{port}"]
    worker = subprocess.Popen(arguments)  # noqa: ASYNC220  it dials before anyone listens, and again
    try:
        machine = await host.create(BUILT_IN, {"main.py": b"print(6 * 7)"})  # waits for the worker
        assert (await machine.exec(["python", "main.py"])).output == b"42\n"
        others = await asyncio.gather(*(host.create(BUILT_IN) for _ in range(12)))  # more than connections that wait
        done = await asyncio.gather(*(each.exec(["sh", "-c", "sleep 0.2; echo up"]) for each in others))
        assert {result.output for result in done} == {b"up\n"}
        large = os.urandom(3 << 20)
        await machine.write("large", large)
        assert await machine.read("large", max_bytes=1 << 23) == large
        async with aiohttp.ClientSession() as client:
            for headers, status in (
                ({}, 401),
                ({"Authorization": "Bearer wrong", "X-Rollmill-Worker": "a"}, 401),
                ({"Authorization": f"Bearer {KEY}", "X-Rollmill-Worker": "a/b"}, 400),
            ):
                async with client.get(f"http://127.0.0.1:{port}/workers", headers=headers) as answer:
                    assert answer.status == status
        worker.kill()
        worker.wait()
        with pytest.raises(MachineError, match="does not answer"):
            await machine.exec(["true"])
        assert len(host._placement.places) == 1
    finally:
        worker.kill()
        worker.wait()
        await host.close()
    with pytest.raises(ConfigError, match="no host of machines is named"):
        RemoteHost(RemoteConfig())


async def test_a_port_that_is_taken_leaves_nothing_half_started() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        host = RemoteHost(RemoteConfig(listen=f"127.0.0.1:{taken.getsockname()[1]}", patience_s=0.0))
        for _ in range(2):
            with pytest.raises(MachineError, match="cannot listen at"):
                await host.start()
            assert host._session is None and host.workers is None
    await host.start()  # the port is free now
    assert host.workers is not None
    await host.close()


async def test_connections_that_have_gone_leave_their_places_to_others() -> None:
    joined = asyncio.Event()

    async def join(_: str) -> None:
        joined.set()

    workers = Workers(KEY, join)
    await workers.start("127.0.0.1", 0, None)
    headers = {"Authorization": f"Bearer {KEY}", "X-Rollmill-Worker": "a"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for _ in range(70):
            connection = await session.ws_connect(f"http://127.0.0.1:{workers.port}/workers")
            await connection.close()
        async with session.ws_connect(f"http://127.0.0.1:{workers.port}/workers") as connection:
            with pytest.raises(TimeoutError):  # it waits, and is not refused
                await connection.receive(timeout=0.5)
            assert workers._waiting["a"].qsize() < 5
    await workers.close()


async def test_a_program_that_reads_nothing_does_not_lose_its_host(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmill.machines.remote.routes._TYPING_S", 0.2)
    async with remote(url) as host:
        machine = await host.create(BUILT_IN)
        typed = await machine.start(["sh", "-c", "stty raw -echo; echo up; sleep 6; exec wc -c"], pty=(24, 80))
        await until(typed, b"up")
        assert 0 <= await typed.write(b"x" * 30_000, within_s=0.5) < 30_000  # the host answers while the program sleeps
        await asyncio.wait_for(typed.write(b"x" * 30_000), 60.0)  # all is typed once it reads
        await machine.close()


async def test_a_worker_says_once_that_nobody_answers(caplog: pytest.LogCaptureFixture) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    work = asyncio.create_task(offer(url, "key", 1))
    while not caplog.records:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)  # the other connections, and the first that try again
    work.cancel()
    await asyncio.wait([work])
    [text] = [record.getMessage() for record in caplog.records]
    assert f"{url} does not answer: Cannot connect" in text and "ConnectionKey" not in text
