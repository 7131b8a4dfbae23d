"""Reads and writes one safetensors file. A file is untrusted: its header is checked before anything in it is used.

    8 bytes        length of the header, little-endian
    header         JSON: {name: {"dtype", "shape", "data_offsets": [start, stop]}, "__metadata__": {…}}
    data           the tensors; offsets count from here, without holes and without overlap

Data is mapped, not read: a tensor uses memory only while it is accessed. Only safetensors files are read, because they
contain no code (loading a pickled .bin would run whatever its author put into it).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field

from rollmill.errors import WeightsError
from rollmill.strict import StrictModel, parse_json
from rollmill.weights.format.tensors import LARGEST_TENSOR, HostTensor, Tensors

Advance = Callable[[int], object]  # called with the number of bytes of each piece of work, for progress bars
LARGEST_HEADER = 100_000_000  # the limit of the reference implementation
# A header takes memory and time before a byte of data is looked at: it may be as long as the data, or this long
_SHORT_HEADER = 1 << 20
MOST_TENSORS = 1 << 18  # of one file; a mixture of 10^12 parameters has some 10^5 in all
DTYPES: Mapping[str, str] = {
    "bf16": "BF16",
    "fp16": "F16",
    "fp32": "F32",
    "fp8_e4m3": "F8_E4M3",
    "fp8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
}
_Number = Annotated[int, Field(ge=0, lt=1 << 62)]
SERVED = {theirs: ours for ours, theirs in DTYPES.items()}
# Bytes per element of every dtype a file may have. Dtypes that no form supports are refused later, by name.
_WIDTHS: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


class StoredTensor(NamedTuple):
    """One tensor as stored in the file."""

    dtype: str  # as the file names it: BF16, F32, …
    shape: tuple[int, ...]
    data: np.ndarray  # uint8, flat, mapped read-only

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_file(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a file, mapped. Raises WeightsError if the header and the file disagree."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise _damaged(path, "it is truncated: its header goes past its end")
            if length > min(LARGEST_HEADER, max(_SHORT_HEADER, size - 8 - length)):
                raise _damaged(path, f"its header claims {length} bytes, its data {size - 8 - length}")
            text = file.read(length)
            if text.count(b"{") > MOST_TENSORS:
                raise _damaged(path, f"its header has more than {MOST_TENSORS} tensors")
            header = _parse_header(path, text)
        data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))[8 + length :]
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from None
    return _tensors(path, header, data)


class Entry(NamedTuple):
    """A tensor to be written. Its bytes are produced when they are written."""

    name: str
    dtype: str  # as the file names it
    shape: tuple[int, ...]
    size: int  # bytes
    width: int  # bytes per element
    pieces: Callable[[], Iterable[memoryview]]


def host_entries(tensors: Tensors) -> list[Entry]:
    """Entries for tensors in host memory, written chunk by chunk."""

    def entry(name: str, tensor: HostTensor) -> Entry:
        def pieces() -> list[memoryview]:
            return [chunk.data for chunk in tensor.chunks()]

        return Entry(name, DTYPES[tensor.dtype], tensor.shape, tensor.data.size, tensor.width, pieces)

    return [entry(name, tensor) for name, tensor in tensors.items()]


def write_entries(file: BinaryIO, entries: Iterable[Entry], advance: Advance = lambda _: None) -> None:
    """Writes the same bytes each time, in the layout of the reference implementation."""
    ordered = sorted(entries, key=lambda entry: (-entry.width, entry.name))  # wide elements first keeps all aligned
    # other loaders recognise a PyTorch checkpoint by this metadata
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in ordered:
        span = [offset, offset + entry.size]
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": span}
        offset += entry.size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for entry in ordered:
        for piece in entry.pieces():
            file.write(piece)
            advance(piece.nbytes)


class _TensorHeader(StrictModel):
    dtype: str
    shape: tuple[_Number, ...] = Field(max_length=16)
    data_offsets: tuple[_Number, _Number]


class _Header(StrictModel):
    """All tensors by name, and free text that is ignored."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, _TensorHeader]

    metadata: dict[str, str] | None = Field(default=None, alias="__metadata__")


def _parse_header(path: Path, text: bytes) -> dict[str, _TensorHeader]:
    try:
        return parse_json(text, _Header).__pydantic_extra__
    except ValueError as error:
        raise _damaged(path, f"its header is not valid: {error}") from None


def _tensors(path: Path, header: Mapping[str, _TensorHeader], data: np.ndarray) -> dict[str, StoredTensor]:
    """The tensors, checked for holes and overlaps. A name that is twice in the header leaves a hole."""
    found: dict[str, StoredTensor] = {}
    reached = 0
    for name, entry in sorted(header.items(), key=lambda item: (item[1].data_offsets, item[0])):
        start, stop = entry.data_offsets
        _check_size(path, name, entry)
        if start != reached:
            raise _damaged(path, f"{name!r} {'overlaps another tensor' if start < reached else 'leaves a hole'}")
        if stop > data.size:
            raise _damaged(path, f"it is truncated: {name!r} ends at byte {stop} of {data.size}")
        reached = stop
        found[name] = StoredTensor(entry.dtype, entry.shape, data[start:stop])
    if reached != data.size:
        raise _damaged(path, f"{data.size - reached} bytes at its end do not belong to any tensor")
    return found


def _check_size(path: Path, name: str, entry: _TensorHeader) -> None:
    """A tensor's dtype, shape and offsets must agree with each other."""
    if entry.dtype not in _WIDTHS:
        raise _damaged(path, f"{name!r} has the unknown dtype {entry.dtype!r}")
    elements, size = math.prod(entry.shape), entry.data_offsets[1] - entry.data_offsets[0]
    if elements > LARGEST_TENSOR or size != elements * _WIDTHS[entry.dtype]:
        raise _damaged(path, f"{name!r} is {entry.dtype} {list(entry.shape)}, which is not {size} bytes")


def _damaged(path: Path, why: str) -> WeightsError:
    return WeightsError(f"{path} is not a whole safetensors file: {why}", hint="copy or download it again")
