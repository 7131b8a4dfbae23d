"""Machine images: the contents of the work directory before the task's own files are written over them.

`host-python` is built in: an empty work directory on the host's userland. Any other name is a directory of that name
below the configured images directory; its regular files are the start of the work directory.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from rollmill.errors import TaskError

BUILT_IN = "host-python"
_MAX_IMAGE_BYTES = 1 << 26


def load_image(name: str, directory: str | None) -> Mapping[str, bytes]:
    """The files of an image by relative path; TaskError naming the known images if there is none of that name."""
    if name == BUILT_IN:
        return {}
    path = Path(directory, name) if directory is not None else None
    if path is None or name != path.name or not path.is_dir():
        known = sorted({BUILT_IN, *_names(directory)})
        raise TaskError(
            f"machine image {name!r} does not exist",
            hint=f"known images: {', '.join(known)}; others are directories below `machine.images`",
        )
    return _load(path, path.stat().st_mtime_ns)


def _names(directory: str | None) -> list[str]:
    if directory is None or not Path(directory).is_dir():
        return []
    return [entry.name for entry in Path(directory).iterdir() if entry.is_dir()]


@functools.lru_cache(maxsize=64)
def _load(path: Path, _changed: int) -> Mapping[str, bytes]:
    files = {}
    size = 0
    for folder, _, names in os.walk(path):
        for name in sorted(names):
            file = Path(folder, name)
            if file.is_symlink() or not file.is_file():
                continue
            size += file.stat().st_size
            if size > _MAX_IMAGE_BYTES:
                raise TaskError(f"machine image {path} is larger than {_MAX_IMAGE_BYTES >> 20} MiB")
            files[str(file.relative_to(path))] = file.read_bytes()
    return MappingProxyType(files)
