"""Weights as a Hugging Face directory, in and out. What is written comes back bit for bit.

model.safetensors, or            all tensors; from 4 GiB on in shards
model-0000K-of-0000N.safetensors
model.safetensors.index.json     which tensor is in which shard
config.json, tokenizer.json, …   companions: kept beside the weights in the store, copied as they are
rollmill.json                    line, number, form and root digest of what was exported
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollmill.errors import WeightsError
from rollmill.storage.directory import sync_folder
from rollmill.types import PolicyRef, Version
from rollmill.weights.files.companions import COMPANIONS, LARGEST_BYTES, keep_companions
from rollmill.weights.files.convert import convert, dtype_in
from rollmill.weights.files.safetensors import SERVED, Advance, Stored, read_file, write_file
from rollmill.weights.format.manifest import Encoding, Manifest, TensorEntry, describe, layout_of, root_digest
from rollmill.weights.format.tensors import WIDTHS, HostTensor, Tensors
from rollmill.weights.reading.store import WeightStore
from rollmill.weights.writing.encoder import Encoder, Row, entries_of, rows_of
from rollmill.weights.writing.writer import Writer

SHARD_BYTES = 4 << 30
INDEX, WHOLE, ABOUT = "model.safetensors.index.json", "model.safetensors", "rollmill.json"
_LARGEST_INDEX = 256 << 20


@dataclass(frozen=True)
class Imported:
    """The tensors of a directory in one form, mapped from its files where they are exactly what the file holds."""

    tensors: dict[str, HostTensor]
    converted: tuple[str, ...]  # names of those that had another dtype
    files: int


# --- out


def export_directory(
    directory: Path,
    tensors: Tensors,
    policy: PolicyRef,
    companions: Mapping[str, bytes],
    *,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
    advance: Advance = lambda _: None,
) -> list[Path]:
    """Write, read back, compare digests, and only then put the directory in its place. `advance` is told of each byte
    twice: written, and checked. Returns the files."""
    _check_target(directory, force)
    place = Path(os.path.abspath(directory))
    draft = place.with_name(f".{place.name}.partial-{uuid.uuid4().hex[:12]}")
    try:
        draft.mkdir(parents=True)
        about = {"line": policy.line, "number": policy.number, "form": policy.form, "digest": policy.digest}
        _write_shards(draft, tensors, shard_bytes, advance)
        for name, data in {**companions, ABOUT: _json(about)}.items():
            _write(draft / name, data)
        _check_written(draft, policy, advance)
        _into_place(draft, place)
    except OSError as error:
        raise WeightsError(
            f"{directory} cannot be written: {error.strerror}", hint="make room, or name another directory"
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return sorted(place.iterdir())


def _check_target(directory: Path, force: bool) -> None:
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise WeightsError(f"{directory} is not a directory", hint="name one that does not exist yet")
    inside = list(directory.iterdir()) if directory.is_dir() else []
    if inside and not force:
        raise WeightsError(f"{directory} is not empty", hint="--force replaces what is in it")
    if any(path.is_dir() for path in inside):
        raise WeightsError(
            f"{directory} has folders in it, so it is more than an export and is not replaced",
            hint="name another directory",
        )


def _shards(tensors: Tensors, shard_bytes: int) -> list[list[str]]:
    """Names in order, cut where the next one would not fit any more."""
    shards: list[list[str]] = [[]]
    size = 0
    for name in sorted(tensors):
        if shards[-1] and size + tensors[name].data.size > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensors[name].data.size
    return shards


def _write_shards(draft: Path, tensors: Tensors, shard_bytes: int, advance: Advance) -> None:
    shards = _shards(tensors, shard_bytes)
    places: dict[str, str] = {}
    for position, names in enumerate(shards, 1):
        file = WHOLE if len(shards) == 1 else f"model-{position:05d}-of-{len(shards):05d}.safetensors"
        with (draft / file).open("xb") as out:
            write_file(out, {name: tensors[name] for name in names}, advance)
            out.flush()
            os.fsync(out.fileno())
        places.update(dict.fromkeys(names, file))
    total = sum(tensor.data.size for tensor in tensors.values())
    _write(draft / INDEX, _json({"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}))


def _check_written(draft: Path, policy: PolicyRef, advance: Advance) -> None:
    with import_directory(draft, "as written") as written:
        digest = root_digest(describe(Watched(written.tensors, advance)))
    if digest != policy.digest:
        raise WeightsError(
            f"what was written has the digest {digest[:16]}…, not {policy.digest[:16]}…: nothing was exported",
            hint="a disk or memory that changes bytes; `rollmill weights verify` tells whether the store is right",
        )


def _into_place(draft: Path, directory: Path) -> None:
    old = None
    if directory.exists() and any(directory.iterdir()):
        old = directory.with_name(f".{directory.name}.old-{uuid.uuid4().hex[:12]}")
        directory.rename(old)
    try:
        draft.rename(directory)
    except OSError:
        if old is not None:
            old.rename(directory)
        raise
    sync_folder(directory.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


# --- in


@contextlib.contextmanager
def import_directory(
    directory: Path, form: str, *, lossy: bool = False, advance: Advance = lambda _: None
) -> Iterator[Imported]:
    """The tensors of a directory as a form serves them; `advance` is told of each byte of its files once.

    They are valid inside the `with`: what has another dtype there is converted into a temporary file, so that memory
    never holds more than a piece of it.
    """
    files = weight_files(directory)
    stored: dict[str, Stored] = {}
    for path, expected in files.items():
        found = read_file(path)
        if expected is not None and found.keys() != expected:
            odd = min(found.keys() ^ expected)
            raise WeightsError(f"{directory / INDEX} and {path.name} disagree about {odd!r}", hint="copy it again")
        if twice := found.keys() & stored.keys():
            raise WeightsError(
                f"{min(twice)!r} is in two files of {directory}", hint="keep the files of one model only"
            )
        stored.update(found)
    dtypes = {name: dtype_in(form, name, tensor) for name, tensor in stored.items()}
    converted = tuple(name for name in sorted(stored) if SERVED.get(stored[name].dtype) != dtypes[name])
    sizes = {name: stored[name].elements * WIDTHS[dtypes[name]] for name in converted}
    with scratch(sizes) as rooms:
        tensors: dict[str, HostTensor] = {}
        for name, tensor in sorted(stored.items()):
            data = rooms.get(name, tensor.data)
            if name in rooms:
                convert(name, tensor, dtypes[name], data, lossy=lossy)
            elif data.ctypes.data % WIDTHS[dtypes[name]]:
                data = data.copy()  # a file may begin its tensors anywhere; compiled loops want whole elements
            tensors[name] = HostTensor(dtypes[name], tensor.shape, data)
            advance(tensor.data.size)
        yield Imported(tensors, converted, len(files))


def weight_files(directory: Path) -> dict[Path, set[str] | None]:
    """The safetensors files of a model, each with the names the index says it holds (None: there is no index)."""
    if not directory.is_dir():
        raise WeightsError(f"{directory} is not a directory", hint="name one as Hugging Face models have it")
    if (directory / INDEX).is_file():
        files: dict[Path, set[str] | None] = {}
        for name, file in _read_index(directory).items():
            names = files.setdefault(directory / file, set())
            assert names is not None
            names.add(name)
        return files
    if (directory / WHOLE).is_file():
        return {directory / WHOLE: None}
    found = sorted(directory.glob("*.safetensors"))
    if found:
        return dict.fromkeys(found)
    pickled = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(directory.glob(pattern))]
    if pickled:
        raise WeightsError(
            f"{directory} holds pickled weights ({pickled[0]}), and loading those runs code from the file",
            hint="convert them to safetensors where they come from: save_pretrained(..., safe_serialization=True)",
        )
    raise WeightsError(f"no safetensors files in {directory}", hint="a directory as Hugging Face models have it")


def check_export(directory: Path, form: str, imported: Imported, advance: Advance = lambda _: None) -> None:
    """An export says what its weights are: whoever changed them since is told so."""
    about = exported_as(directory)
    if about is None or about["form"] != form or imported.converted:
        return
    if root_digest(describe(Watched(imported.tensors, advance))) != about["digest"]:
        raise WeightsError(
            f"the weights in {directory} are not those that {ABOUT} names ({about['digest'][:16]}…)",
            hint=f"copy the directory again; if they were changed on purpose, delete {ABOUT}",
        )


def publish_import(
    store: WeightStore,
    directory: Path,
    line: str,
    form: str,
    imported: Imported,
    companions: Mapping[str, bytes],
    advance: Advance = lambda _: None,
) -> Manifest:
    """Commit what was imported as version 0 of a new line, a snapshot. Repeating it confirms what is there.

    Companions are kept just before: where the version is, they are, and a line with other weights never gets them.
    No copy of the weights is made, as a publisher that goes on to the next version would have to.
    """
    about = exported_as(directory)
    there = store.numbers(line, form)
    if not there:
        writer = Writer(store, line, form)
        writer.take_over()  # only of a line without versions: a trainer at work is not to be fenced by an import
        entries, encodings = _code(store, line, form, imported.tensors, advance)
        manifest = writer.manifest(0, entries, encodings, None, None, _source(directory, imported, about))
        keep_companions(store.objects, line, companions)
        if writer.commit(manifest):
            return manifest
    first = store.manifest(Version(line, (there or [0])[0]), form)
    if first.number != 0 or first.digest != root_digest(describe(Watched(imported.tensors, advance))):
        raise WeightsError(
            f"{line} ({form}) already has versions in {store.objects.url}, and these weights are not its first",
            hint="--line names another line",
        )
    keep_companions(store.objects, line, companions)
    return first


def _code(
    store: WeightStore, line: str, form: str, tensors: Tensors, advance: Advance
) -> tuple[tuple[TensorEntry, ...], tuple[Encoding | None, Encoding | None]]:
    layout = layout_of(tensors)
    seen: set[int] = set()

    def bytes_of(row: Row) -> np.ndarray:
        if row.place not in seen:  # coded and hashed, but counted once
            seen.add(row.place)
            advance(row.size)
        return tensors[row.tensor].data[row.start : row.stop]

    coded = Encoder(store, line, form).encode(0, rows_of(layout), bytes_of, None, snapshot=True)
    entries = entries_of(layout, [coded.digests[place] for place in range(len(coded.digests))])
    return entries, (coded.delta, coded.snapshot)


def _source(directory: Path, imported: Imported, about: dict[str, Any] | None) -> dict[str, Any]:
    source: dict[str, Any] = {"source": str(directory), "files": imported.files}
    if imported.converted:
        source["converted_tensors"] = len(imported.converted)
    if about is not None:
        source["exported_from"] = f"{about['line']}@{about['number']}"
    return source


def exported_as(directory: Path) -> dict[str, Any] | None:
    """What rollmill.json says, where an export left one and it is whole."""
    try:
        about = json.loads(_read(directory / ABOUT, 1 << 20))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    fields = (("line", str), ("number", int), ("form", str), ("digest", str))
    if not isinstance(about, dict) or not all(isinstance(about.get(name), kind) for name, kind in fields):
        return None
    return {name: about[name] for name, _ in fields}


def _read_index(directory: Path) -> dict[str, str]:
    try:
        places = json.loads(_read(directory / INDEX, _LARGEST_INDEX))["weight_map"]
        whole = isinstance(places, dict) and bool(places)
    except (ValueError, LookupError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise WeightsError(f"{directory / INDEX} is damaged", hint="copy or download it again")
    for file in places.values():
        # a name from a file must not lead out of its directory
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise WeightsError(f"{directory / INDEX} names {file!r}, which is no safetensors file beside it")
        if not (directory / file).is_file():
            raise WeightsError(f"{directory / file} is missing; {INDEX} names it", hint="copy or download it again")
    return places


@contextlib.contextmanager
def scratch(sizes: Mapping[str, int]) -> Iterator[dict[str, np.ndarray]]:
    """Room for so many bytes by name, mapped from one temporary file, which has no name and dies with the process."""
    starts: dict[str, int] = {}
    total = 0
    for name, size in sizes.items():
        starts[name] = total
        total += size + -size % 8
    if not total:
        yield {name: np.empty(0, np.uint8) for name in sizes}
        return
    with tempfile.TemporaryFile(prefix="rollmill-import-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, total)  # a full disk is an error here, and a dead process later
        except OSError as error:
            raise WeightsError(
                f"a temporary file of {total} bytes cannot be had in {tempfile.gettempdir()}: {error.strerror}",
                hint="make room, or let TMPDIR name another place",
            ) from None
        room = np.asarray(np.memmap(file, dtype=np.uint8, mode="r+", shape=(total,)))
        yield {name: room[start : start + sizes[name]] for name, start in starts.items()}


def read_companions(directory: Path) -> dict[str, bytes]:
    """What lies beside the weights and belongs to the model."""
    found = (directory / name for name in COMPANIONS)
    return {path.name: _read(path, LARGEST_BYTES) for path in found if path.is_file()}


class Watched(Mapping[str, HostTensor]):
    """Tensors that tell `advance` of their bytes when they are first looked at."""

    def __init__(self, tensors: Tensors, advance: Advance) -> None:
        self._tensors, self._advance = tensors, advance
        self._seen: set[str] = set()

    def __getitem__(self, name: str) -> HostTensor:
        tensor = self._tensors[name]
        if name not in self._seen:
            self._seen.add(name)
            self._advance(tensor.data.size)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _read(path: Path, largest: int) -> bytes:
    try:
        if path.stat().st_size > largest:
            raise WeightsError(f"{path} has {path.stat().st_size} bytes, more than such a file can have")
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from None


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
