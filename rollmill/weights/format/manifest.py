"""The manifest: the contents of one version in one form, and where its bytes are. FORMAT.md explains every field.

A manifest object is sealed: two lines, the JSON and the blake3 of the first line. It is created once, after every
object it names, and never changed. A version exists exactly when its manifest exists. An anchor is sealed in the same
way. It is another snapshot of an existing version, made in the region that needs it.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple, TypeVar

import xxhash
from blake3 import blake3
from pydantic import Field, model_validator

from rollmill.errors import WeightsError
from rollmill.strict import FreeJson, StrictModel, parse_json
from rollmill.types import PolicyRef, Version
from rollmill.weights.format.codings import Coding
from rollmill.weights.format.tensors import LARGEST_TENSOR, WIDTHS, Tensors, chunk_ranges

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # blake3
ChunkDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  # xxh3-128
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}$")]
Kind = Literal["snapshot", "delta"]
RUN_BYTES = 64 << 20  # the largest payload of several chunks, decoded
_HINT = "restore the object from another region or a backup; engines recover at the next snapshot"


class TensorEntry(StrictModel):
    """One tensor: its dtype, its shape, and the digest of each of its canonical chunks."""

    name: str = Field(min_length=1, max_length=500)
    dtype: str
    shape: tuple[Count, ...] = Field(max_length=16)
    chunks: tuple[ChunkDigest, ...]

    @model_validator(mode="after")
    def _chunks_are_canonical(self) -> TensorEntry:
        if self.dtype not in WIDTHS:
            raise ValueError(f"unknown dtype {self.dtype!r}")
        if math.prod(self.shape) > LARGEST_TENSOR or len(self.chunks) != len(chunk_ranges(self.shape)):
            raise ValueError(f"{self.name} of shape {self.shape} cannot have {len(self.chunks)} chunks")
        return self

    @property
    def width(self) -> int:
        return WIDTHS[self.dtype]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.width


class Chunk(NamedTuple):
    """One row of the chunk table."""

    tensor: TensorEntry
    start: int  # byte range in the tensor
    stop: int
    digest: str

    def size(self) -> int:
        return self.stop - self.start


class Pack(StrictModel):
    """An object that holds payloads one after the other; its digest is part of its key."""

    digest: Digest
    bytes: Count


class Payload(StrictModel):
    """A run of consecutive chunks of the table: which chunks, where the bytes are, and their coding."""

    first: Count
    chunks: Annotated[int, Field(ge=1, lt=1 << 53)]
    pack: Count
    offset: Count
    bytes: Count
    coding: Coding


class Base(StrictModel):
    """The version of the same line that a delta is applied to."""

    number: Count
    digest: Digest


class Encoding(StrictModel):
    """One way to get the version: a snapshot or a delta. Chunks without a payload are the same as in the base."""

    base: Base | None = None
    packs: tuple[Pack, ...]
    payloads: tuple[Payload, ...]
    changed_elements: Count

    @property
    def bytes(self) -> int:
        return sum(pack.bytes for pack in self.packs)

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Raises ValueError unless payloads lie in their packs and cover the chunk table correctly."""
        covered = 0
        for payload in self.payloads:
            if payload.pack >= len(self.packs) or payload.offset + payload.bytes > self.packs[payload.pack].bytes:
                raise ValueError("a payload lies outside its pack")
            if payload.first < covered or payload.first + payload.chunks > len(chunks):
                raise ValueError("payloads overlap or reach past the chunk table")
            run = chunks[payload.first : payload.first + payload.chunks]
            if len(run) > 1 and (
                sum(map(Chunk.size, run)) > RUN_BYTES or len({chunk.tensor.width for chunk in run}) > 1
            ):
                raise ValueError("a payload covers too much, or elements of several widths")
            if self.base is None and (payload.first > covered or payload.coding != "raw"):
                raise ValueError("a snapshot has raw payloads for all chunks")
            covered = payload.first + payload.chunks
        if self.base is None and covered != len(chunks):
            raise ValueError("a snapshot has payloads for all chunks")


class Manifest(StrictModel):
    """A version in one form. It has a snapshot, a delta, or both. A reader that holds the base takes the delta."""

    format: Literal[2] = 2
    line: Name
    number: Count
    form: Name
    parent_line: Name | None = None
    parent_number: Count | None = None
    first: Count  # the first number of its line; stored with that version's parent because old versions may be deleted
    origin_line: Name | None = None
    origin_number: Count | None = None
    digest: Digest
    tensors: tuple[TensorEntry, ...]
    snapshot: Encoding | None = None
    delta: Encoding | None = None
    metadata: dict[str, FreeJson] = Field(default_factory=dict)
    writer: str = Field(max_length=200)  # the process that published it
    epoch: Count = 0  # raised by one each time a publisher takes over the line; never decreases along a line
    created_at: float

    @model_validator(mode="after")
    def _is_consistent(self) -> Manifest:
        names = [tensor.name for tensor in self.tensors]
        if names != sorted(set(names)):
            raise ValueError("tensors are not sorted by name without repetition")
        if self.snapshot is None and self.delta is None:
            raise ValueError("neither a snapshot nor a delta")
        if (self.snapshot and self.snapshot.base) or (self.delta and not self.delta.base):
            raise ValueError("a delta has a base, a snapshot has none")
        if self.delta and self.delta.base and self.delta.base.number >= self.number:
            raise ValueError("a delta needs an earlier version of its line as base")
        for encoding in filter(None, (self.snapshot, self.delta)):
            encoding.check(self.chunks)
        if (self.parent_line is None) != (self.parent_number is None):
            raise ValueError("a parent needs both line and number")
        if (self.origin_line is None) != (self.origin_number is None) or self.first > self.number:
            raise ValueError("first and origin contradict the parent")
        if root_digest(self.tensors) != self.digest:
            raise ValueError("the root digest does not match the chunk table")
        return self

    @property
    def version(self) -> Version:
        return Version(self.line, self.number)

    @property
    def parent(self) -> Version | None:
        if self.parent_line is None or self.parent_number is None:
            return None
        return Version(self.parent_line, self.parent_number)

    @property
    def origin(self) -> Version | None:
        """The parent of the first version of this line."""
        if self.origin_line is None or self.origin_number is None:
            return None
        return Version(self.origin_line, self.origin_number)

    @property
    def policy(self) -> PolicyRef:
        return PolicyRef(self.line, self.number, self.form, self.digest)

    @property
    def kind(self) -> Kind:
        return "snapshot" if self.snapshot else "delta"

    @property
    def bytes(self) -> int:
        """Bytes of the published payloads."""
        return sum(encoding.bytes for encoding in (self.snapshot, self.delta) if encoding)

    @property
    def full_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def density(self) -> float | None:
        """The share of elements that differ from the base. None without a base."""
        elements = sum(tensor.bytes // tensor.width for tensor in self.tensors)
        return self.delta.changed_elements / max(elements, 1) if self.delta else None

    @property
    def step(self) -> int | None:
        step = self.metadata.get("step")
        return step if isinstance(step, int) else None

    def encoding(self, kind: Kind) -> Encoding:
        encoding = self.snapshot if kind == "snapshot" else self.delta
        assert encoding is not None
        return encoding

    @functools.cached_property
    def chunks(self) -> list[Chunk]:
        """The chunk table in order: tensors by name, chunks by row."""
        return chunk_table(self.tensors)


class Anchor(StrictModel):
    """A snapshot of an existing version, made from deltas, later than its manifest and possibly in another region."""

    format: Literal[2] = 2
    line: Name
    number: Count
    form: Name
    digest: Digest  # the root digest of the version
    snapshot: Encoding
    created_at: float

    @property
    def version(self) -> Version:
        return Version(self.line, self.number)

    @property
    def bytes(self) -> int:
        return self.snapshot.bytes


_Sealed = TypeVar("_Sealed", bound=StrictModel)


def seal(model: StrictModel) -> bytes:
    body = model.model_dump_json().encode()
    return body + b"\n" + digest_bytes(body).encode() + b"\n"


def unseal(data: bytes, kind: type[_Sealed], where: str, hint: str = _HINT) -> _Sealed:
    """Parses an untrusted sealed object. `where` names it in errors."""
    body, separator, written = data.partition(b"\n")
    if not separator or written != digest_bytes(body).encode() + b"\n":
        raise WeightsError(f"{where} is truncated or damaged", hint=hint)
    try:
        return parse_json(body, kind)
    except ValueError as error:
        raise WeightsError(f"{where} is not valid: {error}", hint=hint) from None


def parse_manifest(data: bytes, version: Version, form: str) -> Manifest:
    """Parses an untrusted manifest that was found under the key of `version` in `form`."""
    where = f"the manifest of {version} ({form})"
    manifest = unseal(data, Manifest, where)
    if (manifest.version, manifest.form) != (version, form):
        raise WeightsError(f"{where} belongs to {manifest.version} ({manifest.form})", hint=_HINT)
    return manifest


def parse_anchor(data: bytes, manifest: Manifest) -> Anchor:
    """Parses an untrusted anchor that was found under the key of a version. It must fit that version's chunk table."""
    where = f"the anchor of {manifest.version} ({manifest.form})"
    hint = "delete it; a new anchor can be made from the deltas"
    anchor = unseal(data, Anchor, where, hint)
    if (anchor.version, anchor.form, anchor.digest) != (manifest.version, manifest.form, manifest.digest):
        raise WeightsError(f"{where} belongs to {anchor.version} ({anchor.form}) {anchor.digest[:16]}…", hint=hint)
    try:
        if anchor.snapshot.base is not None:
            raise ValueError("an anchor must be a snapshot")
        anchor.snapshot.check(manifest.chunks)
    except ValueError as error:
        raise WeightsError(f"{where} is not valid: {error}", hint=hint) from None
    return anchor


def chunk_table(tensors: tuple[TensorEntry, ...]) -> list[Chunk]:
    return [
        Chunk(tensor, start * tensor.width, stop * tensor.width, digest)
        for tensor in tensors
        for (start, stop), digest in zip(chunk_ranges(tensor.shape), tensor.chunks, strict=True)
    ]


def digest_bytes(data: bytes | memoryview) -> str:
    return blake3(data).hexdigest()


def chunk_digest(data: bytes | memoryview) -> str:
    """The xxh3-128 of a chunk in memory. Many times faster than blake3, because every byte of every version is hashed.

    It checks our own memory and decoding. Data from outside has been checked by its blake3 before.
    """
    return xxhash.xxh3_128_hexdigest(data)


def root_digest(tensors: tuple[TensorEntry, ...]) -> str:
    """One digest for all weights: blake3 over the sorted chunk table as compact JSON."""
    table = [[tensor.name, tensor.dtype, tensor.shape, tensor.chunks] for tensor in tensors]
    return digest_bytes(json.dumps(table, separators=(",", ":")).encode())


def describe(tensors: Tensors) -> tuple[TensorEntry, ...]:
    """The chunk table of tensors in memory."""
    return tuple(
        TensorEntry(
            name=name,
            dtype=tensors[name].dtype,
            shape=tensors[name].shape,
            chunks=tuple(chunk_digest(chunk.data) for chunk in tensors[name].chunks()),
        )
        for name in sorted(tensors)
    )


Layout = tuple[tuple[str, str, tuple[int, ...]], ...]


def layout_of(tensors: Tensors | tuple[TensorEntry, ...]) -> Layout:
    """Names, dtypes and shapes. Two versions must share them for a delta between them."""
    if isinstance(tensors, tuple):
        return tuple((entry.name, entry.dtype, entry.shape) for entry in tensors)
    return tuple((name, tensors[name].dtype, tensors[name].shape) for name in sorted(tensors))
