"""Trees of files between this host and a machine of any kind: one tar.

The first process of a machine packs it, where no command reaches. What it packs nobody has checked: of that,
directories and regular files with a plain relative path are taken, and a hard link is a copy of its file. Symbolic
links could lead this host to files of its own: they are left out in both directions, as are devices, pipes and sparse
files.
"""

from __future__ import annotations

import asyncio
import errno
import io
import tarfile
from pathlib import Path

from rollmill.machines.machine import WORK, Machine, check_tree
from rollmill.machines.oci.tar import ArchiveError, Entry, Tar, safe_path

LARGEST = 1 << 27  # bytes of a tree
_MOST_ENTRIES = 1_000_000
_LIMIT_S = 300.0  # for a command of ours
_UNPACK = 'mkdir -p -- "$0" && exec tar -xf - -C "$0"'


async def put_tree(machine: Machine, source: Path, target: str = WORK) -> None:
    """Copy what is below the directory `source` into a directory of the machine, over what is there.

    OSError: it has more than LARGEST bytes (EFBIG), or cannot be written there. MachineError as with `exec`.
    """
    packed = await asyncio.to_thread(_pack, source)
    limit_s = _LIMIT_S * machine.capabilities.slowdown
    check_tree(await machine.exec(["sh", "-c", _UNPACK, target], stdin=packed, timeout_s=limit_s), target)


async def get_tree(machine: Machine, source: str, target: Path, *, max_bytes: int = LARGEST) -> None:
    """Copy what is below a directory of the machine into the directory `target`, over what is there.

    OSError as with `Machine.pack`, or the machine packed nonsense (EBADMSG). MachineError as with `exec`.
    """
    limit_s = _LIMIT_S * machine.capabilities.slowdown
    packed = await machine.pack(source, max_bytes=max_bytes, timeout_s=limit_s)
    await asyncio.to_thread(unpack, packed, target, max_bytes)


def _pack(source: Path) -> bytes:
    packed, size = io.BytesIO(), 0
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive:  # names as they are
        for path in sorted(source.rglob("*")):
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                continue
            member = tarfile.TarInfo(path.relative_to(source).as_posix())
            facts = path.stat()
            member.mtime, member.mode = int(facts.st_mtime), 0o755 if facts.st_mode & 0o100 else 0o644
            if path.is_dir():
                member.type, member.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(member)
                continue
            size += facts.st_size
            if size > LARGEST:
                raise OSError(errno.EFBIG, f"the tree has more than {LARGEST} bytes", str(source))
            data = path.read_bytes()
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def unpack(data: bytes, target: Path, max_bytes: int = LARGEST) -> None:
    """Write the files of an archive that nobody has checked below `target`, and nothing elsewhere. OSError if not."""
    target.mkdir(parents=True, exist_ok=True)
    written: dict[str, Path] = {}  # by path in the archive, for hard links
    size = 0
    try:
        for entry in (tar := Tar(io.BytesIO(data), most_bytes=len(data), most_entries=_MOST_ENTRIES)):
            path = safe_path(entry.name)
            if path is None:
                continue
            place = target / path
            if entry.kind == "directory":
                place.mkdir(parents=True, exist_ok=True)
                continue
            content = _content(tar, entry, written)
            if content is None:
                continue
            size += len(content)  # a hard link repeats its file
            if size > max_bytes:
                raise OSError(errno.EFBIG, f"the tree has more than {max_bytes} bytes", path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
            if entry.mode & 0o100:
                place.chmod(place.stat().st_mode | 0o111)
            written[path] = place
    except ArchiveError as error:
        raise OSError(errno.EBADMSG, f"a machine packed no proper archive: {str(error)[:200]}") from None


def _content(tar: Tar, entry: Entry, written: dict[str, Path]) -> bytes | None:
    """None for what is no regular file. A hard link is the file that came before it."""
    if entry.kind == "hard link":
        first = written.get(safe_path(entry.target) or "")
        return None if first is None else first.read_bytes()
    return tar.read() if entry.kind == "file" else None
