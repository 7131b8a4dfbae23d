"""Compares two versions of any lines, tensor by tensor: how many elements changed, and by how much in units in the
last place and in value.

Chunk tables are compared first: a chunk with the same digest in both is equal, and its bytes are not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollmill.weights.format.manifest import Manifest, TensorEntry
from rollmill.weights.format.tensors import HostTensor, Tensors, chunk_ranges

Advance = Callable[[int], object]
_PIECE = 1 << 22  # elements compared at a time
_FP8_BIAS_AND_BITS = {"fp8_e4m3": (7, 3), "fp8_e5m2": (15, 2)}


@dataclass(frozen=True)
class TensorChange:
    """One tensor that both versions have, with the same dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    changed: int = 0
    by_one: int = 0  # changed elements that moved by one unit in the last place
    largest_ulp: int = 0  # the largest move in units in the last place (integer dtypes: the largest difference)
    largest_value: float = 0.0  # the largest |new − old| where both are finite
    not_finite: int = 0  # changed elements that are now NaN or infinite

    @property
    def share(self) -> float:
        return self.changed / max(self.elements, 1)


@dataclass(frozen=True)
class Comparison:
    added: tuple[str, ...]
    removed: tuple[str, ...]
    reshaped: tuple[str, ...]  # another shape or another dtype
    tensors: tuple[TensorChange, ...]  # the others, by name

    @property
    def same(self) -> bool:
        return not (self.added or self.removed or self.reshaped or any(tensor.changed for tensor in self.tensors))

    @property
    def total(self) -> TensorChange:
        """All tensors together."""
        counts = {
            key: sum(getattr(tensor, key) for tensor in self.tensors)
            for key in ("elements", "changed", "by_one", "not_finite")
        }
        ulp = max((tensor.largest_ulp for tensor in self.tensors), default=0)
        value = max((tensor.largest_value for tensor in self.tensors), default=0.0)
        return TensorChange("all", "", (), largest_ulp=ulp, largest_value=value, **counts)


def compare(
    old: Manifest,
    new: Manifest,
    read_old: Callable[[], Tensors],
    read_new: Callable[[], Tensors],
    advance: Advance = lambda _: None,
) -> Comparison:
    """`read_old` and `read_new` are called only if the chunk tables differ. `advance` counts every byte."""
    before, after = ({entry.name: entry for entry in manifest.tensors} for manifest in (old, new))
    both = sorted(before.keys() & after.keys())
    alike = [name for name in both if _layout(before[name]) == _layout(after[name])]
    loaded: tuple[Tensors, Tensors] | None = None
    changes = []
    for name in alike:
        entry = after[name]
        elements = math.prod(entry.shape)
        change = TensorChange(name, entry.dtype, entry.shape, elements)
        if before[name].chunks != entry.chunks:
            loaded = loaded or (read_old(), read_new())
            change = _compare_tensor(change, loaded[0][name], loaded[1][name], before[name], entry)
        changes.append(change)
        advance(entry.bytes)
    return Comparison(
        added=tuple(sorted(after.keys() - before.keys())),
        removed=tuple(sorted(before.keys() - after.keys())),
        reshaped=tuple(name for name in both if name not in set(alike)),
        tensors=tuple(changes),
    )


def _layout(entry: TensorEntry) -> tuple[str, tuple[int, ...]]:
    return entry.dtype, entry.shape


def _compare_tensor(
    change: TensorChange, old: HostTensor, new: HostTensor, before: TensorEntry, after: TensorEntry
) -> TensorChange:
    counts = {"changed": 0, "by_one": 0, "not_finite": 0}
    largest_ulp, largest_value = 0, 0.0
    for (first, last), one, other in zip(chunk_ranges(after.shape), before.chunks, after.chunks, strict=True):
        if one == other:
            continue
        for start in range(first, last, _PIECE):
            cut = slice(start * new.width, min(start + _PIECE, last) * new.width)
            found = _compare_piece(old.data[cut], new.data[cut], new.dtype)
            for key in counts:
                counts[key] += found[key]
            largest_ulp = max(largest_ulp, found["largest_ulp"])
            largest_value = max(largest_value, found["largest_value"])
    return TensorChange(
        change.name, change.dtype, change.shape, change.elements,
        largest_ulp=largest_ulp, largest_value=largest_value, **counts,
    )  # fmt: skip


def _compare_piece(old: np.ndarray, new: np.ndarray, dtype: str) -> dict[str, Any]:
    width = 4 if dtype in ("fp32", "int32") else 2 if dtype in ("bf16", "fp16") else 1
    old_bits, new_bits = old.view(f"<u{width}"), new.view(f"<u{width}")
    changed = np.flatnonzero(old_bits != new_bits)
    old_bits, new_bits = old_bits[changed], new_bits[changed]
    moved = np.abs(_ordered(new_bits, dtype) - _ordered(old_bits, dtype))
    old_values, new_values = (_values(bits, dtype) for bits in (old_bits, new_bits))
    finite = np.isfinite(old_values) & np.isfinite(new_values)
    distance = np.abs(new_values[finite] - old_values[finite])
    return {
        "changed": int(changed.size),
        "by_one": int(np.count_nonzero(moved == 1)),
        "largest_ulp": int(moved.max(initial=0)),
        "largest_value": float(distance.max(initial=0.0)),
        "not_finite": int(np.count_nonzero(~np.isfinite(new_values))),
    }


def _ordered(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Signed integers in the order of the numbers: floats count magnitudes up from +0 and down from −0."""
    width = bits.dtype.itemsize
    if dtype in ("int8", "int32"):
        return bits.view(f"<i{width}").astype(np.int64)
    wide = bits.astype(np.int64)
    if dtype == "uint8":
        return wide
    top = 1 << (8 * width - 1)
    return np.where(wide >= top, top - 1 - wide, wide)  # −0 is one below +0


def _values(bits: np.ndarray, dtype: str) -> np.ndarray:
    width = bits.dtype.itemsize
    if dtype == "bf16":
        return (bits.astype("<u4") << np.uint32(16)).view("<f4").astype(np.float64)
    if dtype in ("fp16", "fp32"):
        return bits.view(f"<f{width}").astype(np.float64)
    if dtype in _FP8_BIAS_AND_BITS:
        return _FP8[dtype][bits]
    return _ordered(bits, dtype).astype(np.float64)


def _fp8_table(dtype: str) -> np.ndarray:
    bias, bits = _FP8_BIAS_AND_BITS[dtype]
    codes = np.arange(256)
    exponent, fraction = (codes & 127) >> bits, codes & ((1 << bits) - 1)
    scale = np.where(exponent == 0, fraction, fraction + (1 << bits)) * 2.0**-bits
    values = np.where(codes < 128, 1.0, -1.0) * scale * 2.0 ** (np.maximum(exponent, 1) - bias)
    if dtype == "fp8_e4m3":
        values[[127, 255]] = np.nan  # e4m3 has no infinities: its last exponent holds numbers too
    else:
        last = exponent == 31
        values[last] = np.where(fraction[last] == 0, np.where(codes[last] < 128, np.inf, -np.inf), np.nan)
    return values


_FP8 = {dtype: _fp8_table(dtype) for dtype in _FP8_BIAS_AND_BITS}
