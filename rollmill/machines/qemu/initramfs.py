"""The files of a guest: made of this host's Python, programs and libraries, as the root of namespace machines is; or
those of the image's own operating system (system.py).

    /usr /bin /lib …     the programs in PROGRAMS that this host has, with their libraries
    /opt/python          the Python installation in use, where it is not part of /usr; standard library only
    /opt/bin             python, python3
    /opt/packages        the Python packages of the image, if it has any
    …                    the programs and directories that the services of the image name
    /opt/host            the code of the guest's first process, which deletes it once it is imported
    /etc /dev            a few files made for machines

The guest keeps all of it in memory, so it is chosen and not copied whole. Of an OCI image nothing is in it: those are
on a disk (disks.py), and a guest of one has only Python and a shell here, for its first process.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

import zstandard

from rollmill.errors import MachineError
from rollmill.machines.guest import computer, layout
from rollmill.machines.guest.image_root import ImageRoot
from rollmill.machines.namespace import root
from rollmill.machines.qemu.cpio import Archive
from rollmill.machines.qemu.parts import Parts
from rollmill.machines.qemu.system import add_system
from rollmill.machines.qemu.system import environment as system_environment

PROGRAMS = """
    [ awk base64 basename bash cat chgrp chmod chown cmp comm cp cut date dd df diff dirname du echo egrep env expr
    expand false fgrep find fold git grep gunzip gzip head hostname id install join kill ln ls make md5sum mkdir mkfifo
    mktemp mv nice nl nohup nproc od paste patch pkill printenv printf ps pwd readlink realpath rev rm rmdir sed seq
    setsid sh sha1sum sha256sum shuf sleep sort split stat stty sync tac tail tar tee test time timeout touch tr true
    truncate tty uname uniq unlink uptime wc which whoami xargs xz yes
    dpkg dpkg-query ip less man nano ssh sudo top
""".split()
# files of this host that every Debian computer has; none of them is run
_USUAL_FILES = ("/sbin/init", "/usr/lib/os-release", "/usr/share/zoneinfo/Etc/UTC", "/var/lib/dpkg/status")
_USUAL_LINKS = {"/etc/os-release": "../usr/lib/os-release", "/etc/localtime": "/usr/share/zoneinfo/Etc/UTC"}
_ESSENTIAL = ("sh", "cat", "chmod", "rm", "ln", "mkdir", "dirname", "xargs", "tar")  # what tasks and grading use
# of the standard library: tests, graphics, and what builds or installs packages
_LEFT_OUT = frozenset(
    {"test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "site-packages", "pydoc_data"}
)
_LEFT_OUT_STARTS = ("config-", "_tkinter", "_test", "dist-packages")
_MODULES = "/opt/modules"
_ROOM = 64 << 20  # what a guest needs beside its files to boot
_GUEST_CODE = ("init.py", "streams.py")
_INIT = """#!/bin/sh
{exports}
exec {python} -c 'import sys; sys.path.insert(0, "{code}"); from {package}.init import main; main()'
"""


def build(
    parts: Parts,
    limits: dict[str, int],
    packages: str | None,
    file: IO[bytes],
    extra: Sequence[str] = (),
    *,
    tree: str | None = None,
    whole: ImageRoot | None = None,
) -> int:
    """Write the archive of a guest to `file`. Returns the bytes of its files, which it keeps in memory.

    `limits` are those of guest/agent.py. `extra`: paths of this host. `tree`: the operating system of the image,
    whose programs take the place of this host's. `whole`: an OCI image, which is on a disk.
    """
    archive = Archive()
    if tree is not None:
        add_system(archive, Path(tree))
    for name in (layout.WORK, layout.TEMPORARY, layout.CODE, layout.HOME, "/proc", "/sys", "/dev"):
        archive.directory(name)
    for name in computer.DIRECTORIES:
        archive.directory(name)
    archive.character_device("/dev/console", 0o600, (5, 1))
    archive.character_device("/dev/null", 0o666, (1, 3))
    archive.character_device("/dev/urandom", 0o666, (1, 9))  # Python needs it where the kernel has no entropy yet
    for name, text in computer.FILES.items():
        archive.write(name, text.encode())
    if tree is None:
        _add_userland(archive, extra, PROGRAMS if whole is None else ["sh"])
    if packages is not None:
        _add_tree(archive, Path(packages), layout.PACKAGES, frozenset())
    environment = root.environment() if tree is None else system_environment()
    _add_init(archive, environment)
    modules = [f"{_MODULES}/{path.name}" for path in parts.modules]
    for path, module in zip(modules, parts.modules, strict=True):
        archive.copy(path, module)
    _add_own_code(archive)
    archive.directory(_MODULES)
    facts = {
        "limits": limits,
        "modules": modules,
        "modules_directory": _MODULES,
        "environment": environment,
        "packages": packages is not None,
        "image": None if whole is None else whole._replace(layers=("",) * len(whole.layers)),
    }
    archive.write(f"{layout.CODE}/facts.json", json.dumps(facts).encode())
    if tree is None and 2 * archive.size + _ROOM <= limits["memory"]:
        archive.save(file)
    else:  # while a guest unpacks it, it has both in memory
        with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as packed:
            archive.save(packed)
    return archive.size


def _add_userland(archive: Archive, extra: Sequence[str], programs: list[str]) -> None:
    """Add programs and Python of this host."""
    for name in root.USERLAND:
        if os.path.islink(f"/{name}"):
            archive.link(f"/{name}", os.readlink(f"/{name}"))
    python, added = _add_python(archive), _add_programs(archive, programs)
    _strip(archive, python)
    added += _add_extra(archive, extra)
    for path in _USUAL_FILES:
        if os.path.exists(path):
            _add_file(archive, path)
    for path, target in _USUAL_LINKS.items():
        archive.link(path, target)
    for library in _libraries([*python.values(), *added]):
        _add_file(archive, library)


def _add_init(archive: Archive, environment: dict[str, str]) -> None:
    exports = [f"export {name}='{value}'" for name, value in environment.items()]
    script = _INIT.format(
        exports="\n".join(exports), python=f"{layout.PROGRAMS}/python", code=layout.CODE, package=__package__
    )
    archive.write("/init", script.encode(), 0o755)


def _add_python(archive: Archive) -> dict[str, Path]:
    """Add the Python installation. Returns its program and shared libraries, by their path in the guest."""
    home = Path(sys.base_prefix).resolve()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    inside = str(home) if home.is_relative_to("/usr") else layout.PYTHON
    program = (home / "bin" / version).resolve()
    archive.copy(f"{inside}/bin/{version}", program)
    added = {f"{inside}/bin/{version}": program}
    for shared in sorted((home / "lib").glob(f"lib{version}*.so*")):
        if shared.is_symlink():
            archive.link(f"{inside}/lib/{shared.name}", os.readlink(shared))
        else:
            archive.copy(f"{inside}/lib/{shared.name}", shared)
            added[f"{inside}/lib/{shared.name}"] = shared
    added |= _add_tree(archive, home / "lib" / version, f"{inside}/lib/{version}", _LEFT_OUT)
    for name in ("python", "python3"):
        archive.link(f"{layout.PROGRAMS}/{name}", f"{inside}/bin/{version}")
    return added


def _add_tree(archive: Archive, source: Path, target: str, left_out: frozenset[str]) -> dict[str, Path]:
    """Add the regular files of a directory. Returns its shared libraries, by their path in the guest."""
    tag, libraries = f".{sys.implementation.cache_tag}.pyc", {}
    for folder, names, files in os.walk(source):
        names[:] = sorted(name for name in names if name not in left_out and not name.startswith(_LEFT_OUT_STARTS))
        inside = os.path.join(target, os.path.relpath(folder, source)).removesuffix("/.")
        for name in files:
            path = Path(folder, name)
            stale = name.endswith(".pyc") and not name.endswith(tag)
            if stale or name.startswith(_LEFT_OUT_STARTS) or path.is_symlink() or not path.is_file():
                continue
            archive.copy(f"{inside}/{name}", path)
            if ".so" in path.suffixes:
                libraries[f"{inside}/{name}"] = path
    return libraries


def _strip(archive: Archive, files: dict[str, Path]) -> None:
    """Leave out what only debuggers read, where this host can: a Python that was built from source is mostly that."""
    if shutil.which("strip") is None:
        return
    with tempfile.TemporaryDirectory() as temporary:
        copies = {path: Path(temporary, str(number)) for number, path in enumerate(files)}
        for path, copy in copies.items():
            shutil.copyfile(files[path], copy)
        subprocess.run(["strip", "--strip-unneeded", *copies.values()], capture_output=True, check=False)
        for path, copy in copies.items():
            archive.write(path, copy.read_bytes(), 0o755)


def _add_programs(archive: Archive, names: list[str]) -> list[Path]:
    found = {name: path for name in names if (path := shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin"))}
    missing = [name for name in _ESSENTIAL if name in names and name not in found]
    if missing:
        raise MachineError(f"this host has no {missing[0]!r}, which guests need", hint="install Debian's base system")
    # a set-user-id program may be executable and not readable
    return [_add_file(archive, path) for path in found.values() if os.access(path, os.R_OK)]


def _add_extra(archive: Archive, patterns: Iterable[str]) -> list[Path]:
    """Add programs and directories of this host. Returns the programs and libraries among them."""
    found: list[Path] = []
    for pattern in patterns:
        paths = sorted(glob.glob(pattern))
        if not paths:
            raise MachineError(f"this host has no {pattern}, which a service needs", hint="install its package")
        for path in paths:
            if not os.path.isdir(path):
                found.append(_add_file(archive, path))
                continue
            libraries = _add_tree(archive, Path(path), path, frozenset())
            found += libraries.values()
            found += [each for each in Path(path).iterdir() if each.is_file() and os.access(each, os.X_OK)]
    return found


def _add_file(archive: Archive, path: str) -> Path:
    """Add a file of this host under its own path, and the links on the way. Returns the file itself."""
    place = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    if not os.path.islink(place):
        archive.copy(place, Path(place))
        return Path(place)
    target = os.readlink(place)
    archive.link(place, target)
    return _add_file(archive, os.path.join(os.path.dirname(place), target))


def _libraries(programs: Iterable[Path]) -> Iterator[str]:
    """The shared libraries that programs of this host load, with the loader. Scripts have none."""
    listed = subprocess.run(
        ["ldd", *map(str, programs)], capture_output=True, text=True, errors="replace", check=False
    ).stdout
    home = Path(sys.base_prefix).resolve()
    for line in sorted({line.strip() for line in listed.splitlines() if line.startswith("\t")}):
        words = line.split()
        path = words[2] if "=>" in words and len(words) > 2 else words[0]
        if path.startswith("/") and os.path.isfile(path) and not Path(path).resolve().is_relative_to(home):
            yield path


def _add_own_code(archive: Archive) -> None:
    """Add the agent's package and the guest's first process, with empty packages above them."""
    here = Path(__file__).resolve().parent
    for package in (here, here.parent / "guest"):
        name = f"{__package__.rpartition('.')[0]}.{package.name}"
        place = layout.CODE
        for part in name.split("."):
            place += f"/{part}"
            archive.write(f"{place}/__init__.py", b"")
        sources = [package / name for name in _GUEST_CODE] if package == here else sorted(package.glob("*.py"))
        for source in sources:
            if source.name != "__init__.py":
                archive.copy(f"{place}/{source.name}", source)
