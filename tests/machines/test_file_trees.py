"""Trees of files into machines and out of them, and archives that a hostile machine could pack."""

from __future__ import annotations

import errno
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from rollmill.machines import file_trees as trees
from rollmill.machines.file_trees import get_tree, put_tree, unpack
from rollmill.machines.machine import ExecResult
from rollmill.machines.namespace.client import NamespaceMachine
from tests.machines.stand_ins import StandInMachine

pytestmark = pytest.mark.asyncio(loop_scope="module")


def files_of(directory: Path) -> dict[bytes, bytes | None]:
    """Contents by path, None for directories. Nothing else may be there."""
    found: dict[bytes, bytes | None] = {}
    for path in directory.rglob("*"):
        assert not path.is_symlink() and (path.is_dir() or path.is_file()), path
        found[os.fsencode(path.relative_to(directory))] = None if path.is_dir() else path.read_bytes()
    return found


def tree(directory: Path) -> dict[bytes, bytes | None]:
    (directory / "deep" / ("d" * 120)).mkdir(parents=True)
    (directory / "empty").mkdir()
    for name in (b"plain", b"new\nline", b"-rf", "\u00fc\u2028".encode(), b"\xff\xfe", b"deep/" + b"d" * 120 + b"/x"):
        (directory / os.fsdecode(name)).write_bytes(name * 1000 + b"\0\xff")
    (directory / "program").write_text("#!/bin/sh\necho ran\n")
    (directory / "program").chmod(0o700)
    return files_of(directory)


async def test_a_tree_goes_in_and_comes_out_as_it_was(machine: NamespaceMachine, tmp_path: Path) -> None:
    source = tmp_path / "source"
    before = tree(source)
    (source / "link").symlink_to("/etc/passwd")
    await put_tree(machine, source, "in/some place")
    assert (await machine.exec(["./program"], cwd="/work/in/some place")).output == b"ran\n"
    await get_tree(machine, "/work/in/some place", tmp_path / "out/again")
    assert files_of(tmp_path / "out/again") == before
    assert [(tmp_path / "out/again" / name).stat().st_mode & 0o100 for name in ("program", "plain")] == [0o100, 0]

    (source / "plain").write_bytes(b"new")
    await put_tree(machine, source, "in/some place")
    assert await machine.read("in/some place/plain") == b"new", "over what is there"
    odd = "ln -s /etc/passwd link; ln -s / root; mkfifo pipe; ln plain second; rm -r deep -- -rf"
    assert (await machine.exec(["sh", "-c", odd], cwd="/work/in/some place")).exit_code == 0
    await get_tree(machine, "in/some place", tmp_path / "third")
    found = files_of(tmp_path / "third")
    assert found[b"plain"] == found[b"second"] == b"new" and not {b"link", b"root", b"pipe", b"deep"} & found.keys()


async def test_what_cannot_be_copied_says_why(
    machine: NamespaceMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(copying: Any) -> int | None:
        with pytest.raises(OSError) as error:
            await copying
        return error.value.errno

    (tmp_path / "large").write_bytes(bytes(30_000))
    await put_tree(machine, tmp_path)
    assert await fails(get_tree(machine, "absent", tmp_path / "out")) == errno.ENOENT
    assert await fails(get_tree(machine, "large", tmp_path / "out")) == errno.ENOTDIR
    assert await fails(get_tree(machine, ".", tmp_path / "out", max_bytes=20_000)) == errno.EFBIG
    assert await fails(put_tree(machine, tmp_path, "/usr/local")) == errno.EIO
    await machine.exec(["sh", "-c", "mkdir closed; chmod 0 closed"])
    assert await fails(get_tree(machine, ".", tmp_path / "out")) == errno.EACCES, "half a tree is none"
    monkeypatch.setattr(trees, "LARGEST", 20_000)
    assert await fails(put_tree(machine, tmp_path)) == errno.EFBIG
    assert not (tmp_path / "out").exists()


def archive_of(*members: tuple[str, bytes, str], content: bytes = b"") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, kind, target in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            member.size = len(content) if kind == tarfile.REGTYPE else 0
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


async def test_a_hostile_archive_writes_nothing_outside(tmp_path: Path) -> None:
    hostile = archive_of(
        ("../out", tarfile.REGTYPE, ""),
        ("/tmp/rollmill-escaped", tarfile.REGTYPE, ""),
        ("link", tarfile.SYMTYPE, str(tmp_path)),
        ("link/out", tarfile.REGTYPE, ""),
        ("hard", tarfile.LNKTYPE, "/etc/passwd"),
        ("up", tarfile.LNKTYPE, "../out"),
        ("early", tarfile.LNKTYPE, "late"),
        ("late", tarfile.REGTYPE, ""),
        ("device", tarfile.CHRTYPE, ""),
        ("pipe", tarfile.FIFOTYPE, ""),
    )
    unpack(hostile, tmp_path / "in")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert files_of(tmp_path / "in") == {b"link": None, b"link/out": b"", b"late": b""}
    assert not Path("/tmp/rollmill-escaped").exists()
    unpack(sparse("large", 1 << 40), tmp_path / "in")  # a terabyte of zeros in a few bytes
    assert not (tmp_path / "in/large").exists()
    links = [(f"{number}", tarfile.LNKTYPE, "first") for number in range(100)]
    with pytest.raises(OSError) as error:  # each is a file of its own here
        unpack(archive_of(("first", tarfile.REGTYPE, ""), *links, content=b"x" * 1000), tmp_path / "in", 50_000)
    assert error.value.errno == errno.EFBIG


class StandInLiar(StandInMachine):
    """A machine whose `tar` prints what it likes."""

    def __init__(self, printed: bytes) -> None:
        self.printed = printed

    async def exec(self, *_: Any, **__: Any) -> ExecResult:
        return ExecResult(0, self.printed)


@pytest.mark.parametrize(
    "printed",
    [
        b"no archive",
        b"\xff" * 1024,
        archive_of(("cut", tarfile.REGTYPE, ""), content=b"x" * 5000)[:2000],
        archive_of(("a\0b" + "c" * 2000, tarfile.REGTYPE, "")),
    ],
    ids=["text", "noise", "cut", "name"],
)
async def test_a_machine_that_packs_nonsense_is_an_os_error_or_nothing(printed: bytes, tmp_path: Path) -> None:
    machine = StandInLiar(printed)
    try:
        await get_tree(machine, "x", tmp_path / "in")
    except OSError as error:
        assert error.errno == errno.EBADMSG
    assert files_of(tmp_path) in ({}, {b"in": None})


def sparse(name: str, size: int) -> bytes:
    """A tar with one file in which nothing is stored, as GNU tar describes it."""
    member = tarfile.TarInfo(name)
    member.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(size), "GNU.sparse.numblocks": "1"}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(member)
    with tarfile.open(fileobj=io.BytesIO(packed.getvalue())) as archive:
        [read] = archive.getmembers()
    assert read.size == size and read.issparse()
    return packed.getvalue()
