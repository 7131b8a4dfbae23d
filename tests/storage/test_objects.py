"""One contract for every store: a directory, memory, and S3 as a real server process over HTTP."""

import os
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollmill.errors import ObjectExists, ObjectMissing, ObjectTruncated, StorageError
from rollmill.storage.objects import Objects
from rollmill.storage.parallel import Uploads
from tests.storage.serving import Front, new_bucket, s3_environment, s3_options, s3_server


@pytest.fixture(params=["directory", "file-url", "memory", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "s3":
        return Objects.open(new_bucket(), options=s3_options(s3_server()))
    urls = {"directory": tmp_path / "store", "file-url": f"file://{tmp_path}/a%20store", "memory": "memory://"}
    return Objects.open(urls[request.param])


def test_a_large_object_is_created_from_a_file(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmill.storage.objects._LARGE_OBJECT", 1 << 20)
    for number, size in enumerate((10, 1 << 20, 7 << 20)):  # several parts of a multipart upload
        data = bytes(range(256)) * (size // 256 + 1)
        (tmp_path / "file").write_bytes(b"before" + data)
        for again in (False, True):
            with (tmp_path / "file").open("rb") as file:
                file.seek(len(b"before"))
                if again:
                    with pytest.raises(ObjectExists):
                        objects.create_from(f"a/{number}", file)
                else:
                    objects.create_from(f"a/{number}", file)
        assert objects.get(f"a/{number}") == data


def test_objects_are_read_back_as_written(objects: Objects) -> None:
    objects.create("a/b/one", b"first")
    objects.put("a/two", b"")
    objects.put("a/b/one", b"0123456789")
    assert objects.get("a/b/one") == b"0123456789"
    assert objects.get_range("a/b/one", 3, 4) == b"3456"
    assert objects.get_range("a/two", 0, 0) == b""
    assert (objects.head("a/b/one"), objects.head("a/two"), objects.head("a/b")) == (10, 0, None)
    objects.delete("a/b/one")
    objects.delete("a/b/one")
    assert objects.head("a/b/one") is None


def test_many_objects_are_removed_at_once_also_if_some_are_not_there(objects: Objects) -> None:
    for number in range(7):
        objects.put(f"a/{number}", b"")
    objects.delete_all(f"a/{number}" for number in (0, 1, 99, 3, 4, 98, 5, 6))
    objects.delete_all([])
    assert objects.list("a") == ["a/2"]


def test_create_is_refused_if_the_key_exists(objects: Objects) -> None:
    objects.create("k", b"mine")
    with pytest.raises(ObjectExists):
        objects.create("k", b"yours")
    assert objects.get("k") == b"mine"


def test_one_of_many_threads_creates_a_key(objects: Objects) -> None:
    together = threading.Barrier(8)

    def race(name: str) -> int:
        won = 0
        for number in range(5):
            together.wait(30)
            try:
                objects.create(f"k/{number}", name.encode() * 1000)
                won += 1
            except ObjectExists:
                pass
        return won

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(race, "abcdefgh")) == 5
    assert all(len(set(objects.get(f"k/{number}"))) == 1 for number in range(5))


def test_missing_objects_raise_another_error_than_failures(objects: Objects) -> None:
    with pytest.raises(ObjectMissing, match="no/such"):
        objects.get("no/such")
    with pytest.raises(ObjectMissing):
        objects.get_range("no/such", 0, 1)


def test_a_range_past_the_end_is_an_error_not_a_short_answer(objects: Objects) -> None:
    objects.put("k", b"0123")
    objects.put("empty", b"")
    for key, start, length in (("k", 0, 5), ("k", 4, 1), ("k", 9, 1), ("k", 3, 1 << 30), ("empty", 0, 1)):
        with pytest.raises(ObjectTruncated, match="truncated"):
            objects.get_range(key, start, length)


def test_the_store_says_when_an_object_was_written(objects: Objects) -> None:
    assert objects.modified("k") is None
    objects.put("k", b"x")
    written = objects.modified("k")
    assert written is not None and abs(written - time.time()) < 60
    time.sleep(1.1)  # S3 has whole seconds
    assert objects.modified("k") == written
    objects.put("k", b"y")
    again = objects.modified("k")
    assert again is not None and again > written


def test_waiting_for_an_object_ends_when_it_exists(objects: Objects) -> None:
    assert not objects.wait_for("k", 0.05)
    writer = threading.Timer(0.1, objects.put, ("k", b"x"))
    writer.start()
    assert objects.wait_for("k", 60)
    writer.join()


def test_large_objects_and_views_are_written(objects: Objects) -> None:
    data = os.urandom(12 << 20)  # more than one part of a multipart upload
    objects.create("created", data)
    objects.put("put", data)
    assert objects.get("created") == objects.get("put") == data
    with pytest.raises(ObjectExists):
        objects.create("created", data)


def test_listing_goes_by_folders(objects: Objects) -> None:
    for key in ("w/b/2", "w/b/1", "w/a", "wide/1", "z"):
        objects.put(key, b"x")
    assert objects.list() == ["w/a", "w/b/1", "w/b/2", "wide/1", "z"]
    assert objects.list("w") == objects.list("w/") == ["w/a", "w/b/1", "w/b/2"]
    assert objects.list("nothing") == []
    assert objects.folders() == ["w", "wide"]
    assert objects.folders("w") == ["b"]
    assert objects.folders("nothing") == []


@pytest.mark.slow
@pytest.mark.parametrize("objects", ["directory", "s3"], indirect=True)
def test_long_listings_are_complete(objects: Objects) -> None:
    with Uploads(objects, threads=4) as uploads:
        for number in range(1050):  # S3 lists a thousand keys at a time
            uploads.create(f"w/{number:04d}/k", b"")
    assert objects.list("w") == [f"w/{number:04d}/k" for number in range(1050)]
    assert objects.folders("w") == [f"{number:04d}" for number in range(1050)]


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "../a", "a/../b", "a/./b", ".staging/x", "a\\b", "a b", "ä", "x" * 300]
)
def test_keys_that_could_leave_the_store_are_refused(objects: Objects, key: str) -> None:
    with pytest.raises(StorageError, match="not a valid object key"):
        objects.put(key, b"x")
    with pytest.raises(StorageError, match="not a valid object key"):
        objects.get(key)


def test_a_name_cannot_be_an_object_and_a_folder_in_a_directory(tmp_path: Path) -> None:
    objects = Objects.open(tmp_path)
    objects.create("a/file", b"x")
    for write in (objects.create, objects.put):
        for key in ("a", "a/file/below"):
            with pytest.raises(StorageError) as caught:
                write(key, b"y")
            assert not isinstance(caught.value, ObjectMissing)
    assert objects.list() == ["a/file"]
    with pytest.raises(ObjectMissing):
        objects.get("a")
    with pytest.raises(ObjectMissing):
        objects.get("a/file/below")


def test_an_unknown_kind_of_store_is_explained() -> None:
    with pytest.raises(StorageError, match="ftp://host") as caught:
        Objects.open("ftp://host/x")
    assert caught.value.hint and "\n" not in caught.value.message


RACE = """
import sys
from rollmill.errors import ObjectExists
from rollmill.storage.objects import Objects
objects = Objects.open(sys.argv[1])
won = 0
print("ready", flush=True)
sys.stdin.readline()
for number in range(50):
    try:
        objects.create(f"k/{number}", sys.argv[2].encode() * 1000)
        won += 1
    except ObjectExists:
        pass
print(won)
"""


@pytest.mark.parametrize("kind", ["directory", "s3"])
def test_one_of_many_processes_creates_a_key(tmp_path: Path, kind: str) -> None:
    url = str(tmp_path) if kind == "directory" else new_bucket()
    environment = os.environ | s3_environment(s3_server())  # as a user configures the store
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, url, name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )
        for name in "abc"
    ]  # fmt: skip
    assert all(racer.stdout and racer.stdout.readline() == "ready\n" for racer in racers)
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    won = [int(racer.communicate()[0]) for racer in racers]
    assert sum(won) == 50
    store = Objects.open(url, options=s3_options(s3_server()))
    assert all(len(set(store.get(f"k/{number}"))) == 1 for number in range(50))


def test_files_of_a_killed_writer_are_never_visible_and_are_removed(tmp_path: Path) -> None:
    Objects.open(tmp_path).put("k", b"x")
    left = tmp_path / ".staging" / "123-abandoned"
    left.write_bytes(b"half")
    assert Objects.open(tmp_path).list() == ["k"]
    assert left.exists()  # it may belong to a writer that is still at work
    os.utime(left, (0, 0))
    Objects.open(tmp_path)
    assert not left.exists()


FULL_DISK = """
import resource, sys
from rollmill.errors import StorageError
from rollmill.storage.objects import Objects
objects = Objects.open(sys.argv[1])
objects.put("k", b"old")
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
for write in (objects.put, objects.create):
    try:
        write("k" if write == objects.put else "new", bytes(100_000))
        sys.exit("the write was accepted")
    except StorageError as error:
        assert "free some space" in error.hint and repr("k" if write == objects.put else "new") in error.message, error
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
assert objects.get("k") == b"old" and objects.list() == ["k"]
assert not list(__import__("pathlib").Path(sys.argv[1], ".staging").iterdir())
objects.create("new", bytes(100_000))
"""


def test_a_full_disk_loses_nothing_and_says_what_to_do(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], check=True)


def test_a_range_is_one_request() -> None:
    """Over a long link each further request costs a tenth of a second."""
    with Front(s3_server()) as front:
        objects = Objects.open(new_bucket(), options=s3_options(front.url))
        objects.put("k", bytes(range(100)))
        front.requests.clear()
        assert objects.get_range("k", 10, 5) == bytes(range(10, 15))
        with pytest.raises(ObjectTruncated):
            objects.get_range("k", 100, 5)
        with pytest.raises(ObjectMissing):
            objects.get_range("none", 0, 5)
        assert [request.split()[0] for request in front.requests] == ["GET", "GET", "GET"]


def test_a_busy_store_is_retried() -> None:
    with Front(s3_server()) as front:
        objects = Objects.open(new_bucket(), options=s3_options(front.url))
        for call in (
            lambda: objects.create("k", b"x"),
            lambda: objects.put("k", b"xy"),
            lambda: objects.get("k"),
            lambda: objects.get_range("k", 1, 1),
            lambda: objects.head("k"),
            lambda: objects.list(),
        ):
            front.busy_for = 2
            call()
            assert front.busy_for == 0
        assert objects.get("k") == b"xy"


@pytest.mark.parametrize("mode", ["busy", "stall", "half"])
def test_a_store_that_does_not_come_back_is_an_error_in_bounded_time(mode: str) -> None:
    with Front(s3_server()) as front:
        bucket, options = new_bucket(), s3_options(front.url)
        patient, objects = Objects.open(bucket, options=options), Objects.open(bucket, options=options, patience=1.5)
        patient.put("k", bytes(1000))
        front.mode = mode
        calls = [lambda: objects.get("k"), lambda: objects.get_range("k", 0, 1000)]
        if mode != "half":  # these have no body to cut
            calls += [lambda: objects.create("new", b"x"), lambda: objects.head("k"), lambda: objects.list()]

        def refused(call: object) -> bool:
            with pytest.raises(StorageError) as caught:
                call()  # type: ignore[operator]
            return bool(caught.value.hint) and not isinstance(caught.value, ObjectMissing | ObjectExists)

        with ThreadPoolExecutor(len(calls)) as pool:
            assert all(pool.map(refused, calls))
        front.mode = "pass"
        assert patient.get("k") == bytes(1000)
