"""A cpio archive, the format of Linux's initial file system ("newc"). Everything in it belongs to root."""

from __future__ import annotations

import os
import posixpath
import stat
from pathlib import Path
from typing import IO, NamedTuple

_HEADER = "070701" + "{:08X}" * 13
_END = "TRAILER!!!"


class _Entry(NamedTuple):
    mode: int
    source: bytes | Path = b""  # of a file: its content, or the file of this host; of a link: its target
    modified: int = 0
    device: tuple[int, int] = (0, 0)


class Archive:
    """Paths are absolute, and none leads through a link. Missing parents are made. The later of two entries wins."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def __contains__(self, path: str) -> bool:
        return path in self._entries

    @property
    def size(self) -> int:
        """Bytes of all files, each of whole pages as a file system in memory has them."""
        sizes = [
            each.source.stat().st_size if isinstance(each.source, Path) else len(each.source)
            for each in self._entries.values()
        ]
        return sum(-(-size // 4096) * 4096 for size in sizes)

    def directory(self, path: str, mode: int = 0o755) -> None:
        self._add(path, _Entry(stat.S_IFDIR | mode))

    def link(self, path: str, target: str) -> None:
        self._add(path, _Entry(stat.S_IFLNK | 0o777, target.encode("utf-8", "surrogateescape")))

    def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        self._add(path, _Entry(stat.S_IFREG | mode, content))

    def copy(self, path: str, source: Path) -> None:
        """A file of this host. Its time is kept: compiled Python is valid only beside source of the same time."""
        status = source.stat()
        mode = 0o755 if status.st_mode & 0o111 else 0o644
        self._add(path, _Entry(stat.S_IFREG | mode, source, int(status.st_mtime)))

    def character_device(self, path: str, mode: int, device: tuple[int, int]) -> None:
        self._add(path, _Entry(stat.S_IFCHR | mode, device=device))

    def _add(self, path: str, entry: _Entry) -> None:
        parent = posixpath.dirname(path)
        if parent not in ("/", "") and parent not in self._entries:
            self.directory(parent)
        self._entries[path] = entry

    def save(self, file: IO[bytes]) -> None:
        for number, (path, entry) in enumerate(sorted(self._entries.items()), 1):  # a directory before its files
            content = entry.source.read_bytes() if isinstance(entry.source, Path) else entry.source
            _save(file, number, path.lstrip("/"), entry, content)
        _save(file, 0, _END, _Entry(0), b"")


def _save(file: IO[bytes], number: int, path: str, entry: _Entry, content: bytes) -> None:
    name = os.fsencode(path) + b"\0"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    fields = (number, entry.mode, 0, 0, links, entry.modified, len(content), 0, 0, *entry.device, len(name), 0)
    file.write(_pad(_HEADER.format(*fields).encode() + name))
    file.write(_pad(content))


def _pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
