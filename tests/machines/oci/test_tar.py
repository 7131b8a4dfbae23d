"""The reader of archives that nobody has checked, against Python's and GNU's writers and against forged ones."""

from __future__ import annotations

import contextlib
import io
import random
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from rollmill.errors import TaskError
from rollmill.machines.file_trees import unpack
from rollmill.machines.images import layers, oci
from rollmill.machines.oci.tar import ArchiveError, Entry, Tar
from rollmill.rollouts import work_diff

LONG = "/".join(["d" * 90] * 4)
SURROGATE = "name-\udcff"


def read(data: bytes, most_bytes: int = 1 << 24, most_entries: int = 1000) -> list[tuple[Entry, bytes]]:
    tar = Tar(io.BytesIO(data), most_bytes=most_bytes, most_entries=most_entries)
    return [(entry, tar.read()) for entry in tar]


def member(name: str, content: bytes = b"", **attributes: object) -> tuple[tarfile.TarInfo, bytes]:
    made = tarfile.TarInfo(name)
    made.size = len(content)
    for attribute, value in attributes.items():
        setattr(made, attribute, value)
    return made, content


def packed(*members: tuple[tarfile.TarInfo, bytes], format: int = tarfile.GNU_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as archive:
        for each, content in members:
            archive.addfile(each, io.BytesIO(content))
    return buffer.getvalue()


def header(name: bytes = b"x", size: bytes = b"%011o\0" % 0, kind: bytes = b"0") -> bytes:
    block = name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + size + b"00000000000\0" + b" " * 8 + kind
    block = (block + b"\0" * 100 + b"ustar\x0000").ljust(512, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def pax(data: bytes, kind: bytes = b"x") -> bytes:
    return header(b"h", b"%011o\0" % len(data), kind) + data.ljust(-(-len(data) // 512) * 512, b"\0")


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_what_python_writes_is_read(format: int) -> None:
    name = "e" * 90 + "/" + "d" * 90 if format == tarfile.USTAR_FORMAT else LONG
    target = "t" * 90 if format == tarfile.USTAR_FORMAT else LONG
    data = packed(
        member(name, b"x" * 700, mode=0o755),
        member("ü", b""),
        member(SURROGATE if format != tarfile.PAX_FORMAT else "plain", b"y" * 512),
        member("folder", type=tarfile.DIRTYPE),
        member("link", type=tarfile.SYMTYPE, linkname=target),
        member("again", type=tarfile.LNKTYPE, linkname=target),
        member("pipe", type=tarfile.FIFOTYPE),
        format=format,
    )
    found = read(data)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        expected = [(each.name, each.linkname, each.mode) for each in archive]
    assert [(entry.name.rstrip("/"), entry.target, entry.mode) for entry, _ in found] == expected
    assert [entry.kind for entry, _ in found] == ["file", "file", "file", "directory", "link", "hard link", "other"]
    assert [content for _, content in found[:3]] == [b"x" * 700, b"", b"y" * 512]


@pytest.mark.parametrize("options", [[], ["--format=pax"], ["--sparse"], ["--format=pax", "--sparse"]])
def test_what_gnu_tar_writes_is_read(tmp_path: Path, options: list[str]) -> None:
    """A file with holes is read whole or, if it is packed as such, left to the caller as "other"."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ("long" * 40)).write_bytes(b"content")
    with (tmp_path / "holes").open("wb") as file:
        for at in range(40):
            file.seek(at << 16)
            file.write(b"x")
    done = subprocess.run(["tar", "-cf", "-", *options, "a", "holes"], cwd=tmp_path, capture_output=True, check=True)
    (_, _), (long, content), (holes, rest) = read(done.stdout)
    assert (long.name, long.kind, content) == (f"a/{'long' * 40}", "file", b"content")
    assert holes.kind == "other" or (holes.name == "holes" and rest == (tmp_path / "holes").read_bytes())


def test_an_archive_without_padding_and_end_is_read_only_where_that_is_usual() -> None:
    data = packed(member("a", b"abc"))[:515]
    tar = Tar(io.BytesIO(data), most_bytes=10, most_entries=1, needs_end=False)
    assert [tar.read() for _ in tar] == [b"abc"]
    with pytest.raises(ArchiveError, match="has no end"):
        read(data)


BOMBS = {
    "a pax header of digits": pax(b"1" * 60_000) + header(b"a"),
    "a pax header of 16 MB": pax(b"1" * (16 << 20)) + header(b"a"),
    "a long name of 1 MB": pax(b"n" * (1 << 20), b"L") + header(b"a"),
    "a negative size": header(b"z") + header(b"a", b"\xff" * 12, b"9") + bytes(2048),
    "a size that is not there": header(b"a", b"\x80" + b"\0" * 3 + b"\xff" * 8),
    "a size of a pax header": pax(b"22 size=9999999999999\n") + header(b"a"),
    "a size that is no number": pax(b"13 size=-512\n") + header(b"a"),
    "a record without its end": pax(b"99 path=x\n") + header(b"a"),
    "a record of no length": pax(b"0 path=x\n") + header(b"a"),
    "a name for all files": pax(b"10 path=x\n", b"g") + header(b"a"),
    "headers without an entry": pax(b"10 path=x\n") * 100,
    "a name with a zero byte": pax(b"11 path=x\0\n") + header(b"a"),
    "another checksum": b"y" + header(b"a")[1:],
    "half a header": header(b"a")[:100],
    "half a file": header(b"a", b"%011o\0" % 9000) + b"x" * 5000,
    "many entries": header(b"a") * 1001,
    "many bytes": (header(b"a", b"%011o\0" % (1 << 20)) + bytes(1 << 20)) * 17,
    "letters in a number": header(b"a", b"0x0000000zz\0"),
}


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS)
def test_a_forged_archive_is_an_error_at_once(data: bytes, tmp_path: Path) -> None:
    """Python's tarfile needs minutes for some of these, or does not end."""
    with pytest.raises(ArchiveError):
        read(data)


@pytest.mark.parametrize("name", ["a pax header of digits", "a negative size"])
def test_every_reader_of_archives_refuses_a_bomb(name: str, tmp_path: Path) -> None:
    data, began = BOMBS[name], time.process_time()
    with pytest.raises(work_diff._Refused, match="could not be packed"):
        work_diff._read(data)
    with pytest.raises(OSError, match="no proper archive"):
        unpack(data, tmp_path / "tree")
    with pytest.raises(ArchiveError):
        layers.unpack(Tar(io.BytesIO(data), most_bytes=1 << 30, most_entries=10), tmp_path)
    (tmp_path / "image.tar").write_bytes(data)
    with pytest.raises(TaskError, match="is not an archive of an OCI image"):
        oci.take_files(tmp_path / "image.tar", "/", tmp_path / "files")
    assert time.process_time() - began < 5


def test_damaged_archives_are_read_or_refused() -> None:
    whole = bytearray(packed(member(LONG, b"x" * 700), member("b", b"y"), format=tarfile.PAX_FORMAT))
    rng = random.Random(0)
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(2048)] = rng.choice((0, 0xFF, 0x80, rng.randrange(256)))
        with contextlib.suppress(ArchiveError):
            assert sum(len(content) for _, content in read(bytes(data[: rng.randrange(len(data))]))) <= len(data)
