"""One layer of an OCI image becomes a tree that overlayfs can join with others.

A whiteout becomes a character device 0:0, an opaque directory gets the attribute user.overlay.opaque: the overlay is
mounted in the user namespace of a machine, where the kernel reads that attribute and makes that device without rights.

Taken: directories, files, links, hard links, with modes, owners and times. Left out: devices, pipes, attributes.
Without root, all files belong to this process's user. Owners above 65535 become nobody (65534), because a machine has
no more users.

A layer is untrusted. Its paths stay in the tree: links on the way are followed inside it, as if it was the root.
Refused: paths with `..`, hard links to what is not in the layer, sparse files, more bytes or entries than allowed, and
a layer whose content is not what the image's configuration says (its diff id).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rollmill.errors import TaskError
from rollmill.machines.oci.oci_layout import UNREADABLE, plain
from rollmill.machines.oci.tar import ArchiveError, Entry, Tar

LARGEST = 32 << 30  # bytes of all files of an image
MOST_ENTRIES = 4_000_000  # of one layer
OPAQUE = "user.overlay.opaque"
_WHITEOUT, _OPAQUE, _OTHER_MARKS = ".wh.", ".wh..wh..opq", ".wh..wh."
_MOST_PATH = 4096
_MOST_LINKS = 40  # on the way to one file
_MOST_ID, _NOBODY = 65535, 65534
_CHUNK = 1 << 20


def tree_of(diff_id: str, trees: Path) -> Path:
    return trees / diff_id.removeprefix("sha256:")


def bytes_of(diff_id: str, trees: Path) -> int | None:
    """Of the tree of a layer; None if it is not there."""
    place = tree_of(diff_id, trees)
    return int((trees / f"{place.name}.bytes").read_text()) if place.is_dir() else None


def unpack_layer(blob: Path, diff_id: str, trees: Path, *, most_bytes: int = LARGEST) -> int:
    """Make the tree of a layer below `trees`, unless it is there. Returns its bytes. TaskError: it is refused.

    It is written beside and renamed when it is whole. Of several processes one does it.
    """
    place = tree_of(diff_id, trees)
    with alone(trees, place.name):
        if not place.is_dir():
            unfinished = trees / f".unpacking-{place.name}"
            _remove(unfinished)  # of a process that was killed
            unfinished.mkdir(mode=0o755)
            try:
                _unpack(blob, diff_id, unfinished, most_bytes)
                _settle(unfinished)
                unfinished.rename(place)
            finally:
                _remove(unfinished)
    taken = bytes_of(diff_id, trees)
    assert taken is not None
    return taken


def remove_tree(place: Path) -> int:
    """Remove a tree, or what else lies beside trees. Returns the bytes that are free now."""
    freed = 0
    if place.is_dir():
        with contextlib.suppress(OSError, ValueError):
            freed = int(place.with_name(f"{place.name}.bytes").read_text())
        _remove(place)
    else:
        place.unlink(missing_ok=True)
    return freed


def _unpack(blob: Path, diff_id: str, unfinished: Path, most_bytes: int) -> None:
    name = diff_id.removeprefix("sha256:")
    try:
        with blob.open("rb") as file:
            stream = _Hashed(plain(file), most_bytes + MOST_ENTRIES * 1024)
            tar = Tar(stream, most_bytes=most_bytes, most_entries=MOST_ENTRIES, needs_end=False)  # type: ignore[arg-type]
            taken = Tree(unfinished).take(tar)
            stream.finish()
    except UNREADABLE as error:
        raise TaskError(f"the layer {name[:12]} cannot be unpacked: {error}", hint=_remedy(error)) from None
    if stream.digest != name:
        raise TaskError(
            f"the layer {name[:12]} has the content of {stream.digest[:12]}: `rootfs.diff_ids` of the image is wrong",
            hint="build or copy the image again",
        )
    (unfinished.parent / f"{name}.bytes").write_text(str(taken))


def _remedy(error: BaseException) -> str:
    if isinstance(error, ArchiveError):
        return f"an image may have {LARGEST >> 30} GiB of files, and only files that stay inside it"
    return "is the disk of $ROLLMILL_IMAGES full?"


class Tree:
    """A tree that is being written. Nobody else writes to it."""

    def __init__(self, place: Path) -> None:
        self._root = str(place)
        self._owns = os.geteuid() == 0
        self._folders: dict[str, str] = {}  # as an archive names them: where they are
        self._times: list[tuple[str, int]] = []  # of directories, set when nothing is written into them any more

    def take(self, tar: Tar) -> int:
        """Write the entries of a layer. Returns the bytes of its files."""
        taken = 0
        for entry in tar:
            if entry.sparse or (entry.kind == "other" and entry.size):
                raise ArchiveError(f"{entry.name!r} is of a kind that is not taken")
            parts = _parts(entry.name)
            if not parts:
                if entry.kind == "directory":
                    self._dress(self._root, entry)
                continue
            folder, name = self._folder(parts[:-1]), parts[-1]
            place = f"{folder}/{name}"
            if name == _OPAQUE:
                os.setxattr(folder, OPAQUE, b"y")
            elif name.startswith(_OTHER_MARKS):
                continue  # notes of old builders
            elif name.startswith(_WHITEOUT):
                self._white_out(f"{folder}/{name.removeprefix(_WHITEOUT)}", name)
            elif entry.kind != "other":
                taken += entry.size
                self._write(tar, entry, place)
        for place, time in reversed(self._times):
            with contextlib.suppress(FileNotFoundError):  # something else has taken its place
                os.utime(place, (time, time), follow_symlinks=False)
        return taken

    def _write(self, tar: Tar, entry: Entry, place: str) -> None:
        hidden = self._make_room(place, entry)
        if entry.kind == "directory":
            with contextlib.suppress(FileExistsError):
                os.mkdir(place, 0o755)
            if hidden:  # what lower layers have there was removed
                os.setxattr(place, OPAQUE, b"y")
        elif entry.kind == "link":
            os.symlink(entry.target, place)
        elif entry.kind == "hard link":
            return self._link(entry, place)
        else:
            file = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(file, "wb") as opened:
                tar.copy_to(opened)
        self._dress(place, entry)

    def _make_room(self, place: str, entry: Entry) -> bool:
        """Remove what is at a place, unless both are directories. Returns whether it was a whiteout."""
        try:
            status = os.lstat(place)
        except FileNotFoundError:
            return False
        if stat.S_ISDIR(status.st_mode):
            if entry.kind != "directory":
                self._folders.clear()
                shutil.rmtree(place)
            return False
        self._folders.clear()
        os.unlink(place)
        return stat.S_ISCHR(status.st_mode)

    def _link(self, entry: Entry, place: str) -> None:
        parts = _parts(entry.target)
        source = f"{self._folder(parts[:-1], make=False)}/{parts[-1]}" if parts else self._root
        try:
            if not stat.S_ISREG(os.lstat(source).st_mode) and not stat.S_ISLNK(os.lstat(source).st_mode):
                raise ArchiveError(f"{entry.name!r} is a hard link to {entry.target!r}, which is no file")
            os.link(source, place, follow_symlinks=False)
        except FileNotFoundError:
            raise ArchiveError(f"{entry.name!r} is a hard link to {entry.target!r}, which the layer has not") from None

    def _dress(self, place: str, entry: Entry) -> None:
        """Owner, mode and time."""
        if self._owns:
            owner, group = (each if each <= _MOST_ID else _NOBODY for each in (entry.user, entry.group))
            os.chown(place, owner, group, follow_symlinks=False)
        if entry.kind != "link":
            # its owner must be able to remove it again, where that is an ordinary user
            least = 0 if self._owns else 0o700 if entry.kind == "directory" else 0o600
            os.chmod(place, entry.mode | least)
        if entry.kind == "directory":
            self._times.append((place, entry.time))
        else:
            os.utime(place, (entry.time, entry.time), follow_symlinks=False)

    def _white_out(self, place: str, name: str) -> None:
        if place.endswith(("/", "/.", "/..")):
            raise ArchiveError(f"{name!r} removes nothing")
        try:
            status = os.lstat(place)
        except FileNotFoundError:
            os.mknod(place, stat.S_IFCHR, 0)
            return
        if stat.S_ISDIR(status.st_mode):  # this layer has it anew
            os.setxattr(place, OPAQUE, b"y")

    def _folder(self, parts: list[str], *, make: bool = True) -> str:
        """Where a directory is; made if it is not there. Links on the way are followed inside the tree."""
        key = "/".join(parts)
        if (known := self._folders.get(key)) is not None:
            return known
        place, left, links = self._root, parts[::-1], 0
        while left:
            name = left.pop()
            if name == "..":
                place = place if place == self._root else os.path.dirname(place)
                continue
            inside = f"{place}/{name}"
            try:
                status = os.lstat(inside)
            except FileNotFoundError:
                if not make:
                    raise ArchiveError(f"the layer has no {key!r}") from None
                os.mkdir(inside, 0o755)
            else:
                if stat.S_ISLNK(status.st_mode):
                    target, links = os.readlink(inside), links + 1
                    if links > _MOST_LINKS:
                        raise ArchiveError(f"{key!r} leads through too many links")
                    left += [part for part in reversed(target.split("/")) if part not in ("", ".")]
                    place = self._root if target.startswith("/") else place
                    continue
                if not stat.S_ISDIR(status.st_mode):
                    if not make:
                        raise ArchiveError(f"{key!r} is no directory")
                    self._folders.clear()
                    os.unlink(inside)
                    os.mkdir(inside, 0o755)
            place = inside
        self._folders[key] = place
        return place


def _parts(name: str) -> list[str]:
    """The folders and the name of an entry. ArchiveError: it leads outside."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or len(os.fsencode(name)) > _MOST_PATH:
        raise ArchiveError(f"the entry {name[:200]!r} leads outside, or has a name that is too long")
    return parts


class _Hashed:
    """A stream whose digest is known when all of it was read."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self._stream, self._left = stream, most
        self._hash = hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise ArchiveError("it has more bytes than an image may have")
        self._hash.update(data)
        return data

    def finish(self) -> None:
        while self.read(_CHUNK):
            pass

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


@contextlib.contextmanager
def alone(directory: Path, name: str) -> Iterator[None]:
    """One process makes a tree, or fetches a blob; the others wait, and find it."""
    (directory / ".locks").mkdir(parents=True, exist_ok=True)
    lock = os.open(directory / ".locks" / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _settle(directory: Path) -> None:
    """Have all files on the disk before they get their name: a host that loses power keeps whole trees or none."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        ctypes.CDLL(None).syncfs(opened)
    finally:
        os.close(opened)


def _remove(tree: Path) -> None:
    """Also what its owner may not enter."""

    def again(function: object, path: str, _: object) -> None:
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(path), 0o700)
            os.rmdir(path) if os.path.isdir(path) else os.unlink(path)

    if tree.exists():
        shutil.rmtree(tree, onerror=again)
