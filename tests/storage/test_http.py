import socket
import threading
from pathlib import Path

import pytest

from rollmill.errors import ObjectMissing, StorageError
from rollmill.storage.http import object_app
from rollmill.storage.objects import Objects
from tests.storage.serving import served


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
        for start, length in ((0, len(big) + 1), (len(big), 1)):
            with pytest.raises(StorageError):
                away.get_range("a/big", start, length)
        assert away.get("a/empty") == b""  # the connection is still in step after all these answers


def test_it_is_read_only(tmp_path: Path) -> None:
    with served(object_app(Objects.open(tmp_path))) as url:
        away = Objects.open(url)
        for write in (lambda: away.put("k", b""), lambda: away.create("k", b""), lambda: away.delete("k")):
            with pytest.raises(StorageError, match="read-only"):
                write()


def test_a_token_is_asked_for(tmp_path: Path) -> None:
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
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",  # cut short
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n",  # would fill the memory
        b"HTTP/1.1 200 OK\r\n\r\nno length",
        b"not http at all\r\n\r\n",
        b"",
    ],
)
def test_a_broken_or_hostile_server_is_an_error(reply: bytes) -> None:
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
        with pytest.raises(StorageError):
            Objects.open(f"http://127.0.0.1:{server.getsockname()[1]}").get("k")
