"""Named arrays as bytes: one safetensors file inside one zstd frame.

Arrays are written piece by piece, so an array in a file may be larger than memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO

import numpy as np
import safetensors
import zstandard

DTYPES = {"U8": "uint8", "U16": "uint16", "I16": "int16", "I32": "int32", "F32": "float32", "BOOL": "bool"}
_NAMES = {numpy: name for name, numpy in DTYPES.items()}
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class StoredArray:
    """An array in an open file, which is not in memory."""

    file: int
    start: int  # byte in the file
    dtype: np.dtype
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.row_bytes

    def rows(self, begin: int, end: int) -> np.ndarray:
        data = os.pread(self.file, (end - begin) * self.row_bytes, self.start + begin * self.row_bytes)
        return np.frombuffer(data, self.dtype).reshape(-1, *self.shape[1:])

    def allocate(self) -> None:
        """Make the file long enough. What is not written is zero."""
        if os.fstat(self.file).st_size < self.start + self.nbytes:
            os.ftruncate(self.file, self.start + self.nbytes)

    def write(self, begin: int, rows: np.ndarray) -> None:
        view, at = memoryview(rows.tobytes()), self.start + begin * self.row_bytes
        while view:
            written = os.pwrite(self.file, view, at)
            view, at = view[written:], at + written


Array = np.ndarray | StoredArray


def pieces(begin: int, end: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows from `begin` to `end` of a few megabytes each."""
    step = max(1, _PIECE_BYTES // max(1, row_bytes))
    for at in range(begin, end, step):
        yield at, min(end, at + step)


def packed_bytes(arrays: Mapping[str, Array]) -> int:
    return len(_header(arrays)) + sum(array.nbytes for array in arrays.values())


def write_arrays(out: IO[bytes], arrays: Mapping[str, Array]) -> None:
    # the frame states its size: readers refuse one that does not
    compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
    with compressor.stream_writer(out, size=packed_bytes(arrays), closefd=False) as packed:
        packed.write(_header(arrays))
        for array in arrays.values():
            if isinstance(array, np.ndarray) and array.ndim == 0:
                raise ValueError("an array without a dimension")
            row_bytes = array.nbytes // max(1, len(array))
            for begin, end in pieces(0, len(array), row_bytes):
                rows = array.rows(begin, end) if isinstance(array, StoredArray) else array[begin:end]
                packed.write(rows.tobytes())  # in the order of its indices, whatever its strides


def read_arrays(data: bytes) -> dict[str, np.ndarray]:
    """Raises KeyError for a type that is never written, ValueError or a library's error for damaged bytes."""
    parts = safetensors.deserialize(zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False))
    return {name: np.frombuffer(part["data"], DTYPES[part["dtype"]]).reshape(part["shape"]) for name, part in parts}


def _header(arrays: Mapping[str, Array]) -> bytes:
    listed, at = {}, 0
    for name, array in arrays.items():
        kind, shape = _NAMES[array.dtype.name], list(array.shape)
        listed[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(listed).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
