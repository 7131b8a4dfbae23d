"""Files that are elsewhere, as files of this machine: of a dataset of a hub, or of an object store.

hf://datasets/OWNER/NAME[@REVISION][/FILE]    storage/hub.py
s3://BUCKET/PATH, gs://…, az://…              fetched once into the user's cache, and again when it has changed
"""

from __future__ import annotations

import hashlib
import os
import uuid
from pathlib import Path

from rollmill.errors import StorageError
from rollmill.storage.hub import SCHEME, dataset_path
from rollmill.storage.objects import Objects

_PART = 32 << 20  # bytes of one request


def is_elsewhere(path: str) -> bool:
    return "://" in path


def local_path(path: str) -> str:
    """The path itself, or where the file is now."""
    if not is_elsewhere(path):
        return path
    return dataset_path(path) if path.startswith(SCHEME) else str(_fetched(path))


def _fetched(url: str) -> Path:
    prefix, _, name = url.rpartition("/")
    objects = Objects.open(prefix)
    found = objects.stat(name)
    if found is None:
        raise StorageError(f"there is no object {url}", hint="the path names one file; check bucket and region too")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollmill" / "fetched"
    version = hashlib.sha256(f"{url} {found}".encode()).hexdigest()[:32]
    path = cache / version / name
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{uuid.uuid4().hex}")  # several processes may fetch it
    try:
        with part.open("xb") as file:
            for start in range(0, found.bytes, _PART):
                file.write(objects.get_range(name, start, min(_PART, found.bytes - start)))
        if objects.stat(name) != found:
            raise StorageError(f"{url} was changed while it was fetched", hint="try again")
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)
    return path
