"""A directory as an object store. Every write is durable when the call returns and atomic under kill -9:

    write .staging/NAME, fsync it  →  link (create) or rename (put) it to its key  →  fsync the folder

A process that dies in between leaves at most a file in .staging, which no reader reads. Files there that are older than
an hour are removed when the store is next opened.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from rollmill.errors import ObjectExists, ObjectMissing, StorageError
from rollmill.storage.backend import Backend, Stat

_STAGING = ".staging"
_PIECE = 4 << 20  # bytes of a file that are in memory
_ABANDONED_SECONDS = 3600.0
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class DirectoryBackend(Backend):
    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._staging = self._root / _STAGING
        with self._explained(str(root)):
            self._staging.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned()

    def get(self, key: str) -> bytes:
        with self._explained(key):
            return (self._root / key).read_bytes()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._explained(key), (self._root / key).open("rb") as file:
            file.seek(start)
            return file.read(length)

    def put(self, key: str, data: bytes) -> None:
        with self._explained(key, writing=True), self._staged([data]) as staged:
            self._into_place(key, lambda target: staged.replace(target))

    def create(self, key: str, data: bytes) -> None:
        self._create(key, [data])

    def create_from(self, key: str, file: IO[bytes]) -> None:
        self._create(key, iter(lambda: file.read(_PIECE), b""))

    def _create(self, key: str, pieces: Iterable[bytes]) -> None:
        with self._explained(key, writing=True):
            if (self._root / key).is_file():
                raise FileExistsError  # the common case, without writing the data first
            with self._staged(pieces) as staged:
                self._into_place(key, lambda target: os.link(staged, target))

    def stat(self, key: str) -> Stat | None:
        with self._explained(key):
            try:
                found = os.stat(f"{self._root}/{key}")  # called many times per second; Path would be slower
                return Stat(found.st_size, found.st_mtime) if stat.S_ISREG(found.st_mode) else None
            except (FileNotFoundError, NotADirectoryError):
                return None

    def list(self, prefix: str) -> builtins.list[str]:
        keys: builtins.list[str] = []
        with self._explained(prefix):
            for folder, folders, files in os.walk(self._root / prefix):
                folders[:] = [name for name in folders if not name.startswith(".")]
                inside = os.path.relpath(folder, self._root).replace(os.sep, "/")
                base = "" if inside == "." else f"{inside}/"
                keys.extend(base + name for name in files if not name.startswith("."))
        return keys

    def folders(self, prefix: str) -> builtins.list[str]:
        with self._explained(prefix):
            try:
                with os.scandir(self._root / prefix) as entries:
                    return [e.name for e in entries if e.is_dir() and not e.name.startswith(".")]
            except (FileNotFoundError, NotADirectoryError):
                return []

    def delete(self, keys: Sequence[str]) -> None:
        folders = set()
        for key in keys:
            with self._explained(key), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                (self._root / key).unlink()
                folders.add((self._root / key).parent)
        for folder in folders:
            sync_folder(folder)

    @contextlib.contextmanager
    def _staged(self, pieces: Iterable[bytes]) -> Iterator[Path]:
        """The data in a synced temporary file, which is removed at the end unless it was renamed."""
        path = self._staging / f"{os.getpid()}-{uuid.uuid4().hex}"
        try:
            with path.open("xb", buffering=0) as file:
                for data in pieces:
                    view = memoryview(data)
                    while view:
                        view = view[file.write(view) :]
                os.fsync(file.fileno())
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _into_place(self, key: str, place: Callable[[Path], object]) -> None:
        target = self._root / key
        try:
            place(target)
        except FileNotFoundError:  # the first object in its folder
            _make_folder(target.parent)
            place(target)
        sync_folder(target.parent)

    def _remove_abandoned(self) -> None:
        """Ages are by the file system's clock: this machine's clock may be wrong, and others are writing here now."""
        files = list(self._staging.iterdir())
        if not files:
            return
        try:
            with self._staged([]) as path:
                now = path.stat().st_mtime
        except OSError:
            return  # a read-only store is not cleaned up
        for path in files:
            with contextlib.suppress(FileNotFoundError):  # another process may clean up at the same time
                if now - path.stat().st_mtime > _ABANDONED_SECONDS:
                    path.unlink()

    @contextlib.contextmanager
    def _explained(self, key: str, writing: bool = False) -> Iterator[None]:
        try:
            yield
        except FileExistsError:
            raise ObjectExists(f"{key!r} in {self._root} already exists") from None
        except OSError as error:
            if not writing and isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
                raise ObjectMissing(f"no object {key!r} in {self._root}") from None
            if error.errno in _FULL:
                hint = (
                    f"free some space on the disk that holds {self._root}; nothing was lost, the call can be repeated"
                )
            elif error.errno in (errno.EISDIR, errno.ENOTDIR):
                hint = "in a directory store a name cannot be both an object and a folder"
            elif error.errno in (errno.EPERM, errno.ENOTSUP):
                hint = f"the file system of {self._root} must support hard links; put the store on a local disk"
            else:
                hint = f"check the permissions and the disk of {self._root}"
            raise StorageError(f"{key!r} in {self._root}: {error.strerror}", hint=hint) from error


def _make_folder(folder: Path) -> None:
    """Make a folder that survives a power failure: its parent is synced too."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir(exist_ok=True)  # another process may make it at the same time
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make created and renamed files of a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
