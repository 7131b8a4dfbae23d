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

from rollmill.errors import MachineError, TaskError
from rollmill.machines.images import image as images
from rollmill.machines.images import layers, os_layer
from rollmill.machines.images.build import build_image, remove_image
from rollmill.machines.images.image import ImageRecord, LayerRecord
from rollmill.machines.namespace import emulation, root
from rollmill.machines.namespace.client import NamespaceConfig
from rollmill.machines.probe import probe
from rollmill.machines.qemu import initramfs
from rollmill.machines.qemu.host import QemuConfig, QemuHost, _check_room
from rollmill.machines.qemu.parts import ARCHITECTURES, Parts, find_parts
from rollmill.storage.objects import Objects
from tests.machines.conftest import start_host

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


def vm_parts() -> bool:
    try:
        find_parts()
    except MachineError:
        return False
    return True


OTHER = "aarch64" if os.uname().machine == "x86_64" else "x86_64"
_ELF = b"\x7fELF" + bytes(14) + {"aarch64": b"\xb7\x00", "x86_64": b"\x3e\x00"}[OTHER]


async def test_an_image_of_another_architecture_is_for_virtual_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that are only the beginning of one: their architecture is read, and nothing of them runs."""
    (tmp_path / "tree/usr/bin").mkdir(parents=True)
    (tmp_path / "tree/bin").symlink_to("usr/bin")
    (tmp_path / "tree/usr/bin/a-script").write_text("#!/bin/sh\n")
    for name in ("env", "python3.11", "python3.13"):
        (tmp_path / "tree/usr/bin" / name).write_bytes(_ELF)
    (tmp_path / "tree/usr/bin/python3").symlink_to("python3.13")
    (tmp_path / "tree/usr/share/doc/env").mkdir(parents=True)
    (tmp_path / "tree/usr/lib/python3.13/test").mkdir(parents=True)
    for name in ("share/doc/env/copyright", "lib/python3.13/test/big.py", "lib/python3.13/os.py"):
        (tmp_path / "tree/usr" / name).write_text("text")
    (tmp_path / "tree/etc").mkdir()
    (tmp_path / "tree/etc/passwd").symlink_to("/etc/shadow")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(tmp_path / "tree", ".")
    image_of("other", packed.getvalue())
    image = images.load_image("other", None)
    assert image.root is not None and image.architecture == OTHER
    assert images.python_platform(image.root) == f"3.13 linux-{OTHER}"
    host = await start_host()
    try:
        monkeypatch.setattr(emulation, "find", lambda architecture: None)
        with pytest.raises(TaskError, match=f"is for {OTHER}, and "):
            await host.create("other")
    finally:
        await host.close()

    guest = Parts(ARCHITECTURES[OTHER], "", "", Path("/nothing"), (), None)
    with (tmp_path / "initramfs").open("w+b") as file:
        size = initramfs.build(guest, {"memory": 1}, None, file, tree=image.root)
    data = zstandard.ZstdDecompressor().stream_reader((tmp_path / "initramfs").read_bytes()).read()
    assert size < len(data) * 3 and b"usr/bin/env\0" in data and b"usr/lib/python3.13/os.py" in data
    assert b"big.py" not in data and b"copyright" not in data and b"/etc/shadow" not in data
    assert b"/usr/bin/python3.13" in data and os.fsencode(os.path.realpath("/proc/self/exe")) not in data

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no kernel there
    vm = QemuHost()
    with pytest.raises(MachineError, match=r"there is no kernel|is not installed") as error:
        await vm.create("other")
    assert f"rollmill machines setup --architecture {OTHER}" in str(error.value.hint)
    with pytest.raises(TaskError, match="keeps its programs in memory"):
        _check_room(image, 300 << 20, 256)
    with pytest.raises(TaskError, match="an architecture needs an operating system"):
        build_image("none", architecture=OTHER, directory=tmp_path)
    with pytest.raises(TaskError, match="no images for the architecture 'vax'"):
        build_image("none", architecture="vax", suite="bookworm")
    await vm.close()


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("ROLLMILL_TEST_OTHER_ARCHITECTURE") != "yes",
    reason="takes up to 8 minutes: ROLLMILL_TEST_OTHER_ARCHITECTURE=yes runs it",
)
@pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="mmdebstrap is not installed")
async def test_a_guest_of_the_other_architecture(tmp_path: Path) -> None:
    """A real Debian of the other architecture, unpacked here; the guest boots it, is saved, restored and forked."""
    try:
        find_parts(OTHER)
    except MachineError as error:
        pytest.skip(str(error))
    (tmp_path / "requirements.txt").write_text("markupsafe==3.0.2\n")
    try:
        await asyncio.to_thread(
            build_image,
            "intel",
            suite="bookworm",
            architecture=OTHER,
            programs=["jq"],
            requirements=tmp_path / "requirements.txt",
        )
    except TaskError as error:
        if "Could not resolve" in str(error) or "Failed to fetch" in str(error) or "pip could not" in str(error):
            pytest.skip(f"no Debian mirror or package index: {error}")
        raise
    host = QemuHost(QemuConfig(memory_mb=512))
    try:
        found = await probe(host, "intel")
        assert found.capabilities.architecture == OTHER and found.capabilities.slowdown > 1
        machine = await host.create("intel", {"main.py": b"import markupsafe._speedups as m; print(m.__file__)"})
        limit_s = 20.0 * found.capabilities.slowdown
        for command, output in (
            (["uname", "-m"], OTHER.encode()),
            (["jq", "-n", "6 * 7"], b"42"),
            (["python", "main.py"], b"x86_64" if OTHER == "x86_64" else b"aarch64"),
            (["awk", "BEGIN { print 6 * 7 }"], b"42"),
        ):
            result = await machine.exec(command, timeout_s=limit_s)
            assert result.exit_code == 0 and output in result.output, (command, result)
        [fork] = await machine.fork()
        await fork.write("main.py", b"")
        assert await machine.read("main.py") != b""
    finally:
        await host.close()


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
    if vm_parts():
        with pytest.raises(TaskError, match=r"has no Python, and the agent of virtual machines needs 3\.11"):
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
    for name in ("a b", "--help", "", "../x"):
        with pytest.raises(TaskError, match="no name of a Debian suite"):
            build_image("own", suite=name)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TaskError, match="mmdebstrap"):
        build_image("own", suite="bookworm")
    assert images.built_names() == []


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
