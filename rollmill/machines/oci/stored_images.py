"""OCI images in an object store: of many hosts, the first fetches an image from its registry or builds it.

    images/oci/names/HASH      the digest that a name led to when the first host looked it up; written last
    images/oci/blobs/DIGEST    manifests, configurations and layers, as they came

What comes from a store is checked against its digest, as what comes from a registry.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from pathlib import Path
from typing import Protocol

from rollmill.errors import ObjectExists, ObjectMissing, TaskError
from rollmill.machines.oci import documents
from rollmill.machines.oci.documents import Descriptor, Manifest
from rollmill.machines.oci.image_reference import Reference
from rollmill.machines.oci.unpack_layers import alone
from rollmill.storage.objects import Objects

_CHUNK = 8 << 20


class Source(Protocol):
    """Where an image comes from. Each raises TaskError."""

    def manifest(self, tag: str) -> Descriptor: ...
    def document(self, descriptor: Descriptor) -> bytes: ...
    def blob(self, descriptor: Descriptor) -> Path: ...


class StoredImage:
    """One image: of the store, or of its origin; then the store gets what it has not."""

    def __init__(self, store: Objects, blobs: Path, origin: Source | None = None, digest: str = "") -> None:
        """`blobs`: the directory that gets what is fetched. Without `origin`, the store has the image `digest`."""
        self._store, self._blobs, self._origin, self._digest = store, blobs, origin, digest
        blobs.mkdir(parents=True, exist_ok=True)

    def manifest(self, tag: str) -> Descriptor:
        return Descriptor(digest=self._digest) if self._origin is None else self._origin.manifest(tag)

    def document(self, descriptor: Descriptor) -> bytes:
        path = self.blob(descriptor)
        if path.stat().st_size > documents.MOST_BYTES:
            raise TaskError(f"{descriptor.digest} has more than {documents.MOST_BYTES >> 20} MiB")
        return path.read_bytes()

    def blob(self, descriptor: Descriptor) -> Path:
        """The file of a blob, from the nearest place that has it."""
        size = self._store.head(_key(descriptor.digest))
        if size is not None:
            return self._fetch(descriptor.digest, size)
        if self._origin is None:
            raise TaskError(f"{descriptor.digest} is not in {self._store.url}", hint="`rollmill images push` writes it")
        path = self._origin.blob(descriptor)
        with path.open("rb") as file, contextlib.suppress(ObjectExists):  # another host was faster
            self._store.create_from(_key(descriptor.digest), file)
        return path

    def finish(self, reference: Reference, digest: str) -> None:
        """Write what the store still lacks, because this host had it already, and then the name."""
        if self._origin is None:
            return
        manifest = documents.read(Manifest, self.document(Descriptor(digest=digest)), f"the manifest {digest}")
        for each in (manifest.config, *manifest.layers):
            if self._store.head(_key(each.digest)) is None:
                self.blob(each)
        self._store.put(_name(reference), digest.encode())

    def _fetch(self, digest: str, size: int) -> Path:
        path = self._blobs / digest.removeprefix("sha256:")
        part = path.with_name(f".{path.name}.part")
        with alone(self._blobs, path.name):  # another process may fetch the same
            if path.exists():
                return path
            found = hashlib.sha256()
            with part.open("wb") as file:
                for start in range(0, size, _CHUNK):
                    data = self._store.get_range(_key(digest), start, min(_CHUNK, size - start))
                    found.update(data)
                    file.write(data)
            if found.hexdigest() != path.name:
                part.unlink()
                raise TaskError(
                    f"{self._store.url} has sha256:{found.hexdigest()} as {digest}",
                    hint=f"delete {_key(digest)} there; the next host writes it again",
                )
            part.rename(path)
        return path


def stored_digest(store: Objects, reference: Reference) -> str | None:
    """The digest of an image that a store has whole."""
    if reference.digest:
        return reference.digest if store.head(_name(reference)) is not None else None
    try:
        found = store.get(_name(reference)).decode("ascii", "replace")
    except ObjectMissing:
        return None
    if not re.fullmatch(documents.DIGEST, found):
        raise TaskError(f"{store.url}: {_name(reference)} is damaged", hint="delete it; the next host writes it again")
    return found


def _name(reference: Reference) -> str:
    return f"images/oci/names/{hashlib.sha256(reference.text.encode()).hexdigest()}"


def _key(digest: str) -> str:
    return f"images/oci/blobs/{digest.removeprefix('sha256:')}"
