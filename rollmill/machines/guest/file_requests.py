"""Reads and writes a machine's files, in pid 1. Links are followed inside the machine, so none leads out of it."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tarfile


def read(path: str, max_bytes: int, folder: int | None = None) -> bytes:
    """Returns the contents of a regular file; EFBIG if it has more than `max_bytes`. `folder`: `path` is below it."""
    with _open_regular(path, os.O_RDONLY, folder) as file:
        data = _read_up_to(file, max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
    return data


def write_all(entries: Sequence[Sequence[str | int]], body: bytes) -> None:
    """Write files. Each entry is [path, size]; `body` is all contents in this order. Creates missing directories."""
    start = 0
    for path, size in entries:
        assert isinstance(path, str) and isinstance(size, int)
        try:
            _write(path, body[start : start + size])
        except (FileNotFoundError, NotADirectoryError):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            _write(path, body[start : start + size])
        start += size


def _write(path: str, data: bytes) -> None:
    with _open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
        _write_fully(file, data)


def pack_directory(directory: str, max_bytes: int, *, whole: bool = True) -> bytes:
    """Returns a tar of the regular files, directories and links, of about `max_bytes` at most. Leaves out all other
    kinds, and with `whole` false what cannot be read."""
    import tarfile  # imported here, because it is seldom needed and every machine would hold it in memory

    os.listdir(directory)  # `fwalk` would not say that there is none
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for folder, names, leaves, opened in os.fwalk(directory, onerror=_raise if whole else None):
            names.sort()
            for name in [*names, *sorted(leaves)]:
                inside = os.path.relpath(os.path.join(folder, name), directory)
                try:
                    _pack(archive, name, opened, inside, max_bytes - buffer.tell())
                except (PermissionError, FileNotFoundError):
                    if whole:
                        raise
    return buffer.getvalue()


def _raise(error: OSError) -> None:
    raise error


def unpack_directory(directory: str, data: bytes) -> None:
    import tarfile

    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            path = os.path.join(directory, os.path.normpath("/" + member.name)[1:])
            if member.isdir():
                os.makedirs(path, exist_ok=True)
            elif member.issym():
                os.symlink(member.linkname, path)
            elif member.isreg():
                content = archive.extractfile(member)
                assert content is not None
                write_all([(path, member.size)], content.read())
                os.chmod(path, member.mode & 0o777)


def _pack(archive: tarfile.TarFile, name: str, folder: int, inside: str, room: int) -> None:
    """Add what is called `name` in an open directory to an archive, as `inside`."""
    if room < 0:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), inside)
    status = os.lstat(name, dir_fd=folder)
    member = archive.tarinfo(inside)
    member.mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode):
        member.type = b"5"  # a directory
        archive.addfile(member)
    elif stat.S_ISLNK(status.st_mode):
        member.type, member.linkname = b"2", os.readlink(name, dir_fd=folder)
        archive.addfile(member)
    elif stat.S_ISREG(status.st_mode):
        content = read(name, room, folder)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))


@contextlib.contextmanager
def _open_regular(path: str, flags: int, folder: int | None = None) -> Iterator[int]:
    """Open a regular file. Does not block on a pipe under its name. Refuses /proc, which would show pid 1."""
    file = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o644, dir_fd=folder)
    try:
        status = os.fstat(file)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(status.st_mode) or status.st_dev == os.stat("/proc").st_dev:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        yield file
    finally:
        os.close(file)


def _read_up_to(file: int, count: int) -> bytes:
    parts = []
    while count > 0 and (part := os.read(file, min(count, 1 << 20))):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _write_fully(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
