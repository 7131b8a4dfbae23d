"""Machines of an E2B server, `[machine] kind = "e2b"`: against `rollmill machines serve`'s application over a real
socket, which E2B's own SDK holds to E2B's API (test_e2b.py); and against a server that answers nonsense."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from rollmill.errors import ConfigError, MachineError, NoCapacity, TaskError
from rollmill.kinds import build
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.machine import MachineHost, MachineSection
from rollmill.machines.remote import e2b_client, rpc
from rollmill.machines.remote.app import make_app
from rollmill.machines.remote.service import Service
from tests.machines.conftest import start_host

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEY = "a-key-of-the-service"


@asynccontextmanager
async def listening(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> Service:
    return Service(await start_host(), KEY, capacity=2, starts=2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(service: Service) -> AsyncIterator[str]:
    async with listening(make_app(service)) as url:
        yield url


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", KEY)


@asynccontextmanager
async def machines(url: str) -> AsyncIterator[MachineHost]:
    host: MachineHost = build(MachineSection.model_validate({"kind": "e2b", "api_url": url, "sandbox_url": url}))
    try:
        yield host
    finally:
        await host.close()


async def test_commands_and_files(url: str, service: Service) -> None:
    async with machines(url) as host:
        machine = await host.create(BUILT_IN, {"deep/main.py": b"print(6 * 7)", "b": b"\0\xff"})
        result = await machine.exec(["python", "deep/main.py"])
        assert (result.output, result.exit_code, result.stopped) == (b"42\n", 0, None) and result.seconds > 0
        words = await machine.exec(["sh", "-c", "cat; echo $A; pwd; exit 3"], stdin=b"in\n", env={"A": "b"}, cwd="/tmp")
        assert (words.exit_code, words.output) == (3, b"in\nb\n/tmp\n")
        assert (await machine.exec(["printf", r"\377\0\200"])).output == b"\xff\0\x80", "an archive is no text"
        assert (await machine.exec(["no-such-program"])).exit_code == 127
        assert (await machine.exec(["sh", "-c", "echo a >&2; id -u"], user="root")).output.split() == [b"0", b"a"]
        assert (await machine.exec(["sleep", "60"], timeout_s=0.3)).stopped == "time"
        cut = await machine.exec(["sh", "-c", "seq 100000"], max_output=100)
        assert cut.truncated and cut.output.startswith(b"1\n2\n") and cut.output.endswith(b"99999\n100000\n")
        assert await machine.read("b") == b"\0\xff" and await machine.read("/work/deep/main.py") == b"print(6 * 7)"
        with pytest.raises(OSError) as large:
            await machine.read("deep/main.py", max_bytes=3)
        assert large.value.errno == errno.EFBIG
        for path in ("gone", "a\0b"):
            with pytest.raises(FileNotFoundError):
                await machine.read(path)
        for refused in (machine.snapshot, machine.fork, machine.pause, lambda: machine.exec(["true"], user="x")):
            with pytest.raises(OSError, match=r"cannot be (saved|forked|paused)|no user 'x'"):
                await refused()
        await machine.close()
        await machine.close()
        assert not service.all()


async def test_a_cancelled_command_ends(url: str) -> None:
    async with machines(url) as host:
        machine = await host.create(BUILT_IN)
        running = asyncio.create_task(machine.exec(["sh", "-c", "touch begun; sleep 600"], timeout_s=700.0))
        while (await machine.exec(["test", "-e", "begun"])).exit_code:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        while (await machine.exec(["sh", "-c", "grep -la '60[0]' /proc/[0-9]*/cmdline"])).output:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_what_the_server_refuses_has_a_name(url: str, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async with machines(url) as host:
        with pytest.raises(TaskError, match="no such template"):
            await host.create("no-such-image")
        machine, _ = [await host.create(BUILT_IN) for _ in range(2)]
        with pytest.raises(NoCapacity, match="full"):
            await host.create(BUILT_IN)
        await service.end(machine.id)  # type: ignore[attr-defined]
        with pytest.raises(MachineError):
            await machine.exec(["true"])
    monkeypatch.setenv("E2B_API_KEY", "another-key")
    async with machines(url) as host:
        with pytest.raises(MachineError, match="refuses the key"):
            await host.create(BUILT_IN)
    monkeypatch.delenv("E2B_API_KEY")
    with pytest.raises(ConfigError, match="E2B_API_KEY"):
        build(MachineSection.model_validate({"kind": "e2b"}))
    monkeypatch.setenv("E2B_API_KEY", KEY)
    async with machines("http://127.0.0.1:1") as host:
        with pytest.raises(MachineError, match="does not answer"):
            await host.create(BUILT_IN)


SANDBOX = json.dumps({"sandboxID": "s1", "envdAccessToken": "t"}).encode()
END = rpc.envelope({}, rpc.END)
NONSENSE: dict[str, tuple[bytes, bytes]] = {
    "no JSON": (b"<html>", b""),
    "no name": (b"{}", b""),
    "a name that is a host": (b'{"sandboxID": "s1@elsewhere"}', b""),
    "a name that is a path": (b'{"sandboxID": "s1.elsewhere/"}', b""),
    "a domain that is a path": (b'{"sandboxID": "s1", "domain": "elsewhere/"}', b""),
    "a list": (b'{"sandboxID": ["s1"]}', b""),
    "nothing": (SANDBOX, b""),
    "cut short": (SANDBOX, rpc.envelope({"event": {"start": {"pid": 1}}})[:-2]),
    "no end": (SANDBOX, rpc.envelope({"event": {"start": {"pid": 1}}})),
    "not how it ended": (SANDBOX, END),
    "an endless envelope": (SANDBOX, b"\0\xff\xff\xff\xff"),
    "an event that is none": (SANDBOX, rpc.envelope({"event": [1]})),
    "output that is no text": (SANDBOX, rpc.envelope({"event": {"data": {"stdout": 7}}})),
    "an exit code that is none": (SANDBOX, rpc.envelope({"event": {"end": {"exitCode": "0"}}}) + END),
    "an error that is none": (SANDBOX, rpc.envelope({"error": [1]}, rpc.END)),
}


@pytest.mark.parametrize("name", NONSENSE)
async def test_an_answer_that_makes_no_sense_is_an_infrastructure_failure(name: str) -> None:
    created, events = NONSENSE[name]

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=created if request.path == "/sandboxes" else events)

    app = web.Application()
    app.router.add_route("*", "/{any:.*}", answer)
    async with listening(app) as url, machines(url) as host:
        with pytest.raises(MachineError, match="strangely" if "a name" in name or "a domain" in name else "E2B server"):
            await host.create(BUILT_IN)
        left: Any = host
        assert not left._machines


async def test_a_machine_sends_this_process_nowhere_and_does_not_fill_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What answers in a sandbox may be under its commands' control."""
    monkeypatch.setattr(e2b_client, "_LARGEST", 1 << 17)
    reached: list[str] = []
    answered = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/sandboxes":
            return web.Response(body=SANDBOX)
        if request.path == "/process.Process/Start":
            return web.Response(body=rpc.envelope({"event": {"end": {"exitCode": 0}}}) + END)
        if request.path == "/secret":
            reached.append(request.path)
        if request.query.get("path") == "/work/elsewhere":
            raise web.HTTPTemporaryRedirect("/secret")
        if request.query.get("path") != "/work/endless":
            return web.Response()
        response = web.StreamResponse(status=500)
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * (1 << 16))
        finally:
            answered.set()

    app = web.Application()
    app.router.add_route("*", "/{any:.*}", answer)
    async with listening(app) as url, machines(url) as host:
        machine = await host.create(BUILT_IN)
        with pytest.raises(MachineError, match="307"):
            await machine.read("elsewhere")
        with pytest.raises(MachineError, match="307"):
            await machine.write("elsewhere", b"x")
        with pytest.raises(MachineError, match="more than 131072 bytes"):
            await machine.read("endless")
        async with asyncio.timeout(60):
            await answered.wait()
    assert not reached
