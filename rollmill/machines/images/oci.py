"""Files of an OCI image: what is below one directory of it, as the start of a work directory.

Of the layers only regular files below that directory are taken; later layers replace or remove ("whiteouts") what
earlier ones have. Links and devices are left out. A path that leads outside refuses the image. Machines that are the
whole image: rollmill/machines/oci.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from rollmill.errors import TaskError
from rollmill.machines.oci.documents import Descriptor
from rollmill.machines.oci.oci_layout import UNREADABLE, Layout, open_archive, plain
from rollmill.machines.oci.tar import Entry, Tar, safe_path, write_entry

_LARGEST = 4 << 30  # bytes of all files that are taken
_MOST_ENTRIES = 1_000_000
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"


def take_files(image: Path, inside: str, target: Path) -> None:
    """Write the regular files of an image that are below the directory `inside` to `target`."""
    prefix = inside.strip("/")
    with tempfile.TemporaryDirectory(prefix="rollmill-oci-") as temporary:
        layout = open_archive(image, Path(temporary)) if image.is_file() else Layout(image)
        manifest = layout.read_manifest(layout.manifest())
        target.mkdir(parents=True)
        taken = 0
        for layer in manifest.layers:
            taken = _apply(layout, layer, prefix, target, taken)
    if not any(target.iterdir()):
        raise TaskError(f"{image} has no files below {inside!r}", hint="--inside names a directory of the image")


def _apply(layout: Layout, layer: Descriptor, prefix: str, target: Path, taken: int) -> int:
    """Apply one layer. Returns the bytes that have been written so far."""
    try:
        with layout.blob(layer).open("rb") as file:
            tar = Tar(plain(file), most_bytes=_LARGEST, most_entries=_MOST_ENTRIES, needs_end=False)  # as of umoci
            for entry in tar:
                path = safe_path(entry.name.lstrip("/"))
                if path is None:
                    if entry.name.strip("./"):
                        raise TaskError(f"a layer of the image has an entry that leads outside: {entry.name!r}")
                    continue
                taken += entry.size if entry.kind == "file" else 0
                if taken > _LARGEST:
                    raise TaskError(f"the image has more than {_LARGEST >> 30} GiB of files")
                _take(tar, entry, path, prefix, target)
    except UNREADABLE as error:
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
        write_entry(target, inside, entry.mode, tar)


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
