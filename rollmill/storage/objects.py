"""Objects: one small interface to every object store, synchronous, keys as '/'-separated relative strings.

    directory path, file://   files under a folder, each write durable before the call returns (directory_store.py)
    s3://, gs://, az://       through obstore; credentials, region and endpoint come from the environment (below)
    memory://                 through obstore; private to this object, for tests
    http://, https://         read-only view of another region's store (http.py; object_server.py answers)

Environment of an s3:// store: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION. For a server other than Amazon's
also AWS_ENDPOINT_URL=http://host:port, and AWS_ALLOW_HTTP=true if that is not https.

Everything above rests on `create`: it is atomic and refused if the key exists, on every store. Overwriting
compare-and-swap is not available on every store, so nothing uses it. If an answer is lost and the request is retried,
a refused `create` may have met its own first attempt: callers compare the content before they give up.

A request to a store that fails or hangs is retried for `patience` seconds, then the call raises StorageError.
"""

from __future__ import annotations

import builtins
import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from rollmill.errors import ObjectExists, ObjectMissing, ObjectTruncated, StorageError
from rollmill.storage.backend import PATIENCE_SECONDS, Backend, Stat

# Characters that are safe on every store and file system. A leading dot is reserved for the stores' own files.
_SEGMENT = re.compile(r"[A-Za-z0-9_=@+:,-][A-Za-z0-9._=@+:,-]*")
_LONGEST_SEGMENT = 200
_LONGEST_KEY = 900
_LARGE_OBJECT = 32 << 20  # larger objects are written from a file
_LARGE_WRITE = 1 << 20  # larger writes get a longer timeout
_LARGE_WRITE_SECONDS = 60.0
_SLOWEST_GET_SECONDS = 600.0  # as long as bytes keep arriving
_SERVICES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
_CLIENT_SETTINGS = ("allow_http", "allow_invalid_certificates", "proxy_url", "proxy_excludes")
_PAST_THE_END = ("416 Range Not Satisfiable", "Invalid range")  # replies to a range that starts at the end


def store_of_run(store: str, run_id: str) -> str:
    """The URL of a run's own objects in a store that runs share."""
    return f"{store.rstrip('/')}/{run_id}"


class Objects:
    """An object store. `ObjectMissing`, `ObjectExists` and `StorageError` are the only errors it raises."""

    def __init__(self, backend: Backend, url: str) -> None:
        self._backend = backend
        self.url = url

    @staticmethod
    def open(
        url: str | Path,
        *,
        token: str | None = None,
        options: Mapping[str, str] | None = None,
        patience: float = PATIENCE_SECONDS,
    ) -> Objects:
        """Open a store by path or URL; a missing directory is created. `token` is for an http(s):// store; `options`
        (endpoint, access_key_id …) override the environment of an s3://, gs:// or az:// store."""
        text = str(url)
        scheme = text.partition("://")[0] if "://" in text else "file"
        if scheme in ("http", "https"):
            from rollmill.storage.http import HttpBackend

            return Objects(HttpBackend(text, token, patience), text)
        if scheme == "file":
            from rollmill.storage.directory_store import DirectoryBackend

            path = Path(unquote(urlsplit(text).path) if text.startswith("file://") else text)
            return Objects(DirectoryBackend(path), str(path))
        return Objects(_ObstoreBackend(text, options or {}, patience), text)

    def __repr__(self) -> str:
        return f"Objects({self.url!r})"

    def get(self, key: str) -> bytes:
        return self._backend.get(_valid(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`, in one request. Raises ObjectTruncated if the object is shorter."""
        if start < 0 or length < 0:
            raise StorageError(f"range {start}+{length} of {key!r} is negative")
        data = self._backend.get_range(_valid(key), start, length)
        if len(data) != length:
            raise ObjectTruncated(
                f"{key!r} in {self.url} is truncated: bytes {start} to {start + length} were asked for, "
                f"{len(data)} of them exist",
                hint="restore the object from another region or a backup",
            )
        return data

    def put(self, key: str, data: bytes) -> None:
        """Write or overwrite."""
        self._backend.put(_valid(key), data)

    def create(self, key: str, data: bytes) -> None:
        """Write a key that must not exist yet; readers see all of it or nothing. Raises ObjectExists if it exists."""
        self._backend.create(_valid(key), data)

    def create_from(self, key: str, file: IO[bytes]) -> None:
        """As `create`, with the content of a file from its position on. It may be larger than memory.

        On stores other than a directory a large object is refused if it exists, but two writers at the same time may
        both succeed: a multipart upload has no create-only mode on every store.
        """
        head = file.read(_LARGE_OBJECT)
        if len(head) < _LARGE_OBJECT:
            self.create(key, head)
            return
        file.seek(-len(head), io.SEEK_CUR)
        self._backend.create_from(_valid(key), file)

    def head(self, key: str) -> int | None:
        """Size in bytes; None if there is no such object."""
        found = self.stat(key)
        return found.bytes if found else None

    def modified(self, key: str) -> float | None:
        """When the object was written, by the store's clock, in seconds since the epoch; None if there is none.

        Stores round to seconds. Compare it with the time of another object, never with this machine's clock.
        """
        found = self.stat(key)
        return found.modified if found else None

    def stat(self, key: str) -> Stat | None:
        return self._backend.stat(_valid(key))

    def wait_for(self, key: str, seconds: float) -> bytes | None:
        """The object as soon as it exists; None if it does not after `seconds`. A store may give up earlier."""
        return self._backend.wait_for(_valid(key), seconds)

    def list(self, prefix: str = "") -> builtins.list[str]:
        """All keys under a folder, at any depth, sorted. `weights/a` does not match `weights/ab`."""
        return sorted(self._backend.list(_valid_folder(prefix)))

    def stats(self, prefix: str = "") -> dict[str, Stat]:
        """The same keys with size and time. Stores tell them in their listing: no request per object."""
        return self._backend.stats(_valid_folder(prefix))

    def folders(self, prefix: str = "") -> builtins.list[str]:
        """Names of the folders directly under a folder, sorted."""
        return sorted(self._backend.folders(_valid_folder(prefix)))

    def delete(self, key: str) -> None:
        """Remove an object. It is not an error if there is none."""
        self.delete_all([key])

    def delete_all(self, keys: Iterable[str]) -> None:
        """Remove objects, in any order. It is not an error if one is not there. S3 removes a thousand per request."""
        found = [_valid(key) for key in keys]
        if found:
            self._backend.delete(found)


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


class _ObstoreBackend(Backend):
    """S3, GCS, Azure and memory through obstore, which retries by itself."""

    look_s = 1.0  # each request costs money

    def __init__(self, url: str, options: Mapping[str, str], patience: float) -> None:
        from obstore.exceptions import BaseError
        from obstore.store import MemoryStore

        self._url = url
        self._store: Any
        try:
            if url.startswith("memory:"):
                self._store = self._for_large_writes = MemoryStore()
            else:
                self._store = _connect(url, options, patience / 3, patience)
                # obstore's timeout runs from the first byte of the request to the first byte of the answer
                self._for_large_writes = _connect(url, options, _LARGE_WRITE_SECONDS, patience)
        except (BaseError, ValueError) as error:
            raise StorageError(
                f"cannot open the object store {url!r}: {_first_lines(error)}",
                hint="a directory, memory://, s3://bucket/prefix, gs://…, az://… or http://host:port",
            ) from None

    def get(self, key: str) -> bytes:
        return self._call(key, lambda: bytes(self._store.get(key).bytes()))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if length == 0:
            return b""
        try:
            return self._call(key, lambda: bytes(self._store.get_range(key, start=start, length=length)))
        except StorageError as error:
            if any(sign in error.message for sign in _PAST_THE_END):
                return b""
            raise

    def put(self, key: str, data: bytes) -> None:
        self._call(key, lambda: self._writer(data).put(key, data))

    def create(self, key: str, data: bytes) -> None:
        # One conditional request: a multipart upload has no create-only mode on every store.
        self._call(key, lambda: self._writer(data).put(key, data, mode="create", use_multipart=False))

    def create_from(self, key: str, file: IO[bytes]) -> None:
        if self.stat(key) is not None:
            raise ObjectExists(f"{key!r} in {self._url} already exists")
        self._call(key, lambda: self._for_large_writes.put(key, file, use_multipart=True))

    def stat(self, key: str) -> Stat | None:
        try:
            found = self._call(key, lambda: self._store.head(key))
        except ObjectMissing:
            return None
        return _stat(found)

    def list(self, prefix: str) -> builtins.list[str]:
        return [*self.stats(prefix)]

    def stats(self, prefix: str) -> dict[str, Stat]:
        def found() -> dict[str, Stat]:
            pages = self._store.list(prefix or None, chunk_size=1000)
            return {meta["path"]: _stat(meta) for page in pages for meta in page}

        return self._call(prefix, found)

    def folders(self, prefix: str) -> builtins.list[str]:
        found = self._call(prefix, lambda: self._store.list_with_delimiter(prefix or None)["common_prefixes"])
        return [folder.rstrip("/").rpartition("/")[2] for folder in found]

    def delete(self, keys: Sequence[str]) -> None:
        try:
            self._call(keys[0], lambda: self._store.delete(keys[0] if len(keys) == 1 else [*keys]))
        except ObjectMissing:  # stores without bulk requests stop at it
            half = len(keys) // 2
            for some in (keys[:half], keys[half:]) if half else ():
                self.delete(some)

    def _writer(self, data: bytes) -> Any:
        return self._store if len(data) <= _LARGE_WRITE else self._for_large_writes

    def _call(self, key: str, operation: Any) -> Any:
        from obstore.exceptions import AlreadyExistsError, BaseError

        try:
            return operation()
        except FileNotFoundError:
            raise ObjectMissing(f"no object {key!r} in {self._url}") from None
        except AlreadyExistsError:
            raise ObjectExists(f"{key!r} in {self._url} already exists") from None
        except (BaseError, OSError) as error:
            raise StorageError(
                f"{key!r} in {self._url}: {_first_lines(error)}",
                hint="check that the bucket is reachable and the credentials allow this; the call can be repeated",
            ) from error


def _connect(url: str, options: Mapping[str, str], answer_seconds: float, patience: float) -> Any:
    """A client that waits `answer_seconds` for an answer and begins its last attempt after two thirds of `patience`."""
    from obstore.store import from_url

    client: Any = {
        "connect_timeout": timedelta(seconds=patience / 3),
        "read_timeout": timedelta(seconds=answer_seconds),
        "timeout": timedelta(seconds=_SLOWEST_GET_SECONDS),
    }
    pauses = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=2), "base": 2}
    retries: Any = {"max_retries": 20, "retry_timeout": timedelta(seconds=patience * 2 / 3), "backoff": pauses}
    config: Any = dict(options)
    if config.get("endpoint", "").startswith("http://"):
        client["allow_http"] = True  # the endpoint was given explicitly
    service = _SERVICES.get(urlsplit(url).scheme, "")
    for name in _CLIENT_SETTINGS:  # obstore reads these from the environment only if it is given no client options
        if value := os.environ.get(f"{service}_{name.upper()}"):
            client[name] = value.lower() == "true" if name.startswith("allow_") else value
    return from_url(url, config=config, client_options=client, retry_config=retries)


def _stat(meta: Mapping[str, Any]) -> Stat:
    return Stat(meta["size"], meta["last_modified"].timestamp())


def _first_lines(error: Exception) -> str:
    """The message without the debug output that obstore appends."""
    return str(error).partition("\n\nDebug source")[0]
