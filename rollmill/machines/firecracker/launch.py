"""What Firecracker needs of this host, and how a process of it is started: by the jailer where we are root."""

from __future__ import annotations

import gzip
import lzma
import os
import platform
import shutil
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import zstandard

from rollmill.errors import MachineError
from rollmill.machines.qemu.launch import guard
from rollmill.machines.qemu.parts import (
    MODULES,
    SETUP,
    VSOCK_MODULES,
    Parts,
    architecture,
    kernel_directory,
    load_order,
)

KVM = Path("/dev/kvm")
_RELEASES = "install `firecracker` and `jailer` of the same release (1.7 or newer) into a directory of PATH"
_LARGEST_KERNEL = 1 << 28
_ARM_IMAGE, _ELF = b"ARM\x64", b"\x7fELF"


@dataclass(frozen=True)
class FirecrackerParts:
    program: str
    jailer: str | None  # only where we are root
    setpriv: str
    guest: Parts  # kernel and modules


def find_parts(kernel: str | None = None) -> FirecrackerParts:
    """MachineError names the first part that is missing. `kernel`: one of your own, with vsock built in."""
    program = shutil.which("firecracker")
    if program is None:
        raise MachineError("firecracker is not installed", hint=_RELEASES)
    if not os.access(KVM, os.R_OK | os.W_OK):
        raise MachineError(f"{KVM} cannot be opened: Firecracker needs KVM", hint='use [machine] kind = "qemu"')
    jailer = shutil.which("jailer") if os.geteuid() == 0 else None
    if os.geteuid() == 0 and jailer is None:
        raise MachineError("jailer is not installed: Firecracker would run as root", hint=_RELEASES)
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise MachineError("setpriv is not installed", hint=f"{SETUP} (util-linux)")
    place = kernel_directory()
    if kernel is None and not all((place / name).is_file() for name in ("vmlinuz", "vsock.ko")):
        raise MachineError(
            f"a kernel for Firecracker's guests and its vsock modules are not in {place}",
            hint=f"delete its vmlinuz if it is there; {SETUP}. Or set `machine.kernel`",
        )
    names = (*MODULES[:2], *VSOCK_MODULES, MODULES[-1]) if kernel is None else ()
    modules = load_order(names, place)
    source = place / "vmlinuz" if kernel is None else Path(kernel)
    return FirecrackerParts(
        program, jailer, setpriv, Parts(architecture(), program, setpriv, source, modules, preload=None)
    )


def command(parts: FirecrackerParts, identifier: str, directory: Path, user: int) -> list[str]:
    """The command line of one process. It opens api.sock in `jail_root(…)`, and sees other files from there on.

    It ends with this process. With the jailer only until that has changed the user: then the kernel clears the signal,
    and reaper.py ends it.
    """
    if parts.jailer is None:
        return [*guard(parts.setpriv, "--no-new-privs"), parts.program, "--id", identifier, "--api-sock", "api.sock"]
    jail = ["--id", identifier, "--exec-file", parts.program, "--uid", str(user), "--gid", str(user)]
    jail += ["--chroot-base-dir", str(directory), "--cgroup-version", "2", "--resource-limit", "no-file=256"]
    return [*guard(parts.setpriv), parts.jailer, *jail, "--", "--api-sock", "api.sock"]


def jail_root(parts: FirecrackerParts, identifier: str, directory: Path) -> Path:
    """The directory that is the process's root, or its working directory without the jailer."""
    if parts.jailer is None:
        return directory / identifier
    return directory / Path(parts.program).name / identifier / "root"


def plain_kernel(data: bytes) -> bytes:
    """A kernel as Firecracker takes it: an ELF file on x86-64, an Image on Arm. Debian's are compressed."""
    if data[:4] == _ELF or data[56:60] == _ARM_IMAGE:
        return data
    try:
        if data[:2] == b"\x1f\x8b":
            return plain_kernel(gzip.decompress(data))
        if data[4:8] == b"zimg":  # an EFI program around a compressed Image
            start, length = struct.unpack_from("<II", data, 8)
            return _checked(_decompress(data[start : start + length]))
        if data[0x202:0x206] == b"HdrS":  # a bzImage; the payload begins after the real-mode part
            start, length = struct.unpack_from("<II", data, 0x248)
            start += ((data[0x1F1] or 4) + 1) * 512
            return _checked(_decompress(data[start : start + length]))
    except (struct.error, IndexError, OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
        raise MachineError(f"the kernel cannot be unpacked: {error!r}") from None
    raise MachineError(f"the kernel is of no known form ({data[:4]!r}, {platform.machine()})", hint="set `kernel`")


def _checked(data: bytes) -> bytes:
    if data[:4] != _ELF and data[56:60] != _ARM_IMAGE:
        raise MachineError("the kernel holds neither an ELF file nor an Image", hint="set `kernel`")
    return data


def _decompress(data: bytes) -> bytes:
    if data[:2] == b"\x1f\x8b":
        gzip_stream = zlib.decompressobj(31)
        found, whole = gzip_stream.decompress(data, _LARGEST_KERNEL), gzip_stream.eof
    elif data[:6] == b"\xfd7zXZ\x00":
        xz_stream = lzma.LZMADecompressor()
        found, whole = xz_stream.decompress(data, _LARGEST_KERNEL), xz_stream.eof
    elif data[:4] == b"\x28\xb5\x2f\xfd":
        zstd_stream = zstandard.ZstdDecompressor().decompressobj()
        found, whole = zstd_stream.decompress(data), zstd_stream.eof
    else:
        raise MachineError(f"the kernel is compressed in a way that is not known: {data[:6]!r}", hint="set `kernel`")
    if not whole:
        raise MachineError("the kernel is not whole", hint=f"delete it; {SETUP}")
    return found
