"""Real servers on real sockets, for tests of reads between regions and of unreachable stores."""

import asyncio
import atexit
import functools
import http.client
import random
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from aiohttp import web


@contextmanager
def served(app: web.Application, port: int = 0) -> Iterator[str]:
    """Serves an application from a thread. Yields its address."""
    ready, stop = threading.Event(), asyncio.Event()
    address: list[str] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        address.append(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")  # type: ignore[union-attr]
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(10)
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


@functools.cache
def s3_server() -> str:
    """The address of an S3 server that runs until the tests end."""
    command = [sys.executable, "-m", "tests.storage.s3_server"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.kill)
    assert process.stdout is not None
    return process.stdout.readline().strip()


def s3_environment(endpoint: str) -> dict[str, str]:
    """The environment variables of a user of such a server."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }


def s3_options(endpoint: str) -> dict[str, str]:
    """The same for `Objects.open`."""
    return {"endpoint": endpoint, "access_key_id": "somebody", "secret_access_key": "secret", "region": "us-east-1"}


def new_bucket() -> str:
    """The URL of a prefix in a new bucket."""
    name = f"bucket-{uuid.uuid4().hex}"
    connection = http.client.HTTPConnection("127.0.0.1", port_of(s3_server()), timeout=30)
    connection.request("PUT", f"/{name}")
    assert connection.getresponse().status == 200
    connection.close()
    return f"s3://{name}/some/prefix"


class Front:
    """A proxy in front of a real HTTP server: forwards requests, counts them, and fails on demand.

    `mode`: pass · busy (answers 503) · stall (never answers) · half (stops in the middle of the body)
    `busy_for`: the number of next requests that are answered with 503
    """

    def __init__(self, behind: str) -> None:
        self.mode = "pass"
        self.busy_for = 0
        self.requests: list[str] = []  # "GET /path"
        self._released = threading.Event()
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                front._answer(self, port_of(behind))

            do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = handle_any

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Front":
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler, port: int) -> None:
        self.requests.append(f"{request.command} {request.path}")
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        if self.mode == "stall":
            self._released.wait(60)
            request.close_connection = True
            return
        if self.mode == "busy" or self.busy_for > 0:
            self.busy_for -= 1
            request.send_response(503)
            request.send_header("Content-Length", "0")
            return request.end_headers()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request(request.command, request.path, body, dict(request.headers))
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        request.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                request.send_header(name, value)
        length = answer.headers["Content-Length"] if request.command == "HEAD" else str(len(data))
        request.send_header("Content-Length", length)
        request.end_headers()
        if self.mode == "half":
            request.wfile.write(data[: len(data) // 2])
            self._released.wait(60)
            request.close_connection = True
        else:
            request.wfile.write(data)


class Forgetful(Front):
    """Some answers are lost, although the request was carried out. Every request takes `delay_s` longer."""

    def __init__(self, behind: str, share: float, delay_s: float = 0.0) -> None:
        super().__init__(behind)
        self._dice, self._share, self._delay_s = random.Random(1), share, delay_s
        self.lost = 0

    def _answer(self, request: BaseHTTPRequestHandler, port: int) -> None:
        time.sleep(self._delay_s)
        if self._dice.random() >= self._share:
            return super()._answer(request, port)
        self.lost += 1
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request(request.command, request.path, body, dict(request.headers))
        connection.getresponse().read()
        connection.close()
        request.close_connection = True
