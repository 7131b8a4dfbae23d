"""Companions: files that belong to a model and not to one version of it (config.json, tokenizer.json, …).

    companions/LINE/NAME    the files as they are
    companions/LINE/index   sealed: names, sizes and digests of all of them, written after them

They are written before the first version of their line is committed, and never change: a store that has a version has
its companions. Lines that begin from that line need none of their own. A region that copies only such a line stores
them under the name of that line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from rollmill.errors import ObjectExists, ObjectMissing, WeightsError
from rollmill.storage.objects import Objects
from rollmill.strict import StrictModel
from rollmill.types import Version
from rollmill.weights.format.manifest import Count, Digest, Manifest, Name, digest_bytes, seal, unseal
from rollmill.weights.format.object_keys import valid_name
from rollmill.weights.reading.weight_store import WeightStore

# An export writes files with these names into a directory, so no other names are accepted from a store.
COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
LARGEST_BYTES = 256 << 20  # of all companions of a line together
_LARGEST_INDEX = 64 << 10
_LONGEST_LINEAGE = 32
_INDEX = "index"
_HINT = "restore it from another region or a backup"


class Companion(StrictModel):
    name: str
    bytes: Count
    digest: Digest


class Index(StrictModel):
    """All companions of a line."""

    format: Literal[2] = 2
    line: Name
    files: tuple[Companion, ...] = Field(max_length=len(COMPANIONS))


def companions_folder(line: str) -> str:
    return f"companions/{valid_name(line)}"


def index_key(line: str) -> str:
    return f"{companions_folder(line)}/{_INDEX}"


def keep_companions(objects: Objects, line: str, files: Mapping[str, bytes]) -> None:
    """Stores the files beside the weights of a line, so that an export can write them again. Safe to repeat."""
    if not files:
        return
    _check_size(sum(map(len, files.values())), f"the companions of {line}")
    for name, data in files.items():
        _create(objects, f"{companions_folder(line)}/{name}", data)
    entries = (Companion(name=name, bytes=len(data), digest=digest_bytes(data)) for name, data in sorted(files.items()))
    _create(objects, index_key(line), seal(Index(line=line, files=tuple(entries))))


def kept_companions(objects: Objects, line: str) -> dict[str, bytes]:
    """The companions of a line, checked against its index. Names and sizes may come from another region: only known
    names are accepted, and nothing is read before its size is checked."""
    where = f"{index_key(line)!r} in {objects.url}"
    size = objects.head(index_key(line))
    if size is None:
        return _unsealed(objects, line)
    if size > _LARGEST_INDEX:
        raise WeightsError(f"{where} has {size} bytes, too many for an index", hint=_HINT)
    index = unseal(objects.get_range(index_key(line), 0, size), Index, where, _HINT)
    if index.line != line or not {file.name for file in index.files} <= set(COMPANIONS):
        raise WeightsError(f"{where} belongs to another line, or names files that are not companions", hint=_HINT)
    _check_size(sum(file.bytes for file in index.files), f"the companions in {where}")
    return {file.name: _read(objects, line, file) for file in index.files}


def _unsealed(objects: Objects, line: str) -> dict[str, bytes]:
    """Files without an index are used too, but nothing proves that they are complete."""
    folder = companions_folder(line)
    sizes = {
        name: objects.head(f"{folder}/{name}")
        for key in objects.list(folder)
        if (name := key.rpartition("/")[2]) in COMPANIONS
    }
    _check_size(sum(size or 0 for size in sizes.values()), f"the companions of {line} in {objects.url}")
    return {name: objects.get_range(f"{folder}/{name}", 0, size) for name, size in sizes.items() if size is not None}


def companions_of(store: WeightStore, manifest: Manifest) -> dict[str, bytes]:
    """The companions of a version's model: those of its line, or of the nearest line it comes from."""
    lines: list[str] = []
    line, origin = manifest.line, manifest.origin
    while True:
        if found := kept_companions(store.objects, line):
            return found
        lines.append(line)
        if origin is None or origin.line in lines or len(lines) == _LONGEST_LINEAGE:
            return {}
        line, origin = origin.line, _origin_of(store, origin.line)


def copy_companions(source: WeightStore, target: WeightStore, manifest: Manifest) -> None:
    """Copies the companions of a version to another store before it is committed there, unless they exist there."""
    if target.objects.head(index_key(manifest.line)) is None:
        keep_companions(target.objects, manifest.line, companions_of(source, manifest))


def _origin_of(store: WeightStore, line: str) -> Version | None:
    """The parent of a line's first version. Every version of the line names it."""
    for form in store.forms(line):
        for number in reversed(store.numbers(line, form)):
            try:
                return store.manifest(Version(line, number), form).origin
            except WeightsError:
                continue  # damaged, or collected meanwhile: the version before names the same
    return None


def _read(objects: Objects, line: str, file: Companion) -> bytes:
    key = f"{companions_folder(line)}/{file.name}"
    try:
        data = objects.get_range(key, 0, file.bytes)
    except ObjectMissing:
        raise WeightsError(f"{key!r} is missing in {objects.url}, but the index names it", hint=_HINT) from None
    if digest_bytes(data) != file.digest:
        raise WeightsError(
            f"{key!r} in {objects.url} is damaged: its digest differs from the one in the index", hint=_HINT
        )
    return data


def _check_size(size: int, where: str) -> None:
    if size > LARGEST_BYTES:
        raise WeightsError(
            f"{where} have {size} bytes together, more than the allowed {LARGEST_BYTES}",
            hint="only config, tokenizer and chat template belong beside the weights",
        )


def _create(objects: Objects, key: str, data: bytes) -> None:
    try:
        objects.create(key, data)
    except ObjectExists:
        if objects.head(key) != len(data) or objects.get(key) != data:
            raise WeightsError(
                f"{key!r} in {objects.url} already exists with other content",
                hint="name another line; if this one has no version, `rollmill weights gc` removes it after an hour",
            ) from None
