"""The simulated slow link, which other tests and benchmarks use, behaves as documented."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from benchmarks.relay import Relay, RelayProcess


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that echoes everything."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve_one(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)
            except OSError:
                pass

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve_one, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    with closing(server):
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.settimeout(30)
    return connection


def read(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = connection.recv(1 << 16)
        assert part, f"closed after {len(data)} bytes"
        data += part
    return bytes(data)


def send_and_end(connection: socket.socket, data: bytes) -> threading.Thread:
    def send() -> None:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_bytes_are_the_same_and_not_faster_than_the_link(echo: int) -> None:
    data = os.urandom(2 << 20)
    with RelayProcess(("127.0.0.1", echo), mbit=40, rtt_ms=10) as relay, connect(relay.port) as connection:
        began = time.monotonic()
        sender = send_and_end(connection, data)
        assert read(connection, len(data)) == data
        assert connection.recv(1) == b""  # the end is forwarded too
        sender.join()
        assert time.monotonic() - began >= len(data) * 8 / 40e6


def test_the_link_is_shared_by_all_connections(echo: int) -> None:
    data = os.urandom(1 << 19)
    with Relay(("127.0.0.1", echo), mbit=40, rtt_ms=0) as relay:
        connections = [connect(relay.port) for _ in range(4)]
        began = time.monotonic()
        senders = [send_and_end(connection, data) for connection in connections]
        assert all(read(connection, len(data)) == data for connection in connections)
        assert time.monotonic() - began >= 4 * len(data) * 8 / 40e6
        for sender, connection in zip(senders, connections, strict=True):
            sender.join()
            connection.close()
        assert relay.carried == (4 * len(data), 4 * len(data))


def test_a_request_takes_one_round_trip_and_a_new_connection_two(echo: int) -> None:
    with Relay(("127.0.0.1", echo), mbit=1000, rtt_ms=80) as relay, connect(relay.port) as connection:
        for least in (0.16, 0.08, 0.08):
            began = time.monotonic()
            connection.sendall(b"ping")
            assert read(connection, 4) == b"ping"
            assert time.monotonic() - began >= least * 0.95


def test_a_receiver_that_sleeps_holds_back_the_sender() -> None:
    """The far end does not read: the relay takes a bounded number of bytes, then the sender must wait."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        with Relay(server.getsockname(), mbit=10_000, rtt_ms=1) as relay, connect(relay.port) as connection:
            far, _ = server.accept()
            connection.settimeout(1)
            sent = 0
            with pytest.raises(TimeoutError):
                while sent < 256 << 20:
                    sent += connection.send(bytes(1 << 16))
            assert relay.carried[0] < 16 << 20
            far.close()


@pytest.mark.parametrize("kind", [Relay, RelayProcess])
def test_a_cut_link_is_silent_and_continues_when_restored(echo: int, kind: type[Relay] | type[RelayProcess]) -> None:
    with kind(("127.0.0.1", echo), mbit=1000, rtt_ms=2) as relay, connect(relay.port) as connection:
        connection.sendall(b"a")
        assert read(connection, 1) == b"a"
        relay.cut()
        connection.sendall(b"b")
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        relay.restore()
        connection.settimeout(30)
        assert read(connection, 1) == b"b"


@pytest.mark.parametrize("kind", [Relay, RelayProcess])
def test_a_dropped_link_closes_open_connections(echo: int, kind: type[Relay] | type[RelayProcess]) -> None:
    with kind(("127.0.0.1", echo), mbit=1000, rtt_ms=2) as relay:
        with connect(relay.port) as connection:
            connection.sendall(b"a")
            assert read(connection, 1) == b"a"
            relay.cut(drop=True)
            with pytest.raises((ConnectionError, AssertionError)):
                read(connection, 1)
        with connect(relay.port) as connection, pytest.raises((ConnectionError, AssertionError)):
            connection.sendall(b"a")
            read(connection, 1)
        relay.restore()
        with connect(relay.port) as connection:
            connection.sendall(b"a")
            assert read(connection, 1) == b"a"
