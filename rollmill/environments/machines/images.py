"""Machine images: what is in a machine before the task's own files are written.

    host-python           built in: an empty work directory on the programs of this host
    a folder              below the directory that `machine.images` names: its files are the start of the work directory
    a built image         `rollmill images build NAME`: files of the work directory, Python packages, or both

Built images are kept in one place per user, by content: the same content has the same digest, and a name points to one.

    names/NAME.json              {"digest": …}
    objects/DIGEST/image.json    what it was made of
    objects/DIGEST/work/         copied into the work directory of each machine
    objects/DIGEST/packages/     mounted read-only; Python imports from it, and its bin/ is on PATH
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import stat
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from pydantic import BaseModel, ValidationError

from rollmill.errors import TaskError

BUILT_IN = "host-python"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ImageRecord(BaseModel):
    """image.json: what an image was made of."""

    digest: str
    python: str = ""  # version and platform that the packages are for; "": it has none
    requirements: list[str] = []
    bytes: int = 0
    fidelity: dict[str, float] = {}  # by kind of machine: how far it is from an ordinary computer, 0 to 1


@dataclass(frozen=True)
class Image:
    name: str
    digest: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)  # by path in the work directory
    packages: str | None = None  # a directory of this host

    @property
    def reference(self) -> str:
        """What records name: `NAME@DIGEST`. The built-in image is whatever the host has."""
        return f"{self.name}@{self.digest}" if self.digest else self.name


def images_directory() -> Path:
    """Where built images are: $ROLLMILL_IMAGES, or below the user's cache directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("ROLLMILL_IMAGES") or cache / "rollmill" / "images")


def python_platform() -> str:
    """Packages for one of these do not work on another."""
    return f"{sys.version_info.major}.{sys.version_info.minor} {sysconfig.get_platform()}"


def load_image(name: str, directory: str | None, *, max_bytes: int = 1 << 26) -> Image:
    """The image of that name. TaskError if there is none, naming those there are; if it is damaged, or too large."""
    if name == BUILT_IN:
        return Image(name)
    folder = Path(directory, name) if directory is not None else None
    if folder is not None and name == folder.name and folder.is_dir():
        files = _load(folder, folder.stat().st_mtime_ns, max_bytes)
        return Image(name, _digest_of(folder, folder.stat().st_mtime_ns, max_bytes), files)
    record = find_record(name)
    if record is None:
        known = sorted({BUILT_IN, *_folders(directory), *built_names()})
        raise TaskError(
            f"machine image {name!r} does not exist",
            hint=f"`rollmill images build {name} …` makes it; known images: {', '.join(known)}",
        )
    if record.python not in ("", python_platform()):
        raise TaskError(
            f"machine image {name!r} is for Python {record.python}, and this is {python_platform()}",
            hint=f"`rollmill images build {name} --requirements …` makes it again",
        )
    place = images_directory() / "objects" / record.digest
    work, packages = place / "work", place / "packages"
    files = _load(work, work.stat().st_mtime_ns, max_bytes) if work.is_dir() else {}
    return Image(name, record.digest, files, str(packages) if packages.is_dir() else None)


def built_names() -> list[str]:
    return sorted(path.stem for path in (images_directory() / "names").glob("*.json"))


def find_record(name: str) -> ImageRecord | None:
    """The record of a built image; None if there is no such name. TaskError if the image behind the name is gone."""
    if not NAME.fullmatch(name):
        return None
    root = images_directory()
    try:
        pointer = ImageRecord.model_validate_json((root / "names" / f"{name}.json").read_bytes())
    except (OSError, ValidationError):
        return None
    try:
        return ImageRecord.model_validate_json((root / "objects" / pointer.digest / "image.json").read_bytes())
    except (OSError, ValidationError):
        raise TaskError(
            f"machine image {name!r} is damaged: its content {pointer.digest} is gone from {root}",
            hint=f"`rollmill images build {name} …` makes it again",
        ) from None


class Entry(NamedTuple):
    path: str
    content: bytes
    executable: bool


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


def _folders(directory: str | None) -> list[str]:
    if directory is None or not Path(directory).is_dir():
        return []
    return [entry.name for entry in Path(directory).iterdir() if entry.is_dir()]


@functools.lru_cache(maxsize=64)
def _load(path: Path, _changed: int, max_bytes: int) -> Mapping[str, bytes]:
    files: dict[str, bytes] = {}
    size = 0
    for entry in entries(path):
        size += len(entry.content)
        if size > max_bytes:
            raise TaskError(
                f"machine image {path} has more than {max_bytes >> 20} MiB of files for the work directory",
                hint="`machine.image_mb` is the limit",
            )
        files[entry.path] = entry.content
    return MappingProxyType(files)


@functools.lru_cache(maxsize=64)
def _digest_of(path: Path, changed: int, max_bytes: int) -> str:
    files = _load(path, changed, max_bytes)
    parts = [f"{path}\0{hashlib.sha256(content).hexdigest()}\n" for path, content in sorted(files.items())]
    return hashlib.sha256("".join(parts).encode("utf-8", "surrogateescape")).hexdigest()
