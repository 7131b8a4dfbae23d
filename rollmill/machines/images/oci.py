"""Files of an OCI image: a layout directory, or an archive of one, as `skopeo copy`, `podman save` and others write it.

It is parsed here, with nothing of it executed, and everything in it is untrusted. Every blob is checked against the
digest that names it. Of the layers only regular files below one directory are taken; later layers replace or remove
("whiteouts") what earlier ones have. Links and devices are left out. A path that leads outside refuses the image.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import IO, Any

import zstandard
from pydantic import BaseModel, Field, ValidationError

from rollmill.errors import TaskError
from rollmill.machines.images import layers
from rollmill.machines.images.tar import ArchiveError, Entry, Tar

_MOST_JSON = 4 << 20
_LARGEST = 4 << 30  # bytes of all files that are taken
_LARGEST_ARCHIVE = 16 << 30  # bytes of an archive of a layout, with every layer as it is packed
_MOST_ENTRIES = 1_000_000
_UNREADABLE = (zstandard.ZstdError, OSError, EOFError, zlib.error)  # what decompressors raise
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"


class Descriptor(BaseModel):
    mediaType: str = ""
    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    size: int = Field(0, ge=0)


class Index(BaseModel):
    manifests: list[Descriptor] = Field(min_length=1, max_length=64)


class Manifest(BaseModel):
    layers: list[Descriptor] = Field(max_length=1000)


def take_files(image: Path, inside: str, target: Path) -> None:
    """Write the regular files of an image that are below the directory `inside` to `target`."""
    prefix = inside.strip("/")
    with tempfile.TemporaryDirectory(prefix="rollmill-oci-") as temporary:
        layout = image
        if image.is_file():
            layout = Path(temporary)
            _open_archive(image, layout)
        manifest = _manifest(layout)
        target.mkdir(parents=True)
        taken = 0
        for layer in manifest.layers:
            taken = _apply(layout, layer, prefix, target, taken)
    if not any(target.iterdir()):
        raise TaskError(f"{image} has no files below {inside!r}", hint="--inside names a directory of the image")


def _open_archive(image: Path, target: Path) -> None:
    """Unpack the layout itself: index.json, oci-layout and blobs/sha256/*."""
    try:
        with image.open("rb") as file:
            tar = Tar(_plain(file), most_bytes=_LARGEST_ARCHIVE, most_entries=_MOST_ENTRIES)
            for entry in tar:
                path = layers.safe_path(entry.name)
                if path is None:
                    if entry.name.strip("./"):
                        raise TaskError(f"{image} has an entry that leads outside: {entry.name!r}")
                elif entry.kind == "file" and (
                    path in ("index.json", "oci-layout") or path.startswith("blobs/sha256/")
                ):
                    layers.write(target, path, entry.mode, tar)
    except (ArchiveError, *_UNREADABLE) as error:
        raise TaskError(
            f"{image} is not an archive of an OCI image: {str(error).partition(chr(10))[0]}",
            hint="`podman save --format oci-archive` and `skopeo copy … oci-archive:FILE` write one",
        ) from None


def _manifest(layout: Path) -> Manifest:
    try:
        index = Index.model_validate(_json(layout / "index.json"))
        for _ in range(3):  # an index may lead to another one
            content = json.loads(_blob(layout, index.manifests[0]))
            if "layers" in content:
                return Manifest.model_validate(content)
            index = Index.model_validate(content)
    except (OSError, ValueError, ValidationError, RecursionError, TypeError) as error:
        raise TaskError(
            f"{layout} is not an OCI layout: {error}", hint="`skopeo copy docker://IMAGE oci:DIRECTORY` writes one"
        ) from None
    raise TaskError(f"{layout}: its index leads to no manifest")


def _json(path: Path) -> Any:
    if path.stat().st_size > _MOST_JSON:
        raise ValueError(f"{path.name} is too large")
    return json.loads(path.read_bytes())


def _path(layout: Path, descriptor: Descriptor) -> Path:
    path = layout / "blobs" / "sha256" / descriptor.digest.removeprefix("sha256:")
    if path.is_symlink() or not path.is_file():
        raise TaskError(f"the blob {descriptor.digest} is missing")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != path.name:
            raise TaskError(f"the blob {descriptor.digest} is damaged")
    return path


def _blob(layout: Path, descriptor: Descriptor) -> bytes:
    path = _path(layout, descriptor)
    if path.stat().st_size > _MOST_JSON:
        raise ValueError("a manifest is too large")
    return path.read_bytes()


def _apply(layout: Path, layer: Descriptor, prefix: str, target: Path, taken: int) -> int:
    """Apply one layer. Returns the bytes that have been written so far."""
    try:
        with _path(layout, layer).open("rb") as file:
            tar = Tar(_plain(file), most_bytes=_LARGEST, most_entries=_MOST_ENTRIES, needs_end=False)  # as of umoci
            for entry in tar:
                path = layers.safe_path(entry.name.lstrip("/"))
                if path is None:
                    if entry.name.strip("./"):
                        raise TaskError(f"a layer of the image has an entry that leads outside: {entry.name!r}")
                    continue
                taken += entry.size if entry.kind == "file" else 0
                if taken > _LARGEST:
                    raise TaskError(f"the image has more than {_LARGEST >> 30} GiB of files")
                _take(tar, entry, path, prefix, target)
    except (ArchiveError, *_UNREADABLE) as error:
        raise TaskError(f"the layer {layer.digest} cannot be read: {error}") from None
    return taken


def _take(tar: Tar, entry: Entry, path: str, prefix: str, target: Path) -> None:
    folder, _, name = path.rpartition("/")
    if name.startswith(_WHITEOUT):
        gone = folder if name == _OPAQUE else f"{folder}/{name.removeprefix(_WHITEOUT)}".lstrip("/")
        return _remove(_below(gone, prefix), target, is_above=_is_above(gone, prefix))
    inside = _below(path, prefix)
    if inside is None or (inside == "" and entry.kind != "directory"):
        if _is_above(path, prefix) and entry.kind != "directory":
            _remove("", target)
        return
    for above in list(Path(inside).parents)[:-1]:  # a directory replaces a file of an earlier layer
        if (target / above).is_file():
            (target / above).unlink()
    if entry.kind == "directory":
        if (target / inside).is_file():
            (target / inside).unlink()
        return
    _remove(inside, target)
    if entry.kind == "file":
        layers.write(target, inside, entry.mode, tar)


def _below(path: str, prefix: str) -> str | None:
    """The path below the prefix; "": the prefix itself; None: elsewhere."""
    if not prefix:
        return path
    if path == prefix:
        return ""
    return path.removeprefix(f"{prefix}/") if path.startswith(f"{prefix}/") else None


def _is_above(path: str, prefix: str) -> bool:
    return bool(prefix) and (path == "" or path == prefix or prefix.startswith(f"{path}/"))


def _remove(inside: str | None, target: Path, *, is_above: bool = False) -> None:
    if is_above or inside == "":
        for entry in target.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    elif inside is not None:
        place = target / inside
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)


def _plain(file: IO[bytes]) -> IO[bytes]:
    """The tar of a layer, whatever it is compressed with. What its media type says is not believed."""
    start = file.read(4)
    file.seek(0)
    if start[:2] == b"\x1f\x8b":
        return gzip.open(file)  # type: ignore[return-value]
    if start == b"\x28\xb5\x2f\xfd":
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file))
    return file
