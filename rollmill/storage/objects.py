"""Objects: one small interface to every object store, synchronous, keys as '/'-separated relative strings.

    directory path, file://   files under a folder, each write durable before the call returns (storage/directory.py)
    s3://, gs://, az://       through obstore; credentials come from the environment
    memory://                 through obstore; private to this object, for tests
    http://, https://         read-only view of another region's store (storage/http.py)

`create` is the one primitive everything above rests on: it is atomic and refused when the key is taken, on every
store. Overwriting compare-and-swap is not, so nothing uses it.
"""

from __future__ import annotations

import builtins
import re
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from rollmill.errors import ObjectExists, ObjectMissing, StorageError

# Characters that mean the same on every store and file system. A leading dot is kept for the stores' own files.
_SEGMENT = re.compile(r"[A-Za-z0-9_=@+:,-][A-Za-z0-9._=@+:,-]*")
_LONGEST_SEGMENT = 200
_LONGEST_KEY = 900


class Backend(Protocol):
    """What a store must provide. Keys are valid when they arrive here."""

    def get(self, key: str) -> bytes: ...
    def get_range(self, key: str, start: int, length: int) -> bytes: ...
    def put(self, key: str, data: bytes) -> None: ...
    def create(self, key: str, data: bytes) -> None: ...
    def head(self, key: str) -> int | None: ...
    def list(self, prefix: str) -> builtins.list[str]: ...
    def folders(self, prefix: str) -> builtins.list[str]: ...
    def delete(self, key: str) -> None: ...


class Objects:
    """An object store. `ObjectMissing`, `ObjectExists` and `StorageError` are the only errors it raises."""

    def __init__(self, backend: Backend, url: str) -> None:
        self._backend = backend
        self.url = url

    @staticmethod
    def open(url: str | Path, *, token: str | None = None) -> Objects:
        """Open a store by path or URL; a directory is made if missing. `token` is for an http(s):// store that asks."""
        text = str(url)
        scheme = text.partition("://")[0] if "://" in text else "file"
        if scheme in ("http", "https"):
            from rollmill.storage.http import HttpBackend

            return Objects(HttpBackend(text, token), text)
        if scheme == "file":
            from rollmill.storage.directory import DirectoryBackend

            path = Path(unquote(urlsplit(text).path) if text.startswith("file://") else text)
            return Objects(DirectoryBackend(path), str(path))
        return Objects(_ObstoreBackend(text), text)

    def __repr__(self) -> str:
        return f"Objects({self.url!r})"

    def get(self, key: str) -> bytes:
        return self._backend.get(_valid(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`; StorageError when the object is shorter than that."""
        if start < 0 or length < 0:
            raise StorageError(f"range {start}+{length} of {key!r} is negative")
        data = self._backend.get_range(_valid(key), start, length)
        if len(data) != length:
            raise StorageError(
                f"{key!r} in {self.url} is truncated: bytes {start} to {start + length} were asked for, "
                f"{len(data)} of them exist",
                hint="restore the object from another region or a backup",
            )
        return data

    def put(self, key: str, data: bytes) -> None:
        """Write or overwrite."""
        self._backend.put(_valid(key), data)

    def create(self, key: str, data: bytes) -> None:
        """Write a key that must not exist yet; readers see all of it or nothing. ObjectExists when it is taken."""
        self._backend.create(_valid(key), data)

    def head(self, key: str) -> int | None:
        """Size in bytes; None when there is no such object."""
        return self._backend.head(_valid(key))

    def list(self, prefix: str = "") -> builtins.list[str]:
        """All keys under a folder, at any depth, sorted. `weights/a` does not match `weights/ab`."""
        return sorted(self._backend.list(_valid_folder(prefix)))

    def folders(self, prefix: str = "") -> builtins.list[str]:
        """Names of the folders directly under a folder, sorted."""
        return sorted(self._backend.folders(_valid_folder(prefix)))

    def delete(self, key: str) -> None:
        """Remove an object; removing what is not there is not an error."""
        self._backend.delete(_valid(key))


def _valid(key: str) -> str:
    segments = key.split("/")
    if len(key) > _LONGEST_KEY or not all(_SEGMENT.fullmatch(s) and len(s) <= _LONGEST_SEGMENT for s in segments):
        raise StorageError(
            f"{key[:_LONGEST_KEY]!r} is not a valid object key",
            hint="a key is relative: '/'-separated names of letters, digits and ._=@+:,- that do not start with a dot",
        )
    return key


def _valid_folder(prefix: str) -> str:
    prefix = prefix.removesuffix("/")
    return _valid(prefix) if prefix else ""


class _ObstoreBackend:
    """S3, GCS, Azure and memory through obstore."""

    def __init__(self, url: str) -> None:
        from obstore.exceptions import BaseError
        from obstore.store import MemoryStore, from_url

        self._url = url
        self._store: Any
        try:
            self._store = MemoryStore() if url.startswith("memory:") else from_url(url)
        except (BaseError, ValueError) as error:
            raise StorageError(
                f"cannot open the object store {url!r}: {error}",
                hint="a directory, memory://, s3://bucket/prefix, gs://…, az://… or http://host:port",
            ) from None

    def get(self, key: str) -> bytes:
        return self._call(key, lambda: bytes(self._store.get(key).bytes()))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        size = self.head(key)
        if size is None:
            raise _missing(key, self._url)
        length = min(length, max(size - start, 0))
        return self._call(key, lambda: bytes(self._store.get_range(key, start=start, length=length))) if length else b""

    def put(self, key: str, data: bytes) -> None:
        self._call(key, lambda: self._store.put(key, data))

    def create(self, key: str, data: bytes) -> None:
        # One conditional request: a multipart upload has no create-only mode on every store.
        self._call(key, lambda: self._store.put(key, data, mode="create", use_multipart=False))

    def head(self, key: str) -> int | None:
        try:
            return self._call(key, lambda: self._store.head(key)["size"])
        except ObjectMissing:
            return None

    def list(self, prefix: str) -> builtins.list[str]:
        def keys() -> builtins.list[str]:
            return [meta["path"] for page in self._store.list(prefix or None, chunk_size=1000) for meta in page]

        return self._call(prefix, keys)

    def folders(self, prefix: str) -> builtins.list[str]:
        found = self._call(prefix, lambda: self._store.list_with_delimiter(prefix or None)["common_prefixes"])
        return [folder.rstrip("/").rpartition("/")[2] for folder in found]

    def delete(self, key: str) -> None:
        try:
            self._call(key, lambda: self._store.delete(key))
        except ObjectMissing:
            return

    def _call(self, key: str, operation: Any) -> Any:
        from obstore.exceptions import AlreadyExistsError, BaseError

        try:
            return operation()
        except FileNotFoundError:
            raise _missing(key, self._url) from None
        except AlreadyExistsError:
            raise ObjectExists(f"{key!r} in {self._url} is already there") from None
        except (BaseError, OSError) as error:
            raise StorageError(
                f"{key!r} in {self._url}: {error}",
                hint="check that the bucket is reachable and the credentials allow this; the call can be repeated",
            ) from error


def _missing(key: str, url: str) -> ObjectMissing:
    return ObjectMissing(f"no object {key!r} in {url}")
