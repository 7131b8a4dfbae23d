"""Images with an operating system of their own: a small tree, a Debian suite where it can be built, hostile ones."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import zstandard

from rollmill.environments.machines import images, layers, os_layer
from rollmill.environments.machines.build_image import build_image, remove_image
from rollmill.environments.machines.images import ImageRecord, LayerRecord
from rollmill.environments.machines.namespace import root
from rollmill.environments.machines.namespace.client import NamespaceConfig
from rollmill.environments.machines.qemu.host import QemuHost
from rollmill.errors import TaskError
from rollmill.storage.objects import Objects
from tests.environments.conftest import start_host

PROGRAMS = ("sh", "cat", "ls", "tar", "echo", "mkdir", "env", "true")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "images"))
    return tmp_path / "images"


def small_root(tree: Path) -> None:
    """A few programs of this host with their libraries, those that its Python loads, and one that this host lacks."""
    import _ctypes

    python = Path(os.path.realpath("/proc/self/exe"))
    programs = [Path(str(shutil.which(name))) for name in PROGRAMS]
    listed = subprocess.run(["ldd", *programs, python, _ctypes.__file__], capture_output=True, text=True, check=False)
    words = {word for line in listed.stdout.splitlines() if line.startswith("\t") for word in line.split()}
    for path in [*programs, *(Path(word) for word in words if word.startswith("/"))]:
        target = tree / path.parent.resolve().relative_to("/") / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    for name in ("bin", "sbin", "lib", "lib64"):
        if Path("/", name).is_symlink():
            (tree / name).symlink_to(os.readlink(f"/{name}"))
    (tree / "usr/bin/only-here").write_text("#!/bin/sh\necho another system\n")
    (tree / "usr/bin/only-here").chmod(0o4755)
    (tree / "usr/bin/link-here").symlink_to("only-here")


def image_of(name: str, archive: bytes) -> ImageRecord:
    place = images.images_directory() / ".tree"
    place.mkdir(parents=True)
    (place / os_layer.ARCHIVE).write_bytes(zstandard.compress(archive))
    layer = layers.keep(place, images.images_directory())
    parts = [LayerRecord(place="root", digest=layer.digest, bytes=layer.bytes)]
    record = ImageRecord(digest=images.digest_of(parts), layers=parts, bytes=layer.bytes)
    images.keep_record(name, record)
    return record


async def test_machines_run_the_programs_of_their_image(tmp_path: Path, store: Path) -> None:
    small_root(tmp_path / "tree")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(tmp_path / "tree", ".")
    record = image_of("own", packed.getvalue())
    host = await start_host(NamespaceConfig(memory_mb=128, disk_mb=16, processes=32))
    try:
        machine = await host.create("own", {"main.py": b"print(6 * 7)"})
        for command, output in (
            (["only-here"], b"another system\n"),
            (["link-here"], b"another system\n"),
            (["python", "main.py"], b"42\n"),
            (["sh", "-c", "ls /usr/bin/git /usr/share 2>/dev/null | cat"], b""),  # nothing else of this host
        ):
            assert (await machine.exec(command)).output == output, command
        [fork] = await machine.fork()
        assert (await fork.exec(["only-here"])).exit_code == 0
        usual = await host.create("host-python")
        assert (await usual.exec(["only-here"])).exit_code == 127
    finally:
        await host.close()
    tree = store / "roots" / record.layers[0].digest
    assert (tree / "usr/bin/only-here").stat().st_mode & 0o7777 == 0o755
    vm = QemuHost()
    with pytest.raises(TaskError, match="operating system of its own"):
        await vm.create("own")
    await vm.close()
    remove_image("own")
    assert not tree.exists()


def test_a_hostile_tree_does_not_leave_its_place(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()

    def packed(*members: tuple[str, bytes, str]) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name, kind, target in members:
                member = tarfile.TarInfo(name)
                member.type, member.linkname, member.size = kind, target, 4 if kind == tarfile.REGTYPE else 0
                archive.addfile(member, io.BytesIO(b"data"))
        return buffer.getvalue()

    for number, members in enumerate(
        (
            [("../outside/a", tarfile.REGTYPE, "")],
            [("/outside/a", tarfile.REGTYPE, "")],
            [("link", tarfile.SYMTYPE, str(outside)), ("link/a", tarfile.REGTYPE, "")],
            [("link", tarfile.SYMTYPE, "../../.."), ("link/a", tarfile.REGTYPE, "")],
            [("a", tarfile.SYMTYPE, "/etc"), ("b", tarfile.LNKTYPE, "a/passwd")],
            [("a", tarfile.REGTYPE, ""), ("a", tarfile.REGTYPE, "")],
        )
    ):
        image_of(f"bad{number}", packed(*members))
        with pytest.raises(TaskError, match=r"outside|cannot be unpacked"):
            images.load_image(f"bad{number}", None)
        assert list(outside.iterdir()) == []
    outside.chmod(0o700)
    image_of("link", packed(("link", tarfile.SYMTYPE, str(outside)), ("link", tarfile.DIRTYPE, "")))
    loaded = images.load_image("link", None)
    assert loaded.root is not None and outside.stat().st_mode & 0o777 == 0o700
    image_of("device", packed(("null", tarfile.CHRTYPE, ""), ("kept", tarfile.REGTYPE, "")))
    loaded = images.load_image("device", None)
    assert loaded.root is not None and os.listdir(loaded.root) == ["kept"]
    image_of("cut", b"no tar")
    with pytest.raises(TaskError, match="cannot be unpacked"):
        images.load_image("cut", None)


def test_links_out_of_a_tree_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of this host")
    tree = tmp_path / "tree"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc/passwd").symlink_to(tmp_path / "secret")
    (tree / "etc/services").symlink_to("protocols")
    (tree / "etc/protocols").write_text("of the tree")
    found = root._public(tree, "etc", ["passwd", "services"])
    assert found == {"etc/services": b"of the tree"}
    assert not root._is_inside(tree / "etc/passwd", tree)


def test_an_operating_system_of_a_store_must_be_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = io.BytesIO()
    tarfile.open(fileobj=packed, mode="w").close()
    record, url = image_of("own", packed.getvalue()), f"{tmp_path}/store"
    images.push_image("own", url)
    assert images.fetch_image("own", url) == record  # it was built here
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "other-host"))

    layers.fetch(
        record.layers[0].digest, images.images_directory(), Objects.open(url)
    )  # that the layer is here is not enough
    for fetch in (images.fetch_image, images._fetch_once):
        with pytest.raises(TaskError, match="was not built here"):
            fetch("own", url)
    assert images.built_names() == []
    assert images.fetch_image("own", url, trust=True) == record
    assert images.fetch_image("own", url) == record


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /app/\n")
    for name in ("a b", "--help", "", "../x"):
        with pytest.raises(TaskError, match="no name of a Debian suite"):
            build_image("own", suite=name)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TaskError, match="mmdebstrap"):
        build_image("own", suite="bookworm")
    with pytest.raises(TaskError, match="podman"):
        build_image("own", dockerfile=tmp_path / "Dockerfile")
    assert images.built_names() == []
    # a stand-in for podman, which is not installed everywhere: it says what it was asked for, and fails
    (tmp_path / "podman").write_text('#!/bin/sh\necho "asked for: $*" >&2; exit 7\n')
    (tmp_path / "podman").chmod(0o755)
    with pytest.raises(TaskError, match=r"exit code 7: asked for: build --quiet --tag .* --file .*/Dockerfile"):
        build_image("own", dockerfile=tmp_path / "Dockerfile")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="mmdebstrap is not installed")
async def test_a_debian_suite_in_a_machine() -> None:
    try:
        await asyncio.to_thread(build_image, "suite", suite="bookworm", programs=["jq"])
    except TaskError as error:
        if "Could not resolve" in str(error) or "Failed to fetch" in str(error):
            pytest.skip(f"no Debian mirror: {error}")
        raise
    host = await start_host(NamespaceConfig(memory_mb=128, disk_mb=16, processes=32))
    try:
        machine = await host.create("suite")
        assert (await machine.exec(["jq", "-n", "6 * 7"])).output == b"42\n"
        assert b"bookworm" in (await machine.exec(["cat", "/etc/os-release"])).output
        assert (await machine.exec(["python", "-c", "print(6 * 7)"])).output == b"42\n"
        assert (await machine.exec(["git", "--version"])).exit_code == 127
    finally:
        await host.close()
