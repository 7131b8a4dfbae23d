"""The gateway's HTTP client for engines, against a real socket that sends what a test says, byte by byte too."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from rollmill.errors import EngineError
from rollmill.gateway.routing.engine_http import EngineConnections


class Peer:
    """Answers each request with the next of `answers`; None closes the connection without a byte."""

    def __init__(self, *answers: bytes | None, step: int = 1 << 20, ends: bool = False) -> None:
        self.answers, self.step, self.ends = list(answers), step, ends
        self.connections = 0
        self.requests: list[bytes] = []
        self.closed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/generate"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0)
                if answer is None:
                    break
                for at in range(0, len(answer), self.step):
                    writer.write(answer[at : at + self.step])
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.ends:
                    break
        writer.close()
        self.closed.set()


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\nT: 1\r\n\r\n"
SIZED = b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nlost"


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
@pytest.mark.parametrize("whole", [True, False])
async def test_answers_are_read_and_their_connection_is_kept(step: int, whole: bool) -> None:
    peer = Peer(CHUNKED, SIZED, b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED, step=step)
    connections = EngineConnections(5.0)
    async with peer.running() as url:
        for status, body in ((200, b"abc0123456789"), (404, b"lost"), (200, b"abc0123456789")):
            async with connections.post(url, b"{}", "secret", whole=whole) as answer:
                assert (answer.status, await answer.read()) == (status, body)
        assert peer.connections == 1
        assert all(b"Authorization: Bearer secret\r\n" in request for request in peer.requests)
        connections.close()


async def test_a_connection_that_was_closed_while_idle_costs_no_answer() -> None:
    peer = Peer(SIZED, None, SIZED)
    connections = EngineConnections(5.0)
    async with peer.running() as url:
        for _ in range(2):
            async with connections.post(url, b"", None) as answer:
                assert await answer.read() == b"lost"
        assert peer.connections == 2
        assert not peer.answers
        connections.close()
    with pytest.raises(OSError):  # the second attempt fails as well: the engine is gone
        async with connections.post(url, b"", None):
            pass


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 99 no\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 5000,
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20000,
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    ],
)
async def test_an_answer_that_is_not_http_is_an_error_of_the_engine(answer: bytes) -> None:
    connections = EngineConnections(5.0)
    async with Peer(answer).running() as url:
        with pytest.raises(EngineError):
            async with connections.post(url, b"{}", None) as exchange:
                await exchange.read()
        connections.close()


async def test_an_answer_that_breaks_off_or_stops_is_an_error_after_what_has_arrived() -> None:
    begun = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
    connections = EngineConnections(0.2)
    async with Peer(begun, ends=True).running() as url:
        async with connections.post(url, b"{}", None) as exchange:
            assert await exchange.read_some() == b"abc"
            with pytest.raises(ConnectionResetError):
                await exchange.read_some()
    async with Peer(begun).running() as url:
        async with connections.post(url, b"{}", None) as exchange:
            assert await exchange.read_some() == b"abc"
            with pytest.raises(TimeoutError, match="silent"):
                await exchange.read_some()
    async with Peer(b"HTTP/1.0 200 OK\r\n\r\nthe rest", ends=True).running() as url:
        async with connections.post(url, b"{}", None) as exchange:
            assert await exchange.read() == b"the rest"
    connections.close()


async def test_leaving_closes_the_connection_unless_the_answer_is_about_to_end() -> None:
    begun = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
    peer = Peer(begun, begun + b"0\r\n\r\n", SIZED, step=len(begun))
    connections = EngineConnections(5.0)
    async with peer.running() as url:
        async with connections.post(url, b"{}", None) as exchange:
            assert await exchange.read_some() == b"abc"
        await peer.closed.wait()  # the engine notices that nobody waits
        async with connections.post(url, b"{}", None) as exchange:
            assert await exchange.read_some() == b"abc"
            exchange.finish()
        while not connections._kept:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        async with connections.post(url, b"{}", None) as exchange:
            assert await exchange.read() == b"lost"
        assert peer.connections == 2
        connections.close()


async def test_a_reader_who_is_slow_stops_the_engine_and_one_who_is_cancelled_closes() -> None:
    body = b"x" * (24 << 20)
    peer = Peer(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body, b"HTTP/1.1 200 OK\r\n")
    connections = EngineConnections(5.0)
    async with peer.running() as url:
        async with connections.post(url, b"{}", None) as exchange:
            await asyncio.sleep(0.1)
            assert exchange._buffered < len(body) // 2
            assert await exchange.read() == body

        async def ask() -> None:
            async with connections.post(url, b"{}", None):
                raise AssertionError("there is no status yet")

        asking = asyncio.create_task(ask())
        while len(peer.requests) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        asking.cancel()
        await asyncio.wait([asking])
        await peer.closed.wait()
        connections.close()
