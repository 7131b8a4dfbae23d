"""Machine images: what is in a machine before the task's own files are written.

    host-python           built in: an empty work directory on the programs of this host
    a folder              below the directory that `machine.images` names: its files are the start of the work directory
    a built image         `rollmill images build NAME`: layers for the work directory, Python packages, or both
    oci:…                 an OCI image: its whole file system is the machine's (rollmill/machines/oci)

Built images are kept in one place per user, by content: the same content has the same digest, and a name points to one.
Images share the layers that they have in common (layers.py).

    names/NAME.json              {"digest": …}
    objects/DIGEST/image.json    its layers, and what they were made of
    layers/DIGEST/               place "packages": mounted read-only; Python imports from it, and its bin/ is on PATH
                                 place "work": copied into the work directory of each machine, later layers over earlier
                                 place "root": an operating system instead of this host's programs (os_layer.py)
                                 place "services": the files of its services (services.py)

A name that is not here is looked for in the store that `machine.image_store` names, and its layers are fetched.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
import platform
import re
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from rollmill.errors import ObjectMissing, TaskError
from rollmill.machines.agent_machine import AgentMachineConfig
from rollmill.machines.guest.image_root import ImageRoot
from rollmill.machines.images import layers
from rollmill.machines.images.os_layer import architecture_of, python_version, unpacked_root
from rollmill.machines.images.services import STATE, Service
from rollmill.machines.oci.image_reference import is_oci
from rollmill.machines.oci.kept_images import Kept
from rollmill.storage.objects import Objects

BUILT_IN = "host-python"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class LayerRecord(BaseModel):
    place: Literal["root", "packages", "work", "services"]
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int = 0


class ImageRecord(BaseModel):
    """image.json: what an image was made of."""

    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    python: str = ""  # version and platform that the packages are for; "": it has none
    requirements: list[str] = []
    bytes: int = 0
    layers: list[LayerRecord] = []
    commit: str = ""  # of the repository that it holds
    verified: list[str] = []  # commands that passed in a machine of it
    services: list[Service] = []  # that run in every machine of it
    fidelity: dict[str, float] = {}  # by kind of machine: how far it is from an ordinary computer, 0 to 1


@dataclass(frozen=True)
class Image:
    name: str
    digest: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)  # by path in the work directory
    packages: str | None = None  # a directory of this host
    services: tuple[Service, ...] = ()
    root: str | None = None  # directory of this host: an operating system instead of this host's programs
    state: str | None = None  # file of this host: what the services start with
    architecture: str | None = None  # of the operating system, as `uname -m` prints it; None: this host's, or unknown
    whole: ImageRoot | None = None  # an OCI image that is all that its machines see

    def services_state(self) -> bytes:
        """What the services start with: a tar of their directories."""
        assert self.state is not None
        return _read_state(self.state)

    @property
    def reference(self) -> str:
        """What records name: `NAME@DIGEST`. The built-in image is whatever the host has."""
        given = self.name.partition("@")[0] if self.whole else self.name
        return f"{given}@{self.digest}" if self.digest else given


def images_directory() -> Path:
    """Where built images are: $ROLLMILL_IMAGES, or below the user's cache directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("ROLLMILL_IMAGES") or cache / "rollmill" / "images").absolute()  # mounted from elsewhere


def python_platform(root: str | None = None) -> str:
    """Packages for one of these do not work on another. That of this host; or of an operating system, if it is of
    another architecture."""
    architecture = None if root is None else architecture_of(Path(root))
    if root is None or architecture in (None, platform.machine()):
        return f"{sys.version_info.major}.{sys.version_info.minor} {sysconfig.get_platform()}"
    version = python_version(Path(root)) or (0, 0)
    return f"{version[0]}.{version[1]} linux-{architecture}"


_loaded: dict[str, tuple[str, Image]] = {}  # OCI images that this process has loaded, and the state they had


async def obtain_image(name: str, config: AgentMachineConfig) -> Image:
    """The image of that name, fetched from its registry or from the store of images if it is not on this host. Errors
    as `load_image`."""
    if is_oci(name):
        state, known = _loaded.get(name, (None, None))
        if known is not None and state == Kept(images_directory()).state(name):
            return known
        return await asyncio.to_thread(load_oci, name, config.image_store)
    folder = config.images is not None and Path(config.images, name).is_dir()
    if config.image_store is not None and name != BUILT_IN and not folder and find_record(name) is None:
        await asyncio.to_thread(_fetch_once, name, config.image_store)
    return load_image(name, config.images, max_bytes=config.image_mb << 20)


def load_oci(name: str, store: str | None = None) -> Image:
    """An OCI image, fetched and unpacked if it is not on this host. TaskError: it cannot be had."""
    kept = Kept(images_directory(), store)
    found = kept.obtain(name)
    image = Image(name, found.digest, whole=found.root(kept.trees))
    _loaded[name] = (kept.state(name), image)
    return image


def hold_images() -> int:
    """An open file: while it is open, no OCI image is removed from this host."""
    return Kept(images_directory()).hold()


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
    loaded = _load_layers(name, record, max_bytes)
    if record.python not in ("", runs := python_platform(loaded.root)):
        raise TaskError(
            f"machine image {name!r} is for Python {record.python}, and this is {runs}",
            hint=f"`rollmill images build {name} --requirements …` makes it again",
        )
    return loaded


def _load_layers(name: str, record: ImageRecord, max_bytes: int) -> Image:
    files: dict[str, bytes] = {}
    packages = state = root = None
    for layer in record.layers:
        place = images_directory() / "layers" / layer.digest
        if not place.is_dir():
            raise _damaged(name, layer.digest)
        if layer.place == "packages":
            packages = str(place)
        elif layer.place == "root":
            root = unpacked_root(place, images_directory())
        elif layer.place == "services":
            state = str(place / STATE)
        else:
            files |= _load(place, place.stat().st_mtime_ns, max_bytes)
    if sum(map(len, files.values())) > max_bytes:
        raise _too_large(name, max_bytes)
    services = tuple(record.services) if state is not None else ()
    architecture = None if root is None else architecture_of(Path(root))
    return Image(name, record.digest, MappingProxyType(files), packages, services, root, state, architecture)


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
        raise _damaged(name, pointer.digest) from None


def fetch_image(name: str, url: str, *, trust: bool = False) -> ImageRecord | None:
    """Get an image from a store, with those of its layers that are not here. None if the store has no such name.

    An operating system that no image of this host has is refused unless `trust`: the machine host runs its C library.
    """
    if not NAME.fullmatch(name):
        return None
    store, root = Objects.open(url), images_directory()
    try:
        record = ImageRecord.model_validate_json(store.get(f"images/names/{name}.json"))
    except ObjectMissing:
        return None
    except ValidationError as error:
        raise TaskError(f"machine image {name!r} of {url} is damaged: {error}") from None
    if not trust and any(layer.place == "root" and layer.digest not in _known_roots() for layer in record.layers):
        raise TaskError(
            f"machine image {name!r} of {url} has an operating system that was not built here: its C library would run "
            "outside machines",
            hint=f"`rollmill images pull {name} {url} --trust` gets it, if you trust everyone who can write there",
        )
    for layer in record.layers:
        layers.fetch(layer.digest, root, store)
    if digest_of(record.layers, record.services) != record.digest:
        raise TaskError(f"machine image {name!r} of {url} does not have the layers that its digest stands for")
    keep_record(name, record)
    return record


def _known_roots() -> set[str]:
    """Operating systems of images that were built here, or fetched because the user trusts their store."""
    known = set()
    for path in (images_directory() / "objects").glob("*/image.json"):
        with contextlib.suppress(OSError, ValidationError):
            record = ImageRecord.model_validate_json(path.read_bytes())
            known |= {layer.digest for layer in record.layers if layer.place == "root"}
    return known


_fetching = threading.Lock()  # the machines of a group ask for the same image at once


def _fetch_once(name: str, url: str) -> None:
    with _fetching:
        if find_record(name) is None:
            fetch_image(name, url)


def push_image(name: str, url: str) -> list[str]:
    """Write an image to a store. Returns the layers that the store did not have."""
    record = find_record(name)
    if record is None:
        raise TaskError(f"there is no built image {name!r}", hint=f"built here: {', '.join(built_names()) or 'none'}")
    store = Objects.open(url)
    sent = [layer.digest for layer in record.layers if layers.push(layer.digest, images_directory(), store)]
    store.put(f"images/names/{name}.json", record.model_dump_json().encode())  # last: a name leads to whole images
    return sent


def digest_of(parts: Sequence[LayerRecord], services: Sequence[Service] = ()) -> str:
    """The digest of an image: of its layers, and of how its services are run."""
    facts = "".join(f"{layer.place} {layer.digest}\n" for layer in parts)
    facts += "".join(f"service {service.model_dump_json()}\n" for service in services)
    return hashlib.sha256(facts.encode()).hexdigest()


def keep_record(name: str, record: ImageRecord) -> None:
    """Write the record of an image and let the name point to it."""
    root = images_directory()
    (root / "objects" / record.digest).mkdir(parents=True, exist_ok=True)
    (root / "names").mkdir(exist_ok=True)
    for path in (root / "objects" / record.digest / "image.json", root / "names" / f"{name}.json"):
        unfinished = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        unfinished.write_text(record.model_dump_json(indent=1))
        os.replace(unfinished, path)  # there whole or not at all


def _damaged(name: str, digest: str) -> TaskError:
    return TaskError(
        f"machine image {name!r} is damaged: its content {digest} is gone from {images_directory()}",
        hint=f"`rollmill images build {name} …` makes it again",
    )


def _too_large(name: str, max_bytes: int) -> TaskError:
    return TaskError(
        f"machine image {name} has more than {max_bytes >> 20} MiB of files for the work directory",
        hint="`machine.image_mb` is the limit",
    )


def _folders(directory: str | None) -> list[str]:
    if directory is None or not Path(directory).is_dir():
        return []
    return [entry.name for entry in Path(directory).iterdir() if entry.is_dir()]


@functools.lru_cache(maxsize=4)
def _read_state(path: str) -> bytes:
    return Path(path).read_bytes()  # a layer never changes


@functools.lru_cache(maxsize=64)
def _load(path: Path, _changed: int, max_bytes: int) -> Mapping[str, bytes]:
    files: dict[str, bytes] = {}
    size = 0
    for entry in layers.entries(path):
        size += len(entry.content)
        if size > max_bytes:
            raise _too_large(str(path), max_bytes)
        files[entry.path] = entry.content
    return MappingProxyType(files)


@functools.lru_cache(maxsize=64)
def _digest_of(path: Path, changed: int, max_bytes: int) -> str:
    files = _load(path, changed, max_bytes)
    parts = [f"{path}\0{hashlib.sha256(content).hexdigest()}\n" for path, content in sorted(files.items())]
    return hashlib.sha256("".join(parts).encode("utf-8", "surrogateescape")).hexdigest()
