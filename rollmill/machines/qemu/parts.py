"""What a virtual machine needs from this host: QEMU, a Linux kernel with virtio modules, and on some CPUs a preload."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rollmill.errors import MachineError
from rollmill.machines.namespace.emulation import kernel_directory

SETUP = "`rollmill machines setup` installs it, or says what to install"
# A kernel may have some built in, and then there is no such file.
MODULES = (
    "virtio",
    "virtio_ring",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_console",
    "dummy",  # a network interface with nothing behind it
)
# what guests of OCI images need too, for their disks
DISK_MODULES = ("virtio_blk", "squashfs", "overlay", "crc16", "mbcache", "jbd2", "ext4")
_DISK_PACKAGES = {"sqfstar": "squashfs-tools", "mke2fs": "e2fsprogs"}  # Debian's, of the programs that make disks
_DISK_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
# Where a CPU erratum makes the kernel report 4 KiB per line of the instruction cache, QEMU aligns every piece of
# translated code to 4 KiB: five times the memory, and slower.
LONGEST_CACHE_LINE = 256
_DEPENDS = re.compile(rb"\0depends=([^\0]*)\0")  # in a module's own description
_CACHE_LINE = 187  # _SC_LEVEL1_ICACHE_LINESIZE of glibc; Python has no name for it


@dataclass(frozen=True)
class Architecture:
    """What differs between the guests of two architectures."""

    name: str
    debian: str  # Debian's name for it
    program: str
    package: str  # Debian's, of the program
    kernel_package: str  # Debian's
    machine: str
    cpu: str  # under emulation
    console: str
    tables: tuple[str, ...] = ()  # arguments: what its firmware says of its maker


ARCHITECTURES = {
    "aarch64": Architecture(
        "aarch64",
        "arm64",
        "qemu-system-aarch64",
        "qemu-system-arm",
        "linux-image-cloud-arm64",
        "virt,gic-version=3,acpi=off",
        "cortex-a57",
        "ttyAMA0",
    ),
    "x86_64": Architecture(
        "x86_64",
        "amd64",
        "qemu-system-x86_64",
        "qemu-system-x86",
        "linux-image-cloud-amd64",
        "q35",
        "qemu64,model-id=AMD Athlon(tm) 64 X2 Dual Core Processor 4000+",  # the family and model that qemu64 has
        "ttyS0",
        (  # as boards are sold whose seller has left the names as they were
            "type=0,vendor=coreboot,version=4.18,date=11/14/2022",
            "type=1,manufacturer=System manufacturer,product=System Product Name,version=System Version",
            "type=3,manufacturer=System manufacturer,version=1.0",
        ),
    ),
}


@dataclass(frozen=True)
class Parts:
    architecture: Architecture
    program: str
    setpriv: str  # takes QEMU's rights away
    kernel: Path
    modules: tuple[Path, ...]  # in the order in which they are loaded
    preload: Path | None


def architecture(name: str | None = None) -> Architecture:
    """That of guests: by name, or this host's. MachineError if there are no virtual machines for it."""
    name = name or platform.machine()
    found = ARCHITECTURES.get(name)
    if found is None:
        raise MachineError(f"no virtual machines for {name}", hint=f"use {' or '.join(ARCHITECTURES)}")
    return found


def find_parts(name: str | None = None, *, disks: bool = False) -> Parts:
    """The parts for guests of an architecture, or of this host's; with `disks`, for guests of OCI images. MachineError
    names the first that is missing."""
    arch, place = architecture(name), kernel_directory(name)
    setup = SETUP if arch.name == platform.machine() else SETUP.replace("setup`", f"setup --architecture {arch.name}`")
    program = shutil.which(arch.program)
    if program is None:
        raise MachineError(f"{arch.program} is not installed", hint=setup)
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise MachineError("setpriv is not installed: QEMU would run with all our rights", hint=f"{setup} (util-linux)")
    if not (place / "vmlinuz").is_file():
        raise MachineError(f"there is no kernel for virtual machines in {place}", hint=setup)
    if needs_preload() and not (place / "cache_line.so").is_file():
        raise MachineError("QEMU needs a preload on this CPU, which was not built yet", hint=setup)
    modules = load_order(MODULES + DISK_MODULES if disks else MODULES, place)
    preload = place / "cache_line.so" if needs_preload() else None
    return Parts(arch, program, setpriv, place / "vmlinuz", modules, preload)


def missing_packages() -> list[str]:
    """Debian packages that this host lacks to make disks."""
    return [package for name, package in _DISK_PACKAGES.items() if shutil.which(name, path=_DISK_PATH) is None]


def disk_program(name: str) -> str:
    """The path of a program that makes disks. MachineError: it is not installed."""
    found = shutil.which(name, path=_DISK_PATH)
    if found is None:
        raise MachineError(
            f"{name} is not installed, which makes disks of OCI images for virtual machines",
            hint=f"{SETUP} (Debian package {_DISK_PACKAGES[name]})",
        )
    return found


def has_disks(parts: Parts) -> bool:
    """Whether modules for disks are there. If not, they are part of the kernel, or an earlier release fetched it."""
    return any(path.stem in DISK_MODULES for path in parts.modules)


def load_order(names: Iterable[str], place: Path) -> tuple[Path, ...]:
    """The modules among `names` that are files in `place`, each after those that it needs. The order changes with the
    kernel: between two updates of Debian 12, virtio and virtio_ring changed places."""
    found = {name: path for name in names if (path := place / f"{name}.ko").is_file()}
    ordered: dict[str, Path] = {}

    def add(name: str) -> None:
        if name in found and name not in ordered:
            listed = _DEPENDS.search(found[name].read_bytes())
            for needed in listed[1].decode("ascii", "replace").split(",") if listed else ():
                if needed != name:
                    add(needed)
            ordered[name] = found[name]

    for name in found:
        add(name)
    return tuple(ordered.values())


def needs_preload() -> bool:
    try:
        return os.sysconf(_CACHE_LINE) > LONGEST_CACHE_LINE
    except (ValueError, OSError):
        return False  # not known here
