"""Programs of another architecture in namespace machines: QEMU's user-mode emulator runs them, the kernel starts it.

The kernel knows a program's architecture by the first bytes of its file, and starts the emulator for it (binfmt_misc).
Since Linux 6.7 a user namespace can have such rules of its own: they hold in one machine and nowhere else.

    an image with an operating system of the other architecture ─► emulator and its rule in each machine
    the agent ─► this host's Python and C library, from /opt: nothing of the image runs outside machines

Its limits: system calls go to this host's kernel, so the emulator must know them (no ptrace, no new namespaces, some
ioctls differ). Programs see processors of both kinds in /proc and /sys. Whoever wants to can still run programs of this
host's architecture. A virtual machine has none of these limits, and is slower to start.
"""

from __future__ import annotations

import os
import platform
import shutil
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from rollmill.machines.guest import layout
from rollmill.machines.guest import linux as kernel

if TYPE_CHECKING:
    from rollmill.machines.machine import Machine

_ELF_MACHINES = {"aarch64": 183, "x86_64": 62}
PACKAGES = ("qemu-user", "qemu-user-static")  # Debian's: from 13 on it is in the first, before in the second
_SINCE = (6, 7)
_PROGRAM_HEADER_INTERPRETER = 3
_LOOP = "i=0; while [ $i -lt 50000 ]; do i=$((i+1)); done"
_MOST_SLOWDOWN = 100.0


def find(architecture: str) -> str | None:
    """The emulator of an architecture on this host. It must need no library: a machine has none for it."""
    fetched = str(kernel_directory(architecture) / name_of(architecture))
    for name in (fetched, *names_of(architecture)):
        path = shutil.which(name)
        if path is not None and interpreter_of(Path(path)) is None:
            return path
    return None


def missing(architecture: str) -> str | None:
    """What this host lacks to run programs of another architecture in namespace machines; None if nothing."""
    if architecture not in _ELF_MACHINES:
        return f"no emulator for {architecture!r} is known"
    if kernel.version() < _SINCE:
        return f"Linux {_SINCE[0]}.{_SINCE[1]} or newer is needed, this is {os.uname().release}"
    if "binfmt_misc" not in Path("/proc/filesystems").read_text():
        return "the kernel has no binfmt_misc (`modprobe binfmt_misc`)"
    if not all(map(kernel.has_capability, (kernel.CAP_SYS_ADMIN, kernel.CAP_SETUID))):
        return "only root can give machines the rule for its emulator"  # it belongs to a second user of the machine
    if find(architecture) is None:
        return f"there is no {name_of(architecture)} (`rollmill machines setup --architecture {architecture}`)"
    return None


def name_of(architecture: str) -> str:
    return f"qemu-{architecture}-static"


def names_of(architecture: str) -> tuple[str, str]:
    return name_of(architecture), f"qemu-{architecture}"


def other() -> str:
    """The architecture that is not this host's."""
    return next(name for name in _ELF_MACHINES if name != platform.machine())


def rule(architecture: str) -> str:
    """What makes the kernel start the emulator: programs (2) and position-independent ones (3) of this architecture.

    F: the emulator is opened now, so programs find it wherever they are.
    """
    magic = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HH", 2, _ELF_MACHINES[architecture])
    mask = b"\xff" * 7 + b"\x00" + b"\xff" * 8 + b"\xfe\xff\xff\xff"
    words = ("".join(f"\\x{byte:02x}" for byte in part) for part in (magic, mask))
    return f":{architecture}:M::{':'.join(words)}:{layout.EMULATOR}:F"


async def measure_slowdown(machine: Machine, plain: Machine) -> float:
    """How many times longer a loop of the shell takes in `machine` than in `plain`: the least of three on each side."""
    seconds = []
    for each in (machine, plain):
        results = [await each.exec(["sh", "-c", _LOOP], timeout_s=60.0) for _ in range(3)]
        if any(result.exit_code != 0 for result in results):
            return 1.0  # it has no shell
        seconds.append(min(result.seconds for result in results))
    return min(max(1.0, seconds[0] / seconds[1]), _MOST_SLOWDOWN)


def interpreter_of(program: Path) -> str | None:
    """The loader that a 64-bit program asks for; None if it needs none."""
    with program.open("rb") as file:
        start = file.read(64)
        if start[:5] != b"\x7fELF\x02":
            return None
        at, size, count = struct.unpack_from("<Q", start, 32)[0], *struct.unpack_from("<HH", start, 54)
        for number in range(count):
            file.seek(at + number * size)
            kind, _, offset, _, _, length = struct.unpack("<IIQQQQ", file.read(40))
            if kind == _PROGRAM_HEADER_INTERPRETER:
                file.seek(offset)
                return file.read(length).rstrip(b"\0").decode()
    return None


def kernel_directory(name: str | None = None) -> Path:
    """Where `rollmill machines setup` keeps the kernel, its modules and the preload: below the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "rollmill" / "qemu" / (name or platform.machine())
