"""The loops of the codings in numpy. `compiled` has the same functions; FORMAT.md explains the streams.

Elements are little-endian unsigned integers of one, two or four bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SKIP = 255  # a gap byte that means: 255 unchanged elements, and the gap goes on
UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
_SIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4")}

# --- encoding


def collect(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The changed elements: their indices, ordered differences and new values."""
    indices = np.flatnonzero(old != new)
    values = new[indices]
    return indices.astype(np.uint32), _ordered(values) - _ordered(old[indices]), values


def sparse_streams(old: np.ndarray, new: np.ndarray) -> tuple[int, list[np.ndarray]]:
    """The number of changed elements and the five streams of `sparse`, valid until this thread encodes again."""
    indices, differences, values = collect(old, new)
    signs, exceptions, magnitudes, literals = split_differences(differences, values)
    gaps = gap_bytes(indices, new.size), gap_bytes(exceptions, indices.size)
    return indices.size, [gaps[0], signs, gaps[1], magnitudes, literals.view(np.uint8)]


def collect_classed(
    old: np.ndarray, new: np.ndarray, boundaries: np.ndarray
) -> list[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """Per class: an upper bound of its members, and `collect` among the members alone."""
    classes = _classes(old, boundaries)
    members = [np.flatnonzero(classes == which) for which in range(boundaries.size + 1)]
    return [(inside.size, *collect(old[inside], new[inside])) for inside in members]


def gap_bytes(indices: np.ndarray, limit: int) -> np.ndarray:
    """Ascending indices below `limit` as gap bytes."""
    gaps: np.ndarray = np.diff(indices.astype(np.int64), prepend=-1) - 1
    ends = np.cumsum(gaps // SKIP + 1)
    data = np.full(int(ends[-1]) if ends.size else 0, SKIP, dtype=np.uint8)
    data[ends - 1] = gaps % SKIP
    return data


def split_differences(differences: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, ...]:
    """Signs, one bit each; indices of differences other than ±1; one byte per such difference; literals."""
    negative = differences.view(_SIGNED[differences.itemsize]) < 0
    magnitude = np.where(negative, np.negative(differences), differences)
    exceptions = np.flatnonzero(magnitude != 1)
    unusual = magnitude[exceptions]
    escaped = unusual > 255
    magnitudes = np.where(escaped, 0, unusual).astype(np.uint8)
    return np.packbits(negative), exceptions.astype(np.uint32), magnitudes, values[exceptions[escaped]]


def raw_plane(elements: np.ndarray, plane: int) -> np.ndarray:
    """One byte of each element, after rotating it left by one bit."""
    return _plane(_rotated(elements, 1), plane)


def dense_plane(old: np.ndarray, new: np.ndarray, plane: int) -> np.ndarray:
    """One byte of each zigzagged difference."""
    difference = _ordered(new) - _ordered(old)
    one, sign = difference.dtype.type(1), _all_sign(difference)
    return _plane((difference << one) ^ sign, plane)


def count_changed(old: np.ndarray, new: np.ndarray) -> int:
    return int(np.count_nonzero(old != new))


# --- decoding


def expand_gaps(gaps: np.ndarray, count: int) -> np.ndarray:
    """The `count` indices that the gap bytes encode."""
    # each skip byte stands for 255 elements, each other byte for its gap and the element itself
    ends = np.flatnonzero(gaps != SKIP)
    return (np.cumsum(gaps + (gaps != SKIP).astype(np.int64))[ends] - 1).astype(np.uint32)


def expand_differences(
    signs: np.ndarray, exceptions: np.ndarray, magnitudes: np.ndarray, count: int, width: int
) -> np.ndarray:
    """One difference per change; 0 marks an element beyond a byte."""
    magnitude = np.ones(count, dtype=UNSIGNED[width])
    magnitude[exceptions] = magnitudes
    negative = np.unpackbits(signs, count=count).view(bool)
    return np.where(negative, np.negative(magnitude), magnitude)


def add_differences(bits: np.ndarray, indices: np.ndarray, differences: np.ndarray) -> np.ndarray:
    """The elements at `indices` plus their differences."""
    return _unordered(_ordered(bits[indices]) + differences)


def place_members(
    bits: np.ndarray, boundaries: np.ndarray, lists: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Converts places among the members of each class to ascending indices in the chunk, and the place of each in the
    lists.

    Returns None if a class has fewer members than its list says.
    """
    classes = _classes(bits, boundaries)
    parts = []
    for which, places in enumerate(lists):
        members = np.flatnonzero(classes == which)
        if places.size and places[-1] >= members.size:
            return None
        parts.append(members[places])
    indices = np.concatenate(parts)
    order = np.argsort(indices, kind="stable")
    return indices[order].astype(np.uint32), order.astype(np.uint32)


def join_planes(planes: list[np.ndarray], width: int) -> np.ndarray:
    """Elements from their bytes."""
    data = np.empty(planes[0].size * width, dtype=np.uint8)
    for which, plane in enumerate(planes):
        data[which::width] = plane
    return data.view(UNSIGNED[width])


def raw_elements(planes: list[np.ndarray], width: int) -> np.ndarray:
    return _rotated(join_planes(planes, width), 8 * width - 1)


def dense_elements(base: np.ndarray, planes: list[np.ndarray]) -> np.ndarray:
    zigzagged = join_planes(planes, base.itemsize)
    one = zigzagged.dtype.type(1)
    return _unordered(_ordered(base) + ((zigzagged >> one) ^ np.negative(zigzagged & one)))


def scatter(bits: np.ndarray, indices: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Writes elements and returns the previous ones. The indices must lie in `bits`."""
    before = bits[indices]
    bits[indices] = values
    return before


# --- elements


def magnitude_bytes(bits: np.ndarray) -> np.ndarray:
    """The eight bits below the sign: for floating-point numbers of two or more bytes, mostly the exponent."""
    if bits.itemsize == 1:
        return bits & np.uint8(127)
    return (bits >> bits.dtype.type(8 * bits.itemsize - 9)).astype(np.uint8)


def class_table(boundaries: np.ndarray) -> np.ndarray:
    """The class of each magnitude byte: how many boundaries are at most that byte."""
    return np.searchsorted(boundaries, np.arange(256), side="right").astype(np.uint8)


def _classes(bits: np.ndarray, boundaries: np.ndarray) -> np.ndarray:
    return class_table(boundaries)[magnitude_bytes(bits)]


def _plane(elements: np.ndarray, plane: int) -> np.ndarray:
    return np.ascontiguousarray(elements.view(np.uint8)[plane :: elements.itemsize])


def _rotated(bits: np.ndarray, by: int) -> np.ndarray:
    kind = bits.dtype.type
    return (bits << kind(by)) | (bits >> kind(8 * bits.itemsize - by))


def _ordered(bits: np.ndarray) -> np.ndarray:
    """Sign-magnitude bit patterns as integers in numeric order: …, −1 ULP, −0, +0, +1 ULP, …"""
    return bits ^ (_all_sign(bits) | _top(bits))


def _unordered(integers: np.ndarray) -> np.ndarray:
    return integers ^ (~_all_sign(integers) | _top(integers))


def _all_sign(bits: np.ndarray) -> np.ndarray:
    """All ones where the top bit is set, otherwise all zeros."""
    return (bits.view(_SIGNED[bits.itemsize]) >> (8 * bits.itemsize - 1)).view(bits.dtype)


def _top(bits: np.ndarray) -> Any:
    return bits.dtype.type(1 << (8 * bits.itemsize - 1))
