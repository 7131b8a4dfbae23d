"""What a virtual machine needs from this host: QEMU, a Linux kernel with virtio modules, and on some CPUs a preload."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from rollmill.errors import MachineError

SETUP = "`rollmill machines setup` installs it, or says what to install"
# in the order in which they are loaded. A kernel may have some built in, and then there is no such file.
MODULES = (
    "virtio",
    "virtio_ring",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_console",
)
# of Firecracker's guests, which are reached over vsock
VSOCK_MODULES = ("virtio_mmio", "vsock", "vmw_vsock_virtio_transport_common", "vmw_vsock_virtio_transport")
# Where a CPU erratum makes the kernel report 4 KiB per line of the instruction cache, QEMU aligns every piece of
# translated code to 4 KiB: five times the memory, and slower.
LONGEST_CACHE_LINE = 256
_CACHE_LINE = 187  # _SC_LEVEL1_ICACHE_LINESIZE of glibc; Python has no name for it


@dataclass(frozen=True)
class Architecture:
    """What differs between the guests of two architectures. Guests are of the host's architecture."""

    name: str
    program: str
    package: str  # Debian's, of the program
    kernel_package: str  # Debian's
    machine: str
    cpu: str  # under emulation
    console: str


ARCHITECTURES = {
    "aarch64": Architecture(
        "aarch64",
        "qemu-system-aarch64",
        "qemu-system-arm",
        "linux-image-cloud-arm64",
        "virt,gic-version=3,acpi=off",
        "cortex-a57",
        "ttyAMA0",
    ),
    "x86_64": Architecture(
        "x86_64",
        "qemu-system-x86_64",
        "qemu-system-x86",
        "linux-image-cloud-amd64",
        "q35",
        "qemu64",
        "ttyS0",
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


def architecture() -> Architecture:
    """The architecture of this host. MachineError if there are no virtual machines for it."""
    found = ARCHITECTURES.get(platform.machine())
    if found is None:
        raise MachineError(f"no virtual machines for {platform.machine()}", hint="use x86-64 or aarch64")
    return found


def kernel_directory() -> Path:
    """Where `rollmill machines setup` keeps the kernel, its modules and the preload: below the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "rollmill" / "qemu" / platform.machine()


def find_parts() -> Parts:
    """MachineError names the first part that is missing."""
    arch, place = architecture(), kernel_directory()
    program = shutil.which(arch.program)
    if program is None:
        raise MachineError(f"{arch.program} is not installed", hint=SETUP)
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise MachineError("setpriv is not installed: QEMU would run with all our rights", hint=f"{SETUP} (util-linux)")
    if not (place / "vmlinuz").is_file():
        raise MachineError(f"there is no kernel for virtual machines in {place}", hint=SETUP)
    if needs_preload() and not (place / "cache_line.so").is_file():
        raise MachineError("QEMU needs a preload on this CPU, which was not built yet", hint=SETUP)
    modules = tuple(path for name in MODULES if (path := place / f"{name}.ko").is_file())
    preload = place / "cache_line.so" if needs_preload() else None
    return Parts(arch, program, setpriv, place / "vmlinuz", modules, preload)


def needs_preload() -> bool:
    try:
        return os.sysconf(_CACHE_LINE) > LONGEST_CACHE_LINE
    except (ValueError, OSError):
        return False  # not known here
