"""E2B's own Python SDK, unmodified, against `rollmill machines serve`'s application, over a real socket."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from aiohttp import ClientSession, web

from rollmill.machines.remote import rpc
from rollmill.machines.remote.app import make_app
from rollmill.machines.remote.service import Service
from tests.later import Later
from tests.machines.conftest import start_host

e2b = Later("e2b")
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(importlib.util.find_spec("e2b") is None, reason="the package e2b is not installed"),
]
KEY = "a-key-of-the-service"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url() -> AsyncIterator[str]:
    runner = web.AppRunner(make_app(Service(await start_host(), KEY, capacity=2, starts=2)))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture
def sandbox(url: str) -> Callable[..., e2b.Sandbox]:
    def create(*template: str, **options: object) -> e2b.Sandbox:
        options = {"api_url": url, "sandbox_url": url, "api_key": KEY, "retries": 0, **options}
        return e2b.Sandbox.create(*template, **options)

    return create


async def test_commands(sandbox: Callable[..., e2b.Sandbox]) -> None:
    def use() -> None:
        machine = sandbox(timeout=60, envs={"WHO": "sdk"}, metadata={"task": "7"})
        result = machine.commands.run("echo hi $WHO; echo oops >&2; pwd", envs={"MORE": "1"})
        assert (result.stdout, result.stderr, result.exit_code) == ("hi sdk\n/work\n", "oops\n", 0)
        assert [machine.commands.run("id -u", user=user).stdout for user in ("root", "user")] == ["0\n", "1000\n"]
        with pytest.raises(e2b.SandboxException, match="no user 'nobody' here"):
            machine.commands.run("true", user="nobody")
        with pytest.raises(e2b.CommandExitException) as failed:
            machine.commands.run("echo before; exit 3", cwd="/tmp")
        assert failed.value.exit_code == 3 and failed.value.stdout == "before\n"
        parts: list[str] = []
        machine.commands.run("for i in 1 2 3; do echo $i; sleep 0.05; done", on_stdout=parts.append)
        assert "".join(parts) == "1\n2\n3\n"
        handle = machine.commands.run("sleep 100; echo never", background=True)
        assert [each.pid for each in machine.commands.list()] == [handle.pid]
        again = machine.commands.connect(handle.pid)
        assert machine.commands.kill(handle.pid) and not machine.commands.kill(4711)
        with pytest.raises(e2b.CommandExitException):
            again.wait()
        with pytest.raises(e2b.TimeoutException):
            machine.commands.run("sleep 100", timeout=0.3)
        for _ in range(40):  # more than a machine keeps
            machine.commands.run("true")
        assert machine.get_info().metadata == {"task": "7"}
        assert machine.kill() and not machine.is_running() and not machine.kill()

    await asyncio.to_thread(use)


async def test_files(sandbox: Callable[..., e2b.Sandbox]) -> None:
    def use() -> None:
        with sandbox() as machine:
            machine.files.write("a/b.txt", "hello")
            assert machine.files.write("raw", b"\0\xff", use_octet_stream=True).path == "/work/raw"
            machine.files.write_files([{"path": "x", "data": "1"}, {"path": "/tmp/y", "data": "2"}])
            assert machine.files.read("a/b.txt") == "hello" and machine.files.read("raw", format="bytes") == b"\0\xff"
            assert machine.files.read("/tmp/y") == "2" and machine.commands.run("cat x").stdout == "1"
            machine.commands.run("ln -s a/b.txt link")
            kinds = {entry.path: entry.type for entry in machine.files.list("/work", depth=2)}
            expected = {"/work/a": "dir", "/work/a/b.txt": "file", "/work/link": "symlink", "/work/raw": "file"}
            assert {path: kind.value for path, kind in kinds.items() if path != "/work/x"} == expected
            assert machine.files.make_dir("d") and not machine.files.make_dir("d")
            assert machine.files.rename("a/b.txt", "d/c.txt").path == "/work/d/c.txt"
            machine.files.remove("d")
            assert not machine.files.exists("d/c.txt") and machine.files.get_info("raw").size == 2
            with pytest.raises(e2b.NotFoundException):
                machine.files.read("gone")
            with pytest.raises(e2b.SandboxException):
                machine.files.write("/usr/bin/env", "mine")
            machine.kill()

    await asyncio.to_thread(use)


async def test_sandboxes_are_listed_shared_bounded_and_end_with_their_lease(
    sandbox: Callable[..., e2b.Sandbox], url: str
) -> None:
    options = {"api_url": url, "sandbox_url": url, "api_key": KEY, "retries": 0}

    def use() -> None:
        one, two = sandbox(), sandbox()
        listed = e2b.Sandbox.list(**options).next_items()
        assert {each.sandbox_id for each in listed} == {one.sandbox_id, two.sandbox_id}
        with pytest.raises(e2b.RateLimitException, match="full"):
            sandbox()
        e2b.Sandbox.connect(one.sandbox_id, **options).files.write("shared", "yes")
        assert one.files.read("shared") == "yes"
        two.kill()
        one.set_timeout(1)
        while one.is_running():
            pass
        with pytest.raises(e2b.SandboxException, match="does not exist"):
            sandbox("no-such-image")
        with pytest.raises(e2b.AuthenticationException):
            sandbox(api_key="wrong")

    await asyncio.to_thread(use)


async def test_bad_requests_are_refused_and_nothing_is_open_to_strangers(url: str) -> None:
    async with ClientSession() as client:
        made = await (await client.post(f"{url}/sandboxes", headers={"X-API-Key": KEY}, json={})).json()
        place = {"E2b-Sandbox-Id": made["sandboxID"]}
        own = {**place, "X-Access-Token": made["envdAccessToken"]}
        start = f"{url}/process.Process/Start"
        for headers in ({}, place, {**own, "X-Access-Token": "x"}, {**own, "E2b-Sandbox-Id": "x"}):
            for method, path in (("POST", "process.Process/List"), ("GET", "files?path=x"), ("POST", "files?path=x")):
                async with client.request(method, f"{url}/{path}", headers=headers) as answer:
                    assert answer.status in (401, 404), (headers, path, await answer.text())
        for method, path in (
            ("GET", "sandboxes"),
            ("POST", "v2/sandboxes"),
            ("DELETE", f"sandboxes/{made['sandboxID']}"),
        ):
            async with client.request(method, f"{url}/{path}", headers=own) as answer:
                assert answer.status == 401
        whole = rpc.envelope({"process": {"cmd": "true"}})
        nonsense = [b"", b"\0", whole[:-1], whole + whole, b"\1" + whole[1:], rpc.envelope({"process": 3})]
        nonsense += [rpc.envelope({"process": {"cmd": "x", "args": [1]}})]
        nonsense += [
            rpc.envelope({"process": {"cmd": "x", "args": 1}}),
            rpc.envelope({"process": {"cmd": "x", "envs": []}}),
        ]
        for body in nonsense:
            async with client.post(start, headers=own, data=body) as answer:
                assert answer.status == 400, (body, await answer.text())
        for name, body in (("ListDir", b"{"), ("ListDir", b'{"path": 3}'), ("ListDir", b'{"path": "/", "depth": -1}')):
            async with client.post(f"{url}/filesystem.Filesystem/{name}", headers=own, data=body) as answer:
                assert answer.status == 400
        async with client.post(f"{url}/filesystem.Filesystem/WatchDir", headers=own, data=b"{}") as answer:
            assert answer.status == 501
        for body in (b"[]", b'{"timeout": -1}', b'{"timeout": 1e999}', b'{"templateID": 3}'):
            async with client.post(f"{url}/sandboxes", headers={"X-API-Key": KEY}, data=body) as answer:
                assert answer.status == 400
        async with client.delete(f"{url}/sandboxes/{made['sandboxID']}", headers={"X-API-Key": KEY}) as answer:
            assert answer.status == 204
