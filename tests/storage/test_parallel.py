import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.relay import Relay
from rollmill.errors import ObjectMissing, ObjectTruncated, StorageError
from rollmill.storage import parallel
from rollmill.storage.object_server import object_app
from rollmill.storage.objects import Objects
from rollmill.storage.parallel import Uploads, read_ranges
from tests.storage.serving import Front, new_bucket, port_of, s3_options, s3_server, served


@pytest.fixture(params=["directory", "memory", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "s3":
        return Objects.open(new_bucket(), options=s3_options(s3_server()))
    return Objects.open(tmp_path if request.param == "directory" else "memory://")


def test_ranges_come_in_order_whatever_their_size(objects: Objects) -> None:
    data = {"a": os.urandom(100_000), "b": os.urandom(10), "c": b""}
    for key, content in data.items():
        objects.put(key, content)
    wanted = [("a", 0, 100_000), ("b", 3, 4), ("c", 0, 0), ("a", 5, 64), ("a", 99_999, 1), ("a", 0, 3 * 4096)]
    read = list(read_ranges(objects, wanted, threads=4, piece_bytes=4096, bytes_in_flight=50_000))
    assert read == [data[key][start : start + length] for key, start, length in wanted]
    assert list(read_ranges(objects, [])) == []


def test_a_missing_object_raises_at_its_range(objects: Objects) -> None:
    objects.put("a", bytes(10))
    for wanted, error in ((("none", 0, 5), ObjectMissing), (("a", 5, 10), ObjectTruncated)):
        read = read_ranges(objects, [("a", 0, 10), wanted, ("a", 0, 10)], threads=3)
        assert next(read) == bytes(10)
        with pytest.raises(error):
            next(read)


class Recorded:
    """A store that records how many requests and bytes are in flight."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.url = objects.url
        self._lock = threading.Lock()
        self.now = self.most = self.asked = 0

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._lock:
            self.now += 1
            self.asked += length
            self.most = max(self.most, self.now)
        time.sleep(0.02)
        with self._lock:
            self.now -= 1
        return self._objects.get_range(key, start, length)


def test_reading_ahead_is_bounded_and_lazy(tmp_path: Path) -> None:
    objects = Objects.open(tmp_path)
    objects.put("a", bytes(1 << 20))
    recorded = Recorded(objects)
    pulled = 0

    def ranges() -> Iterator[tuple[str, int, int]]:
        nonlocal pulled
        for _ in range(1000):
            pulled += 1
            yield "a", 0, 1000

    read = read_ranges(recorded, ranges(), threads=4, piece_bytes=1000, bytes_in_flight=8000)  # type: ignore[arg-type]
    for _ in range(8):
        assert len(next(read)) == 1000
    assert 1 < recorded.most <= 4
    assert pulled <= 8 + 8 and recorded.asked <= 16_000
    read.close()
    time.sleep(0.1)
    assert recorded.asked <= 16_000 and pulled <= 16


def test_a_cut_link_loses_pieces_and_not_the_object(tmp_path: Path) -> None:
    """The link breaks in the middle of a transfer: pieces that have arrived are not sent again."""
    home = Objects.open(tmp_path)
    data = os.urandom(8 << 20)
    home.put("k", data)
    with served(object_app(home)) as url, Relay(("127.0.0.1", port_of(url)), mbit=200, rtt_ms=4) as relay:
        away = Objects.open(f"http://127.0.0.1:{relay.port}", patience=1.5)
        read = read_ranges(away, [("k", i << 20, 1 << 20) for i in range(8)], threads=2, piece_bytes=256 << 10)
        parts = [next(read)]
        relay.cut(drop=True)
        threading.Timer(0.3, relay.restore).start()
        parts += list(read)
        assert b"".join(parts) == data
        assert relay.carried[1] < len(data) * 1.5


def test_a_link_that_stays_cut_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_PAUSE_SECONDS", (0.05, 0.05))
    home = Objects.open(tmp_path)
    home.put("k", bytes(1 << 20))
    with served(object_app(home)) as url, Relay(("127.0.0.1", port_of(url)), mbit=1000, rtt_ms=0) as relay:
        away = Objects.open(f"http://127.0.0.1:{relay.port}", patience=0.6)
        relay.cut()
        with pytest.raises(StorageError):
            list(read_ranges(away, [("k", 0, 1 << 20)]))
        relay.restore()
        assert list(read_ranges(away, [("k", 0, 1 << 20)])) == [bytes(1 << 20)]


def test_pieces_cross_a_long_link_together(tmp_path: Path) -> None:
    """Replies take half a second: all pieces are requested before the first one has arrived."""
    home = Objects.open(tmp_path)
    data = os.urandom(1 << 20)
    home.put("k", data)
    with served(object_app(home)) as url, Relay(("127.0.0.1", port_of(url)), mbit=1000, rtt_ms=500) as relay:
        away = Objects.open(f"http://127.0.0.1:{relay.port}")
        assert b"".join(read_ranges(away, [("k", 0, len(data))], threads=16, piece_bytes=64 << 10)) == data
        assert relay.connections == 16


def test_all_uploads_exist_at_the_end(objects: Objects) -> None:
    contents = {f"p/{number}": os.urandom(10_000) for number in range(20)}
    objects.put("p/3", contents["p/3"])  # left by an interrupted attempt
    objects.put("p/4", b"half")
    with Uploads(objects, threads=4, bytes_in_flight=30_000) as uploads:
        for key, data in contents.items():
            uploads.create(key, data)
    assert {key: objects.get(key) for key in objects.list("p")} == contents


def test_uploads_hold_a_bounded_number_of_bytes(tmp_path: Path) -> None:
    release, lock, under_way = threading.Event(), threading.Lock(), []

    class Slow(Recorded):
        def create(self, key: str, data: bytes) -> None:
            with lock:
                under_way.append(len(data))
            release.wait(30)

    started = threading.Semaphore(0)

    def fill() -> None:
        with Uploads(Slow(Objects.open(tmp_path)), threads=8, bytes_in_flight=2500) as uploads:  # type: ignore[arg-type]
            for number in range(6):
                uploads.create(f"p/{number}", bytes(1000))
                started.release()

    thread = threading.Thread(target=fill)
    thread.start()
    assert started.acquire(timeout=10) and started.acquire(timeout=10)
    assert not started.acquire(timeout=0.3)  # the third has to wait
    assert sum(under_way) <= 2500
    release.set()
    thread.join(10)
    assert len(under_way) == 6


def test_the_first_error_of_an_upload_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_PAUSE_SECONDS", (0.01, 0.01))
    with Front(s3_server()) as front:
        objects = Objects.open(new_bucket(), options=s3_options(front.url), patience=0.5)
        front.mode = "busy"
        with pytest.raises(StorageError), Uploads(objects, threads=2) as uploads:
            uploads.create("p/1", bytes(1000))
        with pytest.raises(ValueError, match="ours"), Uploads(objects, threads=2) as uploads:
            uploads.create("p/1", bytes(1000))
            raise ValueError("ours")  # not hidden by errors of the store
        front.mode = "pass"
        with Uploads(objects, threads=2) as uploads:
            front.busy_for = 2
            uploads.create("p/1", bytes(1000))
        assert objects.head("p/1") == 1000


def test_the_first_pieces_grow() -> None:
    """They share a link. If they were equal, all would arrive at the same moment, and nothing before."""
    wanted = [("a", 5, 300 << 10), ("b", 0, 0), ("c", 0, 6 << 20), ("d", 0, 64 << 20)]
    pieces = list(parallel._pieces(wanted, 8 << 20, 16))
    for key, start, length in wanted:
        mine = [(piece, last) for piece, last in pieces if piece.key == key]
        ends = [piece.start + piece.length for piece, _ in mine]
        assert [piece.start for piece, _ in mine] == [start, *ends[:-1]] and ends[-1] == start + length
        assert [last for _, last in mine] == [False] * (len(mine) - 1) + [True]
    sizes = [piece.length for piece, last in pieces if piece.key == "c" and not last]
    assert sizes[0] < sizes[6] < sizes[-1] == 512 << 10
    assert min(piece.length for piece, _ in pieces if piece.key != "b") >= 128 << 10
    assert max(piece.length for piece, _ in pieces) == 4 << 20
