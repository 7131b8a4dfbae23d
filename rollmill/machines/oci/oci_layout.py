"""OCI layouts and archives: `index.json` and blobs, as `skopeo copy`, `podman save`, buildah and umoci write them.

Also the archives of `docker save`, old and new. Everything in them is untrusted: every blob is checked against the
digest that names it, and the archive's own paths stay in its directory.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from pathlib import Path
from typing import IO

import zstandard

from rollmill.errors import TaskError
from rollmill.machines.oci import documents
from rollmill.machines.oci.documents import Descriptor, Manifest
from rollmill.machines.oci.tar import ArchiveError, Tar, safe_path, write_entry

_LARGEST = 16 << 30  # bytes of an archive, with every layer as it is packed
_MOST_ENTRIES = 100_000
UNREADABLE = (ArchiveError, zstandard.ZstdError, OSError, EOFError, zlib.error)  # what reading a packed archive raises


class Layout:
    """A directory with an OCI image."""

    def __init__(self, directory: Path, name: str = "") -> None:
        """`name`: what errors call it."""
        self.directory = directory
        self.name = name or str(directory)

    def manifest(self, tag: str = "") -> Descriptor:
        """The manifest of this host's architecture. TaskError: it is no layout, or has none."""
        try:
            data = _bounded(self.directory / "index.json")
        except OSError as error:
            hint = "`skopeo copy docker://IMAGE oci:DIRECTORY` writes one"
            raise TaskError(f"{self.name} is not an OCI layout: {error.strerror}", hint=hint) from None
        for _ in range(3):  # an index may lead to another one
            index = documents.read(documents.Index, data, f"the index of {self.name}")
            found = documents.choose(index, self.name, tag)
            data, tag = self.document(found), ""
            if not documents.is_index(data, f"the blob {found.digest}"):
                return found
        raise TaskError(f"the index of {self.name} leads to no manifest")

    def document(self, descriptor: Descriptor) -> bytes:
        """A manifest or a configuration."""
        return _bounded(self.blob(descriptor))

    def blob(self, descriptor: Descriptor) -> Path:
        path = self.directory / "blobs" / "sha256" / descriptor.digest.removeprefix("sha256:")
        if path.is_symlink() or not path.is_file():
            raise self._refused(descriptor, "missing")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != path.name:
                raise self._refused(descriptor, "damaged")
        return path

    def _refused(self, descriptor: Descriptor, why: str) -> TaskError:
        return TaskError(f"{self.name}: the blob {descriptor.digest} is {why}", hint="copy or save the image again")

    def read_manifest(self, descriptor: Descriptor) -> Manifest:
        return documents.read(Manifest, self.document(descriptor), f"the manifest {descriptor.digest} of {self.name}")


def open_archive(archive: Path, target: Path) -> Layout:
    """Unpack an archive of a layout to the empty directory `target`. TaskError: it is none."""
    try:
        with archive.open("rb") as file:
            tar = Tar(plain(file), most_bytes=_LARGEST, most_entries=_MOST_ENTRIES)
            links: dict[str, str] = {}
            for entry in tar:
                path = safe_path(entry.name)
                if path is None and entry.name.strip("./"):
                    raise TaskError(f"{archive} has an entry that leads outside: {entry.name!r}")
                if path is not None and entry.kind == "file":
                    write_entry(target, path, entry.mode, tar)
                elif path is not None and entry.kind == "link":  # `docker save` repeats a layer as a link
                    links[path] = entry.target
        if not (target / "index.json").exists() and (target / "manifest.json").exists():
            _convert(target, links)
    except UNREADABLE as error:
        raise TaskError(
            f"{archive} is not an archive of an OCI image: {str(error).partition(chr(10))[0]}",
            hint="`podman save --format oci-archive` and `skopeo copy … oci-archive:FILE` write one",
        ) from None
    return Layout(target, str(archive))


def _convert(target: Path, links: dict[str, str]) -> None:
    """Write the index and the manifest of what an older `docker save` wrote."""
    blobs = target / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    try:
        images = json.loads(_bounded(target / "manifest.json"))
        manifests = []
        for image in images:
            config, *parts = (_take(target, name, links, blobs) for name in (image["Config"], *image["Layers"]))
            data = json.dumps({"config": config, "layers": parts}).encode()
            digest = hashlib.sha256(data).hexdigest()
            (blobs / digest).write_bytes(data)
            tags = image.get("RepoTags") or [""]
            annotations = ({"org.opencontainers.image.ref.name": str(tag).rpartition(":")[2]} for tag in tags)
            manifests += [{"digest": f"sha256:{digest}", "annotations": each} for each in annotations]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArchiveError(f"its manifest.json is damaged: {error!r}") from None
    (target / "index.json").write_text(json.dumps({"manifests": manifests}))


def _take(target: Path, name: str, links: dict[str, str], blobs: Path) -> dict[str, str]:
    """Move a file to the blobs. Returns its descriptor."""
    path = safe_path(str(name))
    if path in links:
        path = safe_path(str(Path("/", path).parent.joinpath(links[path]).resolve())[1:])
    if path is None or not (target / path).is_file():
        raise ArchiveError(f"{name!r} is missing")
    with (target / path).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if not (blobs / digest).exists():
        (blobs / digest).hardlink_to(target / path)
    return {"digest": f"sha256:{digest}"}


def plain(file: IO[bytes]) -> IO[bytes]:
    """The tar in a file, whatever it is compressed with. What its media type says is not believed."""
    start = file.read(4)
    file.seek(0)
    if start[:2] == b"\x1f\x8b":
        return gzip.open(file)  # type: ignore[return-value]
    if start == b"\x28\xb5\x2f\xfd":
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True))
    return file


def _bounded(path: Path) -> bytes:
    if path.is_symlink() or path.stat().st_size > documents.MOST_BYTES:
        raise TaskError(f"{path.name} is no document: it has more than {documents.MOST_BYTES >> 20} MiB, or is a link")
    return path.read_bytes()
