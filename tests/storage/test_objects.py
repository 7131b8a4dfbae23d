import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rollmill.errors import ObjectExists, ObjectMissing, StorageError
from rollmill.storage.objects import Objects


@pytest.fixture(params=["directory", "file-url", "memory"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    urls = {"directory": tmp_path / "store", "file-url": f"file://{tmp_path}/a%20store", "memory": "memory://"}
    return Objects.open(urls[request.param])


def test_what_is_written_is_read_back(objects: Objects) -> None:
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


def test_create_is_refused_where_something_is(objects: Objects) -> None:
    objects.create("k", b"mine")
    with pytest.raises(ObjectExists):
        objects.create("k", b"yours")
    assert objects.get("k") == b"mine"


def test_missing_objects_are_told_from_other_trouble(objects: Objects) -> None:
    with pytest.raises(ObjectMissing, match="no/such"):
        objects.get("no/such")
    with pytest.raises(ObjectMissing):
        objects.get_range("no/such", 0, 1)


def test_a_range_past_the_end_is_an_error_not_a_short_answer(objects: Objects) -> None:
    objects.put("k", b"0123")
    for start, length in ((0, 5), (4, 1), (9, 1)):
        with pytest.raises(StorageError, match="truncated"):
            objects.get_range("k", start, length)


def test_listing_goes_by_folders(objects: Objects) -> None:
    for key in ("w/b/2", "w/b/1", "w/a", "wide/1", "z"):
        objects.put(key, b"x")
    assert objects.list() == ["w/a", "w/b/1", "w/b/2", "wide/1", "z"]
    assert objects.list("w") == objects.list("w/") == ["w/a", "w/b/1", "w/b/2"]
    assert objects.list("nothing") == []
    assert objects.folders() == ["w", "wide"]
    assert objects.folders("w") == ["b"]
    assert objects.folders("nothing") == []


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
    assert caught.value.hint


def test_one_of_many_processes_creates_a_key(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom rollmill.errors import ObjectExists\nfrom rollmill.storage.objects import Objects\n"
        "objects = Objects.open(sys.argv[1])\nwon = 0\nsys.stdin.readline()\n"
        "for number in range(50):\n"
        "    try:\n        objects.create(f'k/{number}', sys.argv[2].encode() * 1000)\n        won += 1\n"
        "    except ObjectExists:\n        pass\nprint(won)\n"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for name in "abc"
    ]  # fmt: skip
    won = [int(racer.communicate("\n")[0]) for racer in racers]
    assert sum(won) == 50
    assert all(len(set(Objects.open(tmp_path).get(f"k/{number}"))) == 1 for number in range(50))


def test_files_of_a_killed_writer_are_never_seen_and_go_away(tmp_path: Path) -> None:
    Objects.open(tmp_path).put("k", b"x")
    left = tmp_path / ".staging" / "123-abandoned"
    left.write_bytes(b"half")
    assert Objects.open(tmp_path).list() == ["k"]
    assert left.exists()  # it may belong to a writer that is still at it
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
