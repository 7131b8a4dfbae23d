"""Host tensors and their canonical chunks. No torch: bf16 and fp8 travel as raw bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rollmill.errors import WeightsError

# Bytes per element. No form uses wider elements, which limits a chunk to 64 MiB.
WIDTHS: Mapping[str, int] = {
    "bf16": 2,
    "fp16": 2,
    "fp32": 4,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "fp4x2": 1,  # two 4-bit numbers per byte, the first in its low half; shapes count bytes
}
CHUNK_ELEMENTS = 1 << 24
LARGEST_TENSOR = 1 << 42  # elements; a manifest that claims more is refused
QUANTISATION_ROWS = 128  # chunks start on multiples of this many rows, so that a quantisation block is never cut


@dataclass(frozen=True)
class HostTensor:
    """One tensor in host memory, as the bytes that are served."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray  # uint8, flat, contiguous, little-endian elements in row-major order

    def __post_init__(self) -> None:
        if self.dtype not in WIDTHS:
            raise WeightsError(f"unknown dtype {self.dtype!r}", hint=f"one of {', '.join(WIDTHS)}")
        if self.data.dtype != np.uint8 or self.data.ndim != 1 or not self.data.flags.c_contiguous:
            raise WeightsError(
                f"host tensor data is {self.data.dtype} {self.data.shape}, not flat contiguous uint8",
                hint="np.ascontiguousarray(array).reshape(-1).view(np.uint8)",
            )
        if self.data.size != self.elements * self.width:
            raise WeightsError(
                f"{self.dtype} {self.shape} has {self.elements * self.width} bytes, not {self.data.size}"
            )

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        return WIDTHS[self.dtype]

    def chunks(self) -> list[np.ndarray]:
        """Views of the canonical chunks."""
        return [self.data[a * self.width : b * self.width] for a, b in chunk_ranges(self.shape)]


Tensors = Mapping[str, HostTensor]


@functools.lru_cache(maxsize=4096)
def chunk_ranges(shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Element ranges of a tensor's chunks: whole rows. They depend on the shape alone, so every sharding has the same.

    A row is what one index of the leading dimension selects. If a row is larger than a chunk, further dimensions are
    folded into the leading one.
    """
    dimensions = list(shape) or [1]
    row = math.prod(dimensions[1:])
    folded = 1
    while row > CHUNK_ELEMENTS and folded < len(dimensions):
        row //= dimensions[folded]
        folded += 1
    rows = CHUNK_ELEMENTS // max(row, 1)
    if rows > QUANTISATION_ROWS:
        rows -= rows % QUANTISATION_ROWS
    step, total = rows * row, math.prod(dimensions)
    return tuple((start, min(start + step, total)) for start in range(0, total, max(step, 1)))
