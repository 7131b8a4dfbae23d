"""Operating systems for images: a Debian suite as a layer.

    --suite bookworm       mmdebstrap or debootstrap makes the tree. Its /usr, /bin, /lib … take the place of this
                           host's programs in namespace machines, and are the programs of virtual ones

A tree has links, so it is kept as one archive (the layer's only file), and unpacked beside the layers when a machine
first needs it. Its paths stay inside, devices are left out, and links that lead outside are not followed.
In namespace machines the agent runs on this host's Python, so the tree's C library must not be older than this host's.
The machine host loads that C library too, before it has isolated itself, as root where Rollmill is root. So whoever
built the tree must be trusted: one from a store is refused unless it was asked for with `rollmill images pull --trust`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import zstandard

from rollmill.errors import TaskError
from rollmill.machines.oci.tar import ArchiveError, Tar, safe_path

ARCHIVE = "root.tar.zst"  # the layer's file
_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]{0,63}")
_BUILD_S = 1800.0
DEBIAN = {"aarch64": "arm64", "x86_64": "amd64"}  # Debian's names of architectures
_PYTHON = re.compile(r"python(\d+)\.(\d+)")
_ELF_MACHINES = {183: "aarch64", 62: "x86_64"}
_MERGED_USR = "/usr/share/mmdebstrap/hooks/merged-usr"
_LARGEST, _MOST_ENTRIES = 8 << 30, 2_000_000


def make_debian(suite: str, packages: Sequence[str], target: Path, architecture: str | None = None) -> None:
    """Write the archive of a Debian suite to the directory `target`. TaskError: what is missing or failed.

    Of another `architecture` than this host's, packages are unpacked, but their scripts do not run: that takes a
    computer of that architecture. `python3` is always among them, because the agent of its machines needs it.
    """
    for name in (suite, *packages):
        if not _NAME.fullmatch(name):
            raise TaskError(f"{name!r} is no name of a Debian suite or package")
    other = architecture not in (None, platform.machine())
    if other and architecture not in DEBIAN:
        raise TaskError(f"no images for the architecture {architecture!r}", hint=f"use {' or '.join(DEBIAN)}")
    with tempfile.TemporaryDirectory(prefix="rollmill-suite-") as temporary:
        archive = Path(temporary, "root.tar")
        wanted = [f"--include={','.join(packages)}"] if packages else []
        if (program := shutil.which("mmdebstrap")) is not None:
            options = _without_running(DEBIAN[str(architecture)], packages) if other else ["--variant=minbase", *wanted]
            mode = "root" if os.geteuid() == 0 else "unshare"
            _run([program, "--quiet", f"--mode={mode}", *options, suite, str(archive)])
        elif not other and (program := shutil.which("debootstrap")) is not None and os.geteuid() == 0:
            tree = Path(temporary, "tree")
            _run([program, "--variant=minbase", *wanted, suite, str(tree)])
            _run(["tar", "--numeric-owner", "--sort=name", "-C", str(tree), "-cf", str(archive), "."])
        else:
            raise TaskError(
                "mmdebstrap (or, for this host's architecture and as root, debootstrap) is not there: a Debian suite "
                "cannot be built",
                hint="apt-get install mmdebstrap",
            )
        target.mkdir(parents=True)
        with archive.open("rb") as source, (target / ARCHIVE).open("wb") as packed:
            zstandard.ZstdCompressor(level=3).copy_stream(source, packed)


def _without_running(debian: str, packages: Sequence[str]) -> list[str]:
    """Options of mmdebstrap for an architecture whose programs cannot run here, in place of what scripts would do."""
    compile_ = f"{shlex.quote(sys.executable)} -I -m compileall -q --invalidation-mode unchecked-hash -s"
    own = f"usr/lib/python{sys.version_info.major}.{sys.version_info.minor}"
    hooks = [
        '[ -e "$1/usr/bin/awk" ] || ln -s mawk "$1/usr/bin/awk"',
        '[ -e "$1/bin/sh" ] || ln -s dash "$1/bin/sh"',
        # compiled Python is the same on every architecture, and only there if the versions are the same
        f'[ ! -d "$1/{own}" ] || {compile_} "$1" -p / "$1/{own}" || true',
    ]
    merged = [f"--hook-dir={_MERGED_USR}"] if Path(_MERGED_USR).is_dir() else []
    return [
        "--variant=extract",
        f"--architectures={debian}",
        "--include=?essential",
        f"--include={','.join(['python3', *packages])}",
        *merged,
        *(f"--extract-hook={hook}" for hook in hooks),
    ]


@functools.lru_cache(maxsize=64)  # a tree never changes
def architecture_of(tree: Path) -> str | None:
    """The architecture of a tree's programs, as `uname -m` prints it; None if it has none that is known here."""
    for name in ("usr/bin", "bin"):
        for path in sorted((tree / name).glob("*")) if _leads_inside(tree / name, tree) else ():
            if path.is_symlink() or not path.is_file():
                continue
            with path.open("rb") as file:
                start = file.read(20)
            if start[:4] == b"\x7fELF" and len(start) == 20:
                return _ELF_MACHINES.get(int.from_bytes(start[18:20], "little"))
    return None


def python_version(tree: Path) -> tuple[int, int] | None:
    """Of the tree's Python, by the names of its programs. The newest, if there are several."""
    names = [path.name for path in (tree / "usr/bin").glob("python3.*") if not path.is_symlink()]
    found = [match for name in names if (match := _PYTHON.fullmatch(name))]
    return max(((int(match[1]), int(match[2])) for match in found), default=None)


def _leads_inside(path: Path, tree: Path) -> bool:
    return path.resolve().is_relative_to(tree.resolve())


def unpacked_root(layer: Path, root: Path) -> str:
    """The directory with the tree of a layer, unpacked if nobody has done so. TaskError: the archive is damaged."""
    place = root / "roots" / layer.name
    if place.is_dir():
        return str(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=root, ignore_cleanup_errors=True) as temporary:
        tree = Path(temporary, "tree")
        tree.mkdir()
        try:
            with (
                (layer / ARCHIVE).open("rb") as file,
                zstandard.ZstdDecompressor().stream_reader(file) as stream,
            ):
                _unpack(Tar(stream, most_bytes=_LARGEST, most_entries=_MOST_ENTRIES), tree)
        except (ArchiveError, zstandard.ZstdError, OSError) as error:
            raise TaskError(f"the operating system {layer.name[:12]} cannot be unpacked: {error}") from None
        tree.chmod(0o755)
        with contextlib.suppress(OSError):  # another process was faster
            os.rename(tree, place)
    return str(place)


def _unpack(tar: Tar, tree: Path) -> None:
    for entry in tar:
        path = safe_path(entry.name)
        if path is None:
            if entry.name.strip("./"):
                raise TaskError(f"an operating system has an entry that leads outside: {entry.name!r}")
            continue
        place = _inside(tree, path)
        if entry.kind == "directory":
            if not place.is_symlink():  # else both would follow it, perhaps to a directory of this host
                place.mkdir(exist_ok=True)
                place.chmod(entry.mode & 0o755 | 0o700)
        elif entry.kind == "link":
            place.symlink_to(entry.target)
        elif entry.kind == "hard link" and (linked := safe_path(entry.target)) is not None:
            os.link(_inside(tree, linked), place, follow_symlinks=False)
        elif entry.kind == "file":
            with place.open("xb") as file:
                tar.copy_to(file)
            place.chmod(entry.mode & 0o755 | 0o600)  # nothing runs with the rights of another user


def _inside(tree: Path, path: str) -> Path:
    """The place of an entry. The directories above it may be links, but only to places in the tree."""
    parent = (tree / path).parent
    if not _leads_inside(parent, tree):
        raise TaskError(f"an operating system has an entry that leads outside: {path!r}")
    parent.mkdir(parents=True, exist_ok=True)
    return parent / Path(path).name


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_BUILD_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TaskError(f"{command[0]} took more than {_BUILD_S:.0f} s") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[-1200:]
        raise TaskError(
            f"{' '.join(command[:2])} … ended with exit code {done.returncode}: {said}",
            hint="do the suite and the packages exist, and can the mirror be reached?",
        )
