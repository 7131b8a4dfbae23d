"""What a machine reaches through its proxy: the names on the list, and nothing else. Real machines and sockets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rollmill.errors import MachineError
from rollmill.machines.egress import Refused, is_allowed, read_head
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.namespace.client import NamespaceConfig
from rollmill.machines.qemu.host import QemuConfig, QemuHost
from rollmill.machines.qemu.parts import find_parts
from tests.inference.world import until
from tests.machines.conftest import run_python, start_host


class Echo(BaseHTTPRequestHandler):
    """Answers with the headers that it was sent."""

    def do_GET(self) -> None:
        body = json.dumps({"path": self.path, "headers": dict(self.headers)}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


_ASK = """
import json, os, socket, sys
host, _, port = os.environ["http_proxy"].removeprefix("http://").partition(":")
def ask(head):
    s = socket.create_connection((host, int(port)), timeout=20)
    s.sendall(head.encode())
    data = b""
    while part := s.recv(65536):
        data += part
    return data.decode()
"""


async def logged(log: Path, count: int) -> list[dict[str, Any]]:
    """The lines of the log. A connection's line is written when it has ended, which its client does not wait for."""
    await until(lambda: len(log.read_text().splitlines()) >= count)
    return [json.loads(line) for line in log.read_text().splitlines()]


async def test_only_names_on_the_list_are_reached_and_all_is_logged(port: int, tmp_path: Path) -> None:
    log = tmp_path / "egress.jsonl"
    config = NamespaceConfig(egress=[f"127.0.0.1:{port}", "localhost"], egress_log=str(log))
    host = await start_host(config)
    try:
        machine = await host.create(BUILT_IN)
        assert machine.capabilities.network == "policy"
        program = _ASK + (
            f"target = '127.0.0.1:{port}'\n"
            "secret = 'Cookie: a=b\\r\\nAuthorization: Basic x\\r\\nProxy-Authorization: y\\r\\nX-Kept: 1\\r\\n'\n"
            "plain = ask(f'GET http://{target}/a?b HTTP/1.1\\r\\nHost: other\\r\\n{secret}\\r\\n')\n"
            "tunnel = ask(f'CONNECT {target} HTTP/1.1\\r\\n\\r\\nGET /t HTTP/1.0\\r\\nCookie: own\\r\\n\\r\\n')\n"
            "other = ask('GET http://127.0.0.1:1/ HTTP/1.1\\r\\n\\r\\n')\n"
            "private = ask('CONNECT localhost:443 HTTP/1.1\\r\\n\\r\\n')\n"
            "print(json.dumps([plain, tunnel, other, private]))\n"
        )
        plain, tunnel, other, private = json.loads(await run_python(machine, program))
        seen = json.loads(plain.rpartition("\r\n\r\n")[2])
        assert seen["path"] == "/a?b" and seen["headers"]["X-Kept"] == "1"
        assert seen["headers"]["Host"] == f"127.0.0.1:{port}"
        assert not {"Cookie", "Authorization", "Proxy-Authorization"} & seen["headers"].keys()
        assert tunnel.startswith("HTTP/1.1 200 Connected") and '"Cookie": "own"' in tunnel  # it cannot be read here
        assert other.startswith("HTTP/1.1 403") and private.startswith("HTTP/1.1 403")

        fetch = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}/lib').status)"
        result = await machine.exec(["env", "-u", "no_proxy", "python", "-c", fetch], timeout_s=20)
        assert result.output == b"200\n", result  # programs find the proxy by themselves
        lines = await logged(log, 5)
        assert [line.get("refused") for line in lines] == [
            None,
            None,
            "not on the list",
            "leads to a private network",
            None,
        ]
        assert lines[0]["method"] == "GET" and lines[0]["path"] == "/a?b" and lines[1]["bytes_received"] > 0

        hostile = _ASK + (
            "heads = ('\\r\\n\\r\\n', 'GET / HTTP/1.1\\r\\n\\r\\n', 'X' * 40000 + '\\r\\n\\r\\n')\n"
            "print([ask(head)[:12] for head in heads])"
        )
        assert await run_python(machine, hostile) == "['HTTP/1.1 400', 'HTTP/1.1 400', '']"
        await machine.close()
        await asyncio.sleep(0)
        direct = await host.create(BUILT_IN)
        program = f"import socket\ntry: socket.create_connection(('127.0.0.1', {port}), 2)\nexcept OSError: print('no')"
        assert await run_python(direct, program) == "no"
    finally:
        await host.close()


@pytest.mark.slow
async def test_virtual_machines_and_their_forks_reach_the_same_names(port: int, tmp_path: Path) -> None:
    try:
        find_parts()
    except MachineError as error:
        pytest.skip(str(error))
    log = tmp_path / "egress.jsonl"
    host = QemuHost(QemuConfig(memory_mb=256, egress=[f"127.0.0.1:{port}"], egress_log=str(log)))
    program = _ASK + (
        f"allowed = ask('GET http://127.0.0.1:{port}/a HTTP/1.1\\r\\n\\r\\n')\n"
        "other = ask('GET http://127.0.0.1:1/ HTTP/1.1\\r\\n\\r\\n')\n"
        "print(allowed[9:12], other[9:12])\n"
    )
    try:
        machine = await host.create(BUILT_IN)
        assert machine.capabilities.network == "policy"
        [fork] = await machine.fork(1)
        for each in (machine, fork):
            result = await each.exec(["python", "-c", program], timeout_s=120.0)
            assert result.output == b"200 403\n", result
            await each.close()
    finally:
        await host.close()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line.get("refused") for line in lines] == [None, "not on the list"] * 2
    assert len({line["machine"] for line in lines}) == 2


def test_without_the_setting_there_is_no_proxy() -> None:
    assert NamespaceConfig().egress == []
    for entry in ("", "https://host", "host:port", "a b", "*"):
        with pytest.raises(ValueError, match="egress"):
            NamespaceConfig(egress=[entry])


@pytest.mark.parametrize(
    ("host", "port", "allowed"),
    [
        ("packages.example.net", 443, True),
        ("packages.example.net", 22, False),
        ("files.example.com", 80, True),
        ("example.com", 80, False),
        ("evilexample.com", 443, False),
        ("git.host", 8443, True),
        ("git.host", 443, False),
        ("packages.example.net.evil.net", 443, False),
    ],
)
def test_the_list(host: str, port: int, allowed: bool) -> None:
    assert is_allowed(host, port, ["packages.example.net", "*.example.com", "git.host:8443"]) == allowed


@pytest.mark.parametrize(
    "head",
    [
        "GET /relative HTTP/1.1",
        "GET http://user@host/ HTTP/1.1",
        "GET https://host/ HTTP/1.1",
        "CONNECT host:443/path HTTP/1.1",
        "CONNECT [::1]:443 HTTP/1.1",
        "CONNECT host:70000 HTTP/1.1",
        "GET http://host/ HTTP/1.1\r\nA: b\r\n folded",
        "GET http://host/ HTTP/1.1\r\nA: b\nAuthorization: hidden",
        "GET http://host/ HTTP/1.1\r\nno header",
        "GET http://host/",
        "\0 http://host/ HTTP/1.1",
    ],
)
def test_what_is_no_request_to_a_proxy(head: str) -> None:
    with pytest.raises(Refused):
        read_head(f"{head}\r\n\r\n".encode())
