"""Hugging Face directories: their only reader and their only writer. Nothing in a directory is executed or trusted.

model.safetensors                all tensors in one file, or
model-0000K-of-0000N.safetensors several files of at most `SHARD_BYTES` each (a larger tensor has its own), and
model.safetensors.index.json     which tensor is in which file
config.json, tokenizer.json, …   the other files of the model
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field

from rollmill.errors import WeightsError
from rollmill.storage.directory_store import sync_folder
from rollmill.strict import StrictModel, parse_json
from rollmill.weights.files.companions import COMPANIONS, LARGEST_BYTES
from rollmill.weights.files.safetensors import Advance, Entry, StoredTensor, read_file, write_entries

SHARD_BYTES = 5_000_000_000  # like transformers
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
_LARGEST_INDEX = 64 << 20  # that of a mixture of 10^12 parameters has some 16 MiB
_ABANDONED_SECONDS = 3600.0
_AGAIN = "copy or download it again"


# --- writing


def write_directory(
    directory: Path,
    entries: Iterable[Entry],
    files: Mapping[str, bytes],
    *,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
    advance: Advance = lambda _: None,
    check: Callable[[Path], object] = lambda _: None,
) -> list[Path]:
    """Writes a directory with these tensors and files. It appears complete, durable and after `check`, or not at all.

    A directory that is not empty is replaced only with `force`. `check` is called with the draft directory and raises
    if it is wrong. `advance` is called with the number of bytes of each write. Returns the files.
    """
    _check_target(directory, force)
    place = Path(os.path.abspath(directory))
    _remove_abandoned(place)
    draft = place.with_name(f".{place.name}.partial-{uuid.uuid4().hex[:12]}")
    try:
        draft.mkdir(parents=True)
        _write_shards(draft, _shards(entries, shard_bytes), advance)
        for name, data in files.items():
            _write(draft / name, data)
        check(draft)
        _into_place(draft, place)
    except OSError as error:
        raise WeightsError(
            f"{directory} cannot be written: {error.strerror}", hint="make room, or name another directory"
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return sorted(place.iterdir())


def encode_json(tree: Any) -> bytes:
    """JSON in the layout of such a directory."""
    return (json.dumps(tree, indent=2, ensure_ascii=False) + "\n").encode()


def _remove_abandoned(place: Path) -> None:
    """Removes the drafts that killed processes left here more than an hour ago."""
    for draft in place.parent.glob(f".{glob.escape(place.name)}.partial-*"):
        with contextlib.suppress(OSError):
            if time.time() - draft.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(draft)


def _check_target(directory: Path, force: bool) -> None:
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise WeightsError(
            f"{directory} already exists and is not a directory", hint="name one that does not exist yet"
        )
    inside = list(directory.iterdir()) if directory.is_dir() else []
    if inside and not force:
        raise WeightsError(
            f"{directory} already exists and is not empty",
            hint="name another directory, or empty it first (`weights export --force` does)",
        )
    if any(path.is_dir() for path in inside):
        raise WeightsError(
            f"{directory} contains folders, so it is more than an export and is not replaced",
            hint="name another directory",
        )


def _shards(entries: Iterable[Entry], shard_bytes: int) -> list[list[Entry]]:
    """The tensors in order, cut before the tensor that would not fit."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.size > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.size
    return [shard for shard in shards if shard]


def _write_shards(draft: Path, shards: list[list[Entry]], advance: Advance) -> None:
    places: dict[str, str] = {}
    for position, entries in enumerate(shards, 1):
        file = WHOLE if len(shards) == 1 else f"model-{position:05d}-of-{len(shards):05d}.safetensors"
        with (draft / file).open("xb") as out:
            write_entries(out, entries, advance)
            out.flush()
            os.fsync(out.fileno())
        places.update((entry.name, file) for entry in entries)
    if len(shards) > 1:
        total = sum(entry.size for entries in shards for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        _write(draft / INDEX, encode_json(index))


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


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


# --- reading


class Weights(NamedTuple):
    """The tensors of a directory, mapped, and the files they are in."""

    tensors: dict[str, StoredTensor]
    files: list[Path]


class _Index(StrictModel):
    """model.safetensors.index.json. Other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    weight_map: dict[str, str] = Field(min_length=1)


def read_weights(directory: Path) -> Weights:
    """All tensors of a directory. Raises WeightsError if a file is damaged, or if files and index disagree."""
    stored: dict[str, StoredTensor] = {}
    files = weight_files(directory)
    for path, expected in files.items():
        found = read_file(path)
        if expected is not None and (absent := expected - found.keys()):
            raise WeightsError(
                f"{path} does not hold {min(absent)!r}, which {INDEX} places there",
                hint="index and files belong to different models: copy or download them again",
            )
        if expected is not None and (surplus := found.keys() - expected):
            raise WeightsError(f"{path} holds {min(surplus)!r}, which {INDEX} places elsewhere or nowhere", hint=_AGAIN)
        if twice := found.keys() & stored.keys():
            raise WeightsError(
                f"{min(twice)!r} is in two files of {directory}", hint="keep the files of one model only"
            )
        stored.update(found)
    return Weights(stored, list(files))


def weight_files(directory: Path) -> dict[Path, set[str] | None]:
    """The safetensors files of a model, each with the tensor names that the index lists for it (None: no index)."""
    if not directory.is_dir():
        raise WeightsError(f"{directory} is not a directory", hint="name one that transformers' save_pretrained wrote")
    if (directory / INDEX).is_file():
        return _indexed_files(directory)
    if (directory / WHOLE).is_file():
        return {directory / WHOLE: None}
    found = sorted(directory.glob("*.safetensors"))
    if found:
        return dict.fromkeys(found)
    pickled = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(directory.glob(pattern))]
    if pickled:
        raise WeightsError(
            f"{directory} has pickled weights only ({pickled[0]}), and loading those runs code from the file",
            hint="convert them to safetensors where you trust them: save_pretrained(..., safe_serialization=True)",
        )
    raise WeightsError(
        f"no safetensors files in {directory}", hint="name a directory that transformers' save_pretrained wrote"
    )


def _indexed_files(directory: Path) -> dict[Path, set[str] | None]:
    path = directory / INDEX
    try:
        places = parse_json(read_bytes(path, _LARGEST_INDEX), _Index).weight_map
    except ValueError as error:
        raise WeightsError(f"{path} is damaged: {error}", hint=_AGAIN) from None
    files: dict[Path, set[str]] = {}
    for name, file in sorted(places.items()):
        # a name in the index must not lead out of the directory
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise WeightsError(f"{path} names {file!r}, not a safetensors file in the same directory", hint=_AGAIN)
        files.setdefault(directory / file, set()).add(name)
    missing = sorted(file.name for file in files if not file.is_file())
    if missing:
        raise WeightsError(
            f"{directory} lacks {len(missing)} of {len(files)} shards: {', '.join(missing[:3])}", hint=_AGAIN
        )
    return dict(sorted(files.items()))


def read_companions(directory: Path) -> dict[str, bytes]:
    """The companions in a directory: the files of the model that a store keeps beside the weights."""
    found = (directory / name for name in COMPANIONS)
    return {path.name: read_bytes(path, LARGEST_BYTES) for path in found if path.is_file()}


def read_bytes(path: Path, largest: int) -> bytes:
    """A file of at most `largest` bytes. Raises FileNotFoundError if there is none, WeightsError for other faults."""
    try:
        if path.stat().st_size > largest:
            raise WeightsError(f"{path} has {path.stat().st_size} bytes, too many for such a file")
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from None


@contextlib.contextmanager
def scratch(sizes: Mapping[str, int]) -> Iterator[dict[str, np.ndarray]]:
    """Arrays of these sizes by name, mapped from one temporary file, which has no name and ends with the process."""
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
            os.posix_fallocate(file.fileno(), 0, total)  # a full disk raises here; later it would kill the process
        except OSError as error:
            raise WeightsError(
                f"a temporary file of {total} bytes cannot be created in {tempfile.gettempdir()}: {error.strerror}",
                hint="free some space, or set TMPDIR to another directory",
            ) from None
        room = np.asarray(np.memmap(file, dtype=np.uint8, mode="r+", shape=(total,)))
        yield {name: room[start : start + sizes[name]] for name, start in starts.items()}
