"""Exports and imports versions as Hugging Face directories. An export that is imported again is the same bit for bit.

An export adds `rollmill.json`: line, number, form and root digest of what was exported. An import checks the weights
against it, so changes to the directory are noticed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict

from rollmill.errors import WeightsError
from rollmill.strict import StrictModel, parse_json
from rollmill.types import PolicyRef, Version
from rollmill.weights.files.checkpoint_directory import (
    SHARD_BYTES,
    encode_json,
    read_bytes,
    read_weights,
    scratch,
    write_directory,
)
from rollmill.weights.files.companions import keep_companions
from rollmill.weights.files.huggingface_tensors import convert, dtype_in
from rollmill.weights.files.safetensors import SERVED, Advance, host_entries
from rollmill.weights.format.manifest import (
    Count,
    Digest,
    Encoding,
    Manifest,
    Name,
    TensorEntry,
    describe,
    layout_of,
    root_digest,
)
from rollmill.weights.format.tensors import WIDTHS, HostTensor, Tensors
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.writing.encoder import ChunkRow, Encoder, entries_of, rows_of
from rollmill.weights.writing.line_writer import Writer

ABOUT = "rollmill.json"


@dataclass(frozen=True)
class Import:
    """The tensors of a directory in one form. Tensors that need no conversion are mapped from its files."""

    tensors: dict[str, HostTensor]
    converted: tuple[str, ...]  # names of the tensors that had another dtype
    files: int


class _About(StrictModel):
    """rollmill.json"""

    model_config = ConfigDict(extra="ignore")

    line: Name
    number: Count
    form: Name
    digest: Digest


# --- export


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
    """Writes a draft, reads it back, compares digests, and only then moves the directory to its place. `advance` counts
    each byte twice: written, and checked. Returns the files."""
    about = _About(line=policy.line, number=policy.number, form=policy.form, digest=policy.digest)
    return write_directory(
        directory,
        host_entries(dict(sorted(tensors.items()))),
        {**companions, ABOUT: encode_json(about.model_dump())},
        force=force,
        shard_bytes=shard_bytes,
        advance=advance,
        check=lambda draft: _check_written(draft, policy, advance),
    )


def _check_written(draft: Path, policy: PolicyRef, advance: Advance) -> None:
    with import_directory(draft, "as written") as written:
        digest = root_digest(describe(WatchedTensors(written.tensors, advance)))
    if digest != policy.digest:
        raise WeightsError(
            f"the written weights have the digest {digest[:16]}…, not {policy.digest[:16]}…: nothing was exported",
            hint="disk or memory may be faulty; `rollmill weights verify` checks the store",
        )


# --- import


@contextlib.contextmanager
def import_directory(
    directory: Path, form: str, *, lossy: bool = False, advance: Advance = lambda _: None
) -> Iterator[Import]:
    """The tensors of a directory in `form`. `advance` counts each byte of the files once.

    They are valid inside the `with`. A tensor with another dtype is converted into a temporary file, so memory never
    holds more than a part of it.
    """
    stored, files = read_weights(directory)
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
                data = data.copy()  # tensors in a file need not be aligned; compiled loops need them aligned
            tensors[name] = HostTensor(dtypes[name], tensor.shape, data)
            advance(tensor.data.size)
        yield Import(tensors, converted, len(files))


def check_export(directory: Path, form: str, imported: Import, advance: Advance = lambda _: None) -> None:
    """Raises WeightsError if the directory is an export and its weights were changed since."""
    about = exported_as(directory)
    if about is None or about.form != form or imported.converted:
        return
    if root_digest(describe(WatchedTensors(imported.tensors, advance))) != about.digest:
        raise WeightsError(
            f"the weights in {directory} are not those that {ABOUT} names ({about.digest[:16]}…)",
            hint=f"copy the directory again; if they were changed on purpose, delete {ABOUT}",
        )


def publish_import(
    store: WeightStore,
    directory: Path,
    line: str,
    form: str,
    imported: Import,
    companions: Mapping[str, bytes],
    advance: Advance = lambda _: None,
) -> Manifest:
    """Commits the imported weights as version 0 of a new line, a snapshot. Safe to repeat.

    Companions are written just before the manifest: a version always has its companions, and a line with other weights
    never gets them. The weights are not copied, because no next version needs them as a base.
    """
    about = exported_as(directory)
    there = store.numbers(line, form)
    if not there:
        writer = Writer(store, line, form)
        writer.take_over()  # only if the line has no version: an import must not fence a trainer at work
        entries, encodings = _code(store, line, form, imported.tensors, advance)
        manifest = writer.manifest(0, entries, encodings, None, None, _source(directory, imported, about))
        keep_companions(store.objects, line, companions)
        if writer.commit(manifest):
            return manifest
    first = store.manifest(Version(line, (there or [0])[0]), form)
    if first.number != 0 or first.digest != root_digest(describe(WatchedTensors(imported.tensors, advance))):
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

    def bytes_of(row: ChunkRow) -> np.ndarray:
        if row.place not in seen:  # coded and hashed, but counted once
            seen.add(row.place)
            advance(row.size)
        return tensors[row.tensor].data[row.start : row.stop]

    coded = Encoder(store, line, form).encode(0, rows_of(layout), bytes_of, None, snapshot=True)
    entries = entries_of(layout, [coded.digests[place] for place in range(len(coded.digests))])
    return entries, (coded.delta, coded.snapshot)


def _source(directory: Path, imported: Import, about: PolicyRef | None) -> dict[str, Any]:
    source: dict[str, Any] = {"source": str(directory), "files": imported.files}
    if imported.converted:
        source["converted_tensors"] = len(imported.converted)
    if about is not None:
        source["exported_from"] = f"{about.line}@{about.number}"
    return source


def exported_as(directory: Path) -> PolicyRef | None:
    """The content of rollmill.json, if an export wrote one and it is valid."""
    try:
        about = parse_json(read_bytes(directory / ABOUT, 1 << 20), _About)
    except (FileNotFoundError, ValueError):
        return None
    return PolicyRef(about.line, about.number, about.form, about.digest)


class WatchedTensors(Mapping[str, HostTensor]):
    """Tensors that report their bytes to `advance` at first access."""

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
