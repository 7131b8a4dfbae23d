"""Tries a kind of machine on this host, or programs of another architecture in namespace machines: nothing else shows
that they work. `rollmill machines doctor` shows the answers."""

from __future__ import annotations

import struct
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rollmill.errors import MachineError, RollmillError
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.machine import Capabilities, MachineHost, release
from rollmill.machines.namespace import emulation
from rollmill.machines.namespace.client import NamespaceHost, Seen

WORDS, EXIT_CODE = b"hello, world", 7
_BASE = 0x400000
# write(1, words, 12), then exit(7); the words come after the code. With the number that ELF has for the architecture.
_CODE = {
    "x86_64": (62, "b801000000 bf01000000 488d3513000000 ba0c000000 0f05 b83c000000 bf07000000 0f05"),
    "aarch64": (183, "200080d2 e1000010 820180d2 080880d2 010000d4 e00080d2 a80b80d2 010000d4"),
}


@dataclass(frozen=True)
class Probed:
    capabilities: Capabilities
    start_s: float  # until the first command of a machine had ended, in a host that has started one before
    restore_s: float  # the same, of a machine that is restored from a snapshot
    why_no_kvm: str | None = None  # of a virtual machine that could have used it


async def probe(host: MachineHost, image: str = BUILT_IN) -> Probed:
    """MachineError says what does not work."""
    first = await host.create(image)  # may boot a template, or start a process
    await first.close()
    began = time.monotonic()
    machine = await host.create(image, {"kept": b"by the snapshot"})
    try:
        result = await machine.exec(["python", "-c", "print(6 * 7)"], timeout_s=60.0)
        start_s = time.monotonic() - began
        if result.output != b"42\n":
            raise MachineError(f"Python does not work in a machine: {result.output.decode('utf-8', 'replace')[-300:]}")
        snapshot = await machine.snapshot()
    finally:
        await machine.close()
    began = time.monotonic()
    restored = await host.create(image, snapshot=snapshot)
    try:
        result = await restored.exec(["cat", "kept"], timeout_s=60.0)
        restore_s = time.monotonic() - began
    finally:
        await restored.close()
        await release(host, snapshot)
    if result.output != b"by the snapshot":
        raise MachineError(f"a restored machine has lost its files: {result.output[-300:]!r}")
    return Probed(machine.capabilities, start_s, restore_s)


def program(architecture: str) -> bytes:
    """The smallest program of an architecture: it prints a few words."""
    machine, code = _CODE[architecture]
    body = bytes.fromhex(code) + WORDS
    size = 120 + len(body)
    head = b"\x7fELF\x02\x01\x01" + bytes(9)
    head += struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, _BASE + 120, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    return head + struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x1000) + body


def write_tree(directory: Path, architecture: str) -> None:
    """An operating system with one program, `hello`."""
    (directory / "usr/bin").mkdir(parents=True)
    (directory / "bin").symlink_to("usr/bin")
    (directory / "usr/bin/hello").write_bytes(program(architecture))
    for path in (directory, directory / "usr", directory / "usr/bin", directory / "usr/bin/hello"):
        path.chmod(0o755)


async def try_emulation(architecture: str) -> str | None:
    """Why namespace machines cannot run programs of this architecture here; None: a real one ran."""
    if why := emulation.missing(architecture):
        return why
    with tempfile.TemporaryDirectory() as directory:
        write_tree(Path(directory, "tree"), architecture)
        Path(directory).chmod(0o755)
        host = NamespaceHost(sees=Seen(root=f"{directory}/tree", architecture=architecture))
        try:
            machine = await host.create(BUILT_IN)
            result = await machine.exec(["hello"])
        except RollmillError as error:
            return str(error)
        finally:
            await host.close()
    if (result.exit_code, result.output) != (EXIT_CODE, WORDS):
        return f"it ended with {result.exit_code}: {result.output[-300:]!r}"
    return None
