"""`rollmill machines`, and the guide to choosing a machine, executed where this host has virtual machines."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmill.errors import MachineError
from rollmill.machines.qemu import parts, setup
from tests.cli.conftest import Told
from tests.cli.test_init import shell
from tests.test_repo import ROOT

GUIDE = ROOT / "docs" / "guides" / "choosing-a-machine.md"


@pytest.mark.slow
def test_the_guide_to_choosing_a_machine_works_word_by_word(tmp_path: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(), re.S)
    assert len(blocks) == 5
    try:
        parts.find_parts()
    except MachineError as error:  # nothing is installed by a test
        assert "32 of 32 tasks are all right" in shell(blocks[2], tmp_path)
        pytest.skip(f"the part about virtual machines: {error}")
    printed = shell("\n".join(blocks), tmp_path)
    assert "namespace" in printed and "memory and files" in printed
    assert printed.count("32 of 32 tasks are all right") == 2


def test_setup_without_root_says_what_to_install(
    rollmill: Callable[..., Told], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    told = rollmill("machines", "setup")
    arch = parts.architecture()
    assert told.code == 1 and f"apt-get install --yes --no-install-recommends {arch.package}" in told.err
    assert "Traceback" not in told.err
    told = rollmill("machines", "doctor")
    assert "is not" in told.out and "rollmill machines setup" in told.out
    whole = f"qemu: no. {arch.program} is not installed\nhint: {parts.SETUP}"
    assert whole in told.out, "no reason is broken into a narrow column"


@pytest.mark.parametrize("command", ["serve", "fidelity"])
def test_a_kind_of_machine_that_is_unknown(
    rollmill: Callable[..., Told], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("ROLLMILL_MACHINES_KEY", "0123456789abcdef")
    told = rollmill("machines", command, "--kind", "qmu")
    assert told.code == 1 and "kind = 'qmu' is unknown" in told.err and "did you mean 'qemu'?" in told.err
    assert not told.out and "Traceback" not in told.err
    told = rollmill("machines", command, "--kind", "firecracker")
    assert told.code == 1 and "was removed" in told.err and 'use kind = "qemu", which uses KVM' in told.err


def test_a_command_in_a_machine(rollmill: Callable[..., Told]) -> None:
    told = rollmill("machines", "shell", "-c", "pwd; id -un; exit 3")
    assert (told.code, told.out) == (3, "/work\nuser\n")
    assert "go together" in rollmill("machines", "shell", "--episode", "t1", "-c", "pwd").err
    assert "image 'absent' does not exist" in rollmill("machines", "shell", "absent", "-c", "pwd").err


def test_a_terminal_in_a_machine() -> None:
    ours, its = pty.openpty()
    start = [sys.executable, "-c", "from rollmill.cli.main import main; main()", "machines", "shell"]
    process = subprocess.Popen(start, stdin=its, stdout=its, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(its)
    printed = b""
    typed = iter((b"echo $((6 * 7))-$USER\r", b"seq 100000\r", b"exit 5\r"))
    wanted = [b"$ ", b"42-user\r\n", b"99999\r\n100000\r\n"]
    while wanted:
        assert select.select([ours], [], [], 60)[0], printed
        printed += os.read(ours, 1 << 16)
        if wanted[0] in printed:
            printed = b""
            wanted.pop(0)
            os.write(ours, next(typed))
    with contextlib.suppress(OSError):  # the other end is closed
        while os.read(ours, 1 << 16):
            pass
    assert process.wait(60) == 5, process.communicate()


def test_connecting_to_what_is_no_url(rollmill: Callable[..., Told], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_MACHINES_KEY", "0123456789abcdef")
    told = rollmill("machines", "serve", "--connect", "10.0.0.7:8900")
    assert told.code == 1 and "'10.0.0.7:8900' is no URL" in told.err and "https://" in told.err


def test_serving_on_a_port_that_is_taken(rollmill: Callable[..., Told], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_MACHINES_KEY", "0123456789abcdef")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = rollmill("machines", "serve", "--port", port)
    assert told.code == 1 and f"cannot listen on 127.0.0.1:{port}: Address already in use" in told.err
    assert "--port" in told.err and not told.out


def test_without_setpriv_there_are_no_virtual_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / parts.architecture().program
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="setpriv is not installed") as error:
        parts.find_parts()
    assert "util-linux" in str(error.value.hint)


def test_a_kernel_package_gives_its_kernel_and_modules(tmp_path: Path) -> None:
    """A package with compressed modules, as newer ones have; only what guests need is kept."""
    import io
    import lzma
    import tarfile

    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, data in {
            "./boot/vmlinuz-6.12-cloud": b"kernel",
            "./lib/modules/6.12/kernel/drivers/char/virtio_console.ko.xz": lzma.compress(b"console"),
            "./lib/modules/6.12/kernel/drivers/virtio/virtio.ko": b"virtio",
            "./lib/modules/6.12/kernel/drivers/net/virtio_net.ko": b"not needed",
        }.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    stream.seek(0)
    setup._take_kernel(stream, tmp_path)
    found = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert found == {"vmlinuz": b"kernel", "virtio_console.ko": b"console", "virtio.ko": b"virtio"}


def test_modules_are_loaded_after_those_that_they_need(tmp_path: Path) -> None:
    for name, needs in {
        "virtio": "virtio_ring",
        "virtio_ring": "",
        "virtio_pci": "virtio,virtio_ring,built_in",
    }.items():
        (tmp_path / f"{name}.ko").write_bytes(b"ELF\0depends=" + needs.encode() + b"\0vermagic=6.1\0")
    (tmp_path / "virtio_console.ko").write_bytes(b"nothing is known of it")
    (tmp_path / "virtio_pci_modern_dev.ko").write_bytes(b"\0depends=virtio_pci_modern_dev\0")  # itself
    ordered = [path.stem for path in parts.load_order(parts.MODULES, tmp_path)]
    assert ordered == ["virtio_ring", "virtio", "virtio_pci_modern_dev", "virtio_pci", "virtio_console"]


def test_fidelity_is_scored_item_by_item_and_kept_with_the_image(
    rollmill: Callable[..., Told], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "store"))
    (tmp_path / "files").mkdir()
    assert rollmill("images", "build", "own", "--directory", tmp_path / "files").code == 0
    told = rollmill("machines", "fidelity", "--image", "own")
    assert told.code == 0 and "filter of system calls" in told.out, told
    distance = float(told.out.split()[-1])
    assert distance <= 0.3, told.out  # 0.64 before machines had users, a home, an init process and system files
    assert f"namespace {distance:.2f}" in rollmill("images", "list").out
    assert rollmill("images", "build", "own", "--directory", tmp_path / "files").code == 0  # the same content
    assert f"namespace {distance:.2f}" in rollmill("images", "list").out

    probe, reference = tmp_path / "probe.py", tmp_path / "this.json"
    probe.write_text(rollmill("machines", "fidelity", "--print-probe").out)
    reference.write_bytes(subprocess.run([sys.executable, str(probe)], check=True, capture_output=True).stdout)
    told = rollmill("machines", "fidelity", "--reference", reference)
    assert told.code == 0 and "distance" in told.out, told
    reference.write_text('{"hardware": 3}')
    told = rollmill("machines", "fidelity", "--reference", reference)
    assert told.code == 1 and "--print-probe" in told.err and "Traceback" not in told.err, told
