"""`rollmill machines setup`: gets the parts of virtual machines from Debian packages, or says what is missing.

QEMU is installed by apt, which needs root. The kernel is not installed: its package is downloaded and a few files are
taken out of it, which any user may do.
"""

from __future__ import annotations

import lzma
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from rollmill.errors import MachineError
from rollmill.machines.namespace import emulation
from rollmill.machines.qemu import parts

_MODULES = parts.MODULES + parts.DISK_MODULES
# answers QEMU's question for the line of the instruction cache, see parts.py
_PRELOAD = f"""#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
long sysconf(int name) {{
    static long (*original)(int);
    if (name == _SC_LEVEL1_ICACHE_LINESIZE) return {parts.LONGEST_CACHE_LINE};
    if (!original) original = (long (*)(int))dlsym(RTLD_NEXT, "sysconf");
    return original(name);
}}
"""


def set_up(say: Callable[[str], None], name: str | None = None) -> None:
    """Get whatever is missing for guests of an architecture, or of this host's. MachineError names what cannot be got,
    and the command that gets it."""
    arch, place = parts.architecture(name), emulation.kernel_directory(name)
    place.mkdir(parents=True, exist_ok=True)
    if shutil.which(arch.program) is None:
        _install([arch.package], say)
    if shutil.which("setpriv") is None:
        _install(["util-linux"], say)
    if missing := parts.missing_packages():
        _install(missing, say)
    say(f"QEMU: {shutil.which(arch.program)}")
    if not all((place / name).is_file() for name in ("vmlinuz", "overlay.ko")):  # earlier releases took fewer modules
        _fetch_kernel(arch, place)
    say(f"kernel: {place / 'vmlinuz'}")
    if parts.needs_preload():
        if not (place / "cache_line.so").is_file():
            _build_preload(place, say)
        say(f"preload for this CPU: {place / 'cache_line.so'}")
    if arch.name != platform.machine():
        if emulation.find(arch.name) is None:
            _fetch_emulator(arch.name, place)
        say(f"emulator of programs in namespace machines: {emulation.find(arch.name)}")


def _install(packages: list[str], say: Callable[[str], None]) -> None:
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise MachineError(
            f"missing: {', '.join(packages)} (names of Debian packages)",
            hint=f"as root: {' '.join(command)}, then `rollmill machines setup` again",
        )
    say(f"installing {', '.join(packages)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    _run(["apt-get", "update"], env=environment)
    _run(command, env=environment)


def _fetch_kernel(arch: parts.Architecture, place: Path) -> None:
    package = arch.kernel_package
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise MachineError(
            "the kernel of virtual machines comes from a Debian package, and there is no apt-get here",
            hint=f"unpack {package}: its vmlinuz and {', '.join(f'{name}.ko' for name in _MODULES)} into {place}",
        )
    with tempfile.TemporaryDirectory(dir=place) as temporary:
        options = [] if arch.name == platform.machine() else _other_packages(arch, Path(temporary, "apt"))
        depends = _run(["apt-cache", *options, "depends", package]).split()
        real = next((word for word in depends if word.startswith("linux-image-") and word != package), package)
        # apt's own user cannot write here, and says so; as root it then downloads itself
        _run(["apt-get", *options, "download", real], cwd=temporary)
        archive = next(Path(temporary).glob("*.deb"))
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as unpacking:
            assert unpacking.stdout is not None
            _take_kernel(unpacking.stdout, place)


def _fetch_emulator(name: str, place: Path) -> None:
    """It is not installed: then the kernel would run every program of this architecture, on the whole host."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise MachineError(
            f"{emulation.name_of(name)} comes from a Debian package, and there is no apt-get here",
            hint=f"put it into a directory of PATH or into {place}",
        )
    for package in emulation.PACKAGES:
        with tempfile.TemporaryDirectory(dir=place) as temporary:
            _run(["apt-get", "download", package], cwd=temporary)
            _run(["dpkg-deb", "-x", *map(str, Path(temporary).glob("*.deb")), temporary])
            for program in (Path(temporary, "usr/bin", each) for each in emulation.names_of(name)):
                if program.is_file() and emulation.interpreter_of(program) is None:
                    os.replace(program, place / emulation.name_of(name))
                    return
    raise MachineError(
        f"no package of {', '.join(emulation.PACKAGES)} has an emulator for {name} that needs no library",
        hint=f"put {emulation.name_of(name)} into a directory of PATH or into {place}",
    )


def _other_packages(arch: parts.Architecture, state: Path) -> list[str]:
    """Options with which apt knows the packages of another architecture. The host's own lists stay as they are."""
    (state / "lists/partial").mkdir(parents=True)
    (state / "archives/partial").mkdir(parents=True)
    (state / "status").touch()
    settings = {
        "APT::Architecture": arch.debian,
        "APT::Architectures": arch.debian,
        "Dir::State": state,
        "Dir::State::status": state / "status",
        "Dir::Cache": state,
        "APT::Sandbox::User": "root",  # apt's own user cannot write here
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    _run(["apt-get", *options, "update"])
    return options


def _take_kernel(stream: IO[bytes], place: Path) -> None:
    """Keep the kernel and the modules that are needed. The kernel is renamed last: it stands for all of them."""
    wanted = {f"{name}.ko{end}": f"{name}.ko" for name in _MODULES for end in ("", ".xz")}
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            name = Path(member.name).name
            if not member.isreg() or not (name in wanted or name.startswith("vmlinuz-")):
                continue
            content = archive.extractfile(member)
            assert content is not None
            data = content.read()
            data = lzma.decompress(data) if name.endswith(".xz") else data
            (place / wanted.get(name, "vmlinuz.part")).write_bytes(data)
    os.replace(place / "vmlinuz.part", place / "vmlinuz")


def _build_preload(place: Path, say: Callable[[str], None]) -> None:
    if shutil.which("cc") is None:
        _install(["gcc", "libc6-dev"], say)
    with tempfile.TemporaryDirectory(dir=place) as temporary:
        source, built = Path(temporary, "cache_line.c"), Path(temporary, "cache_line.so")
        source.write_text(_PRELOAD)
        _run(["cc", "-O2", "-shared", "-fPIC", "-o", str(built), str(source), "-ldl"])
        os.replace(built, place / "cache_line.so")


def _run(command: list[str], *, cwd: str | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip())[-600:]
        raise MachineError(
            f"`{' '.join(command)}` failed: {words}", hint="try it by hand; is a package mirror reachable?"
        )
    return done.stdout
