import contextlib
import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.relay import Relay
from rollmill.errors import ObjectMissing, ObjectTruncated, StorageError
from rollmill.storage.object_server import object_app
from rollmill.storage.objects import Objects
from tests.storage.serving import Front, port_of, served


def test_the_same_reads_over_http(tmp_path: Path) -> None:
    home = Objects.open(tmp_path)
    big = bytes(range(256)) * 50_000
    home.put("a/big", big)
    home.put("a/empty", b"")
    with served(object_app(home)) as url:
        away = Objects.open(url)
        assert away.get("a/big") == big
        assert away.get("a/empty") == b""
        assert away.get_range("a/big", 1000, 5) == big[1000:1005]
        assert away.get_range("a/big", 0, len(big)) == big
        assert (away.head("a/big"), away.head("a/empty"), away.head("a/none")) == (len(big), 0, None)
        assert away.list("a") == ["a/big", "a/empty"]
        assert away.folders() == ["a"]
        with pytest.raises(ObjectMissing):
            away.get("a/none")
        assert away.modified("a/none") is None
        assert away.modified("a/big") == int(home.modified("a/big") or 0)  # HTTP has whole seconds
        for start, length in ((0, len(big) + 1), (len(big), 1)):
            with pytest.raises(ObjectTruncated):
                away.get_range("a/big", start, length)
        assert away.get("a/empty") == b""  # the connection is still in sync after all these replies


def test_it_is_read_only(tmp_path: Path) -> None:
    with served(object_app(Objects.open(tmp_path))) as url:
        away = Objects.open(url)
        for write in (lambda: away.put("k", b""), lambda: away.create("k", b""), lambda: away.delete("k")):
            with pytest.raises(StorageError, match="read-only"):
                write()


def test_a_token_is_required(tmp_path: Path) -> None:
    home = Objects.open(tmp_path)
    home.put("k", b"x")
    with served(object_app(home, token="secret")) as url:
        assert Objects.open(url, token="secret").get("k") == b"x"
        for token in (None, "wrong"):
            with pytest.raises(StorageError, match="401") as caught:
                Objects.open(url, token=token).get("k")
            assert caught.value.hint and "token" in caught.value.hint


def test_nothing_outside_the_store_is_served(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    store = Objects.open(tmp_path / "store")
    store.put("k", b"x")
    with served(object_app(store)) as url:
        host, port = url.removeprefix("http://").split(":")
        for path in ("/objects/../secret", "/objects/..%2Fsecret", "/objects/%2Fetc%2Fpasswd", "/objects/.staging%2Fx"):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
                assert connection.makefile("rb").readline().split()[1] in (b"404", b"500", b"400")


def test_a_server_that_comes_back_is_used_again(tmp_path: Path) -> None:
    home = Objects.open(tmp_path)
    home.put("k", b"x")
    with served(object_app(home)) as url:
        away = Objects.open(url)
        assert away.get("k") == b"x"
    with pytest.raises(StorageError, match="region is up") as caught:
        away.get("k")
    assert not isinstance(caught.value, ObjectMissing)
    with served(object_app(home), port=int(url.rpartition(":")[2])):
        assert away.get("k") == b"x"


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",  # truncated
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n",  # would fill the memory
        b"HTTP/1.1 200 OK\r\n\r\nno length",
        b"not http at all\r\n\r\n",
        b"",
    ],
)
def test_a_broken_or_hostile_server_is_an_error(reply: bytes) -> None:
    with _answering(reply) as objects, pytest.raises(StorageError):
        objects.get("k")


@pytest.mark.parametrize("date", ["Mon, 31 Dec 99999999999999999999999999 23:59:59 +0000", "yesterday"])
def test_an_invalid_date_is_an_error(date: str) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nLast-Modified: {date}\r\n\r\n"
    with _answering(head.encode()) as objects, pytest.raises(StorageError, match="the size and time"):
        objects.stat("k")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"keys": 1}', b'{"keys": [1]}', b'{"keys": ["a"], "x": 1e999}', b"[" * 100_000]
)
def test_an_invalid_listing_is_an_error(body: bytes) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with _answering(head + body) as objects, pytest.raises(StorageError, match="did not answer list"):
        objects.list()


@contextlib.contextmanager
def _answering(reply: bytes) -> Iterator[Objects]:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(2):  # the client tries twice
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(reply)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield Objects.open(f"http://127.0.0.1:{server.getsockname()[1]}")


def test_many_threads_read_at_once_over_connections_that_are_kept(tmp_path: Path) -> None:
    home = Objects.open(tmp_path)
    data = os.urandom(3 << 20)
    home.put("k", data)
    with served(object_app(home)) as url, Relay(("127.0.0.1", port_of(url)), mbit=10_000, rtt_ms=0) as relay:
        away = Objects.open(f"http://127.0.0.1:{relay.port}")
        for _ in range(10):
            assert away.get_range("k", 5, 5) == data[5:10]
            assert away.head("none") is None
        assert relay.connections == 1
        starts = range(0, len(data), 1 << 16)
        for _ in range(3):  # new threads, the same connections
            with ThreadPoolExecutor(4) as pool:
                parts = list(pool.map(lambda start: away.get_range("k", start, 1 << 16), starts))
            assert b"".join(parts) == data
        assert relay.connections <= 4


def test_a_watch_answers_when_the_object_exists(tmp_path: Path) -> None:
    home = Objects.open(tmp_path)
    with served(object_app(home, token="secret")) as url:
        away = Objects.open(url, token="secret")
        assert not away.wait_for("a/k", 0)
        assert not away.wait_for("a/k", 0.2)
        writer = threading.Timer(0.3, home.create, ("a/k", b"x"))
        writer.start()
        assert away.wait_for("a/k", 25)
        writer.join()
        assert away.wait_for("a/k", 25)
        with pytest.raises(StorageError, match="401"):
            Objects.open(url).wait_for("a/k", 1)
        for seconds in ("nan", "-1", "soon"):
            request = urllib.request.Request(
                f"{url}/watch?key=a/none&seconds={seconds}", headers={"Authorization": "Bearer secret"}
            )
            with pytest.raises(urllib.error.HTTPError, match="400"):
                urllib.request.urlopen(request, timeout=10)


def test_a_watch_does_not_block_other_requests(tmp_path: Path) -> None:
    home = Objects.open(tmp_path)
    home.put("k", b"x")
    with served(object_app(home)) as url, ThreadPoolExecutor(40) as pool:
        away = Objects.open(url)
        watches = [pool.submit(away.wait_for, "later", 25) for _ in range(40)]
        assert [away.get("k") for _ in range(20)] == [b"x"] * 20
        assert not any(watch.done() for watch in watches)
        home.put("later", b"x")
        assert all(watch.result(20) for watch in watches)


def test_a_busy_region_is_retried(tmp_path: Path) -> None:
    home = Objects.open(tmp_path)
    home.put("k", b"0123")
    with served(object_app(home)) as url, Front(url) as front:
        away = Objects.open(front.url)
        for call in (away.get, away.head, lambda key: away.get_range(key, 1, 2), lambda _: away.list()):
            front.busy_for = 2
            call("k")
            assert front.busy_for == 0


@pytest.mark.parametrize("mode", ["busy", "stall", "half"])
def test_a_region_that_does_not_come_back_is_an_error_in_bounded_time(tmp_path: Path, mode: str) -> None:
    home = Objects.open(tmp_path)
    home.put("k", bytes(1000))
    with served(object_app(home)) as url, Front(url) as front:
        away = Objects.open(front.url, patience=1.5)
        assert away.head("k") == 1000
        front.mode = mode
        for call in (lambda: away.get("k"), lambda: away.get_range("k", 0, 1000), lambda: away.list()):
            with pytest.raises(StorageError) as caught:
                call()
            assert not isinstance(caught.value, ObjectMissing | ObjectTruncated)
        front.mode = "pass"
        assert away.get("k") == bytes(1000)


def test_a_very_slow_body_is_given_up() -> None:
    """Single bytes keep a socket alive for ever. Below some rate they do not count as a reply."""
    stop = threading.Event()

    def drip(server: socket.socket) -> None:
        while not stop.is_set():
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                try:
                    while not stop.wait(0.05):
                        connection.sendall(b"x")
                except OSError:
                    pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=(server,), daemon=True)
        thread.start()
        try:
            with pytest.raises(StorageError, match="too slow"):
                Objects.open(f"http://127.0.0.1:{server.getsockname()[1]}", patience=2.0).get("k")
        finally:
            stop.set()
