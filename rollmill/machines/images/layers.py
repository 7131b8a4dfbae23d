"""Layers of images: trees of regular files, kept by content in this host's cache and in an object store.

    layers/DIGEST/               on this host: the files
    images/layers/DIGEST.tar.zst in a store: the same files, made so that equal layers are equal bytes
    images/names/NAME.json       in a store: the record of an image, which lists its layers

A layer is written once and never changed. One that comes from a store is untrusted until its digest is the one that was
asked for: it is unpacked beside the others, with no path that leads out and only regular files, and then renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import zstandard

from rollmill.errors import ObjectExists, ObjectMissing, TaskError
from rollmill.machines.oci.tar import ArchiveError, Tar, safe_path, write_entry
from rollmill.storage.objects import Objects

_LARGEST = 4 << 30  # bytes of an unpacked layer
_MOST_FILES = 1_000_000


class Entry(NamedTuple):
    path: str
    content: bytes
    executable: bool


class Layer(NamedTuple):
    digest: str
    bytes: int


def entries(directory: Path) -> Iterator[Entry]:
    """The regular files of a directory in order, without compiled Python. Links and other kinds are left out."""
    for folder, names, files in os.walk(directory):
        names[:] = sorted(name for name in names if name != "__pycache__")
        for name in sorted(files):
            path = Path(folder, name)
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                executable = bool(status.st_mode & 0o100)
                yield Entry(str(path.relative_to(directory)), path.read_bytes(), executable)


def measure(directory: Path) -> Layer:
    digest, size = hashlib.sha256(), 0
    for entry in entries(directory):
        facts = f"{entry.path}\0{entry.executable}\0{hashlib.sha256(entry.content).hexdigest()}\n"
        digest.update(facts.encode("utf-8", "surrogateescape"))
        size += len(entry.content)
    return Layer(digest.hexdigest(), size)


def keep(directory: Path, root: Path) -> Layer:
    """Move a finished tree into the cache. The same content is kept once."""
    layer = measure(directory)
    (root / "layers").mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # it is there already
        os.rename(directory, root / "layers" / layer.digest)
    return layer


def push(layer: str, root: Path, store: Objects) -> bool:
    """Write a layer to a store. Returns False if the store has it."""
    key = _key(layer)
    if store.head(key) is not None:
        return False
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries(root / "layers" / layer):
            member = tarfile.TarInfo(entry.path)
            member.size, member.mode = len(entry.content), 0o755 if entry.executable else 0o644
            archive.addfile(member, io.BytesIO(entry.content))
    try:
        store.create(key, zstandard.compress(buffer.getvalue(), 3))
    except ObjectExists:
        return False
    return True


def fetch(layer: str, root: Path, store: Objects) -> None:
    """Get a layer from a store, unless it is here. TaskError: it is missing, damaged, or not what its name says."""
    place = root / "layers" / layer
    if place.is_dir():
        return
    try:
        data = store.get(_key(layer))
    except ObjectMissing:
        raise TaskError(f"layer {layer[:12]} is not in {store.url}", hint="`rollmill images push` writes it") from None
    (root / "layers").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=root, ignore_cleanup_errors=True) as temporary:
        unpacked = Path(temporary, "layer")
        unpacked.mkdir()
        try:
            with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)) as stream:
                unpack(Tar(stream, most_bytes=_LARGEST, most_entries=_MOST_FILES), unpacked)
        except (ArchiveError, zstandard.ZstdError, OSError) as error:
            raise TaskError(f"layer {layer[:12]} of {store.url} is damaged: {error}") from None
        found = measure(unpacked).digest
        if found != layer:
            raise TaskError(f"layer {layer[:12]} of {store.url} has the content of {found[:12]}")
        with contextlib.suppress(OSError):
            os.rename(unpacked, place)


def unpack(tar: Tar, target: Path) -> None:
    """Unpack the regular files of an untrusted archive. Anything that is not plain is refused, not skipped."""
    for entry in tar:
        path = safe_path(entry.name)
        if entry.kind == "directory":
            continue
        if path is None or entry.kind != "file" or "__pycache__" in path.split("/")[:-1]:  # no digest covers those
            raise TaskError(f"a layer has an entry that is no plain file: {entry.name!r}")
        write_entry(target, path, entry.mode, tar)


def _key(layer: str) -> str:
    return f"images/layers/{layer}.tar.zst"
