"""The loops of the codings, compiled: the functions of `plain`, and the buffers the loops work in."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from rollmill.weights.format.kernels import loops
from rollmill.weights.format.kernels.plain import SKIP, UNSIGNED, class_table

_KEPT = 32 << 20  # bytes; a thread keeps its buffer for the next chunk unless it used more than this


class _Buffer(threading.local):
    """Room for the changes before their number is known. The system provides memory only for pages that are written."""

    def __init__(self) -> None:
        self._data = np.empty(0, dtype=np.uint8)

    def room(self, count: int, *kinds: Any) -> list[np.ndarray]:
        """Arrays of `count` elements, valid until this thread calls again."""
        sizes = [-(-count * np.dtype(kind).itemsize // 64) * 64 for kind in kinds]
        if sum(sizes) > self._data.size:
            self._data = np.empty(sum(sizes), dtype=np.uint8)
        ends = np.cumsum(sizes)
        return [
            self._data[end - size : end].view(kind)[:count] for kind, size, end in zip(kinds, sizes, ends, strict=True)
        ]

    def used(self, size: int) -> None:
        if size > _KEPT:
            self._data = np.empty(0, dtype=np.uint8)


_buffer = _Buffer()


def _fixed(array: np.ndarray) -> np.ndarray:
    """A read-only view, or a copy of elements at odd addresses. Loops are compiled per type of argument, and this makes
    every input the same type."""
    view = array.view() if array.flags.aligned else array.copy()
    view.flags.writeable = False
    return view


def _tiles(bits: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """The elements as whole tiles, and the index of the first of each. The last tile is padded with zeros."""
    data = bits.view(np.uint8)
    whole = data.size - data.size % loops.TILE_BYTES
    rest = np.zeros(loops.TILE_BYTES, dtype=np.uint8)
    rest[: data.size - whole] = data[whole:]
    return [
        (start // bits.itemsize, _fixed(part.view(bits.dtype))) for start, part in ((0, data[:whole]), (whole, rest))
    ]


def collect(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    kinds = (np.uint32, old.dtype, old.dtype)
    found = _buffer.room(old.size, *kinds)
    changed = 0
    for (start, old_bits), (_, new_bits) in zip(_tiles(old), _tiles(new), strict=True):
        changed = int(loops.collect(old_bits, new_bits, start, changed, *found))
    _buffer.used(changed * (4 + 2 * old.itemsize))
    return found[0][:changed], found[1][:changed], found[2][:changed]


def collect_classed(
    old: np.ndarray, new: np.ndarray, boundaries: np.ndarray
) -> list[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    totals = np.zeros(loops.MOST_CLASSES, dtype=np.uint32)
    found = _buffer.room(old.size, np.uint32, np.uint8, old.dtype, old.dtype)
    changed = int(loops.collect_classed(_fixed(old), _fixed(new), class_table(boundaries), totals, *found))
    _buffer.used(changed * (5 + 2 * old.itemsize))
    members, classes, differences, values = (array[:changed] for array in found)
    by_class = np.argsort(classes, kind="stable")
    ends = np.cumsum(np.bincount(classes, minlength=boundaries.size + 1))
    return [
        (int(total), members[places], differences[places], values[places])
        for total, places in zip(totals, np.split(by_class, ends[:-1]), strict=False)
    ]


def sparse_streams(old: np.ndarray, new: np.ndarray) -> tuple[int, list[np.ndarray]]:
    """One loop, so that the elements of a tile are still in the cache."""
    most = old.size + old.size // SKIP + 2
    found = _buffer.room(most, np.uint8, np.uint8, np.uint32, old.dtype, old.dtype)
    state = np.zeros(5, dtype=np.uint64)
    for (start, old_bits), (_, new_bits) in zip(_tiles(old), _tiles(new), strict=True):
        loops.encode_sparse(old_bits, new_bits, start, state, *found)
    _, changed, gap_size, odd, bits = map(int, state)
    gaps, signs, exceptions, differences, values = found
    if changed % 8:  # the last byte of signs is padded with zeros
        signs[changed // 8] = (bits << (8 - changed % 8)) & 255
    _buffer.used(gap_size + changed // 8 + odd * (4 + 2 * old.itemsize))
    magnitudes, literals, each = np.empty(odd, np.uint8), np.empty(odd, old.dtype), np.arange(odd, dtype=np.uint32)
    escaped = loops.write_exceptions(
        _fixed(differences[:odd]), _fixed(values[:odd]), _fixed(each), magnitudes, literals
    )
    streams = [gaps[:gap_size], signs[: (changed + 7) // 8], gap_bytes(exceptions[:odd], changed)]
    return changed, [*streams, magnitudes, literals[:escaped].view(np.uint8)]


def gap_bytes(indices: np.ndarray, limit: int) -> np.ndarray:
    data = np.empty(indices.size + limit // SKIP + 1, dtype=np.uint8)
    return data[: loops.write_gaps(_fixed(indices), data)]


def split_differences(differences: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, ...]:
    signs, exceptions = np.empty((differences.size + 7) // 8, np.uint8), np.empty(differences.size, np.uint32)
    exceptions = exceptions[: loops.write_signs(_fixed(differences), signs, exceptions)]
    magnitudes, literals = np.empty(exceptions.size, np.uint8), np.empty(exceptions.size, values.dtype)
    escaped = loops.write_exceptions(_fixed(differences), _fixed(values), _fixed(exceptions), magnitudes, literals)
    return signs, exceptions, magnitudes, literals[:escaped]


def raw_plane(elements: np.ndarray, plane: int) -> np.ndarray:
    data = np.empty(elements.size, dtype=np.uint8)
    loops.raw_plane(_fixed(elements), plane, data)
    return data


def dense_plane(old: np.ndarray, new: np.ndarray, plane: int) -> np.ndarray:
    data = np.empty(old.size, dtype=np.uint8)
    loops.dense_plane(_fixed(old), _fixed(new), plane, data)
    return data


def count_changed(old: np.ndarray, new: np.ndarray) -> int:
    return int(loops.count_changed(_fixed(old), _fixed(new)))


def expand_gaps(gaps: np.ndarray, count: int) -> np.ndarray:
    indices = np.empty(count + 1, dtype=np.uint32)
    loops.expand_gaps(_fixed(gaps), indices)
    return indices[:count]


def expand_differences(
    signs: np.ndarray, exceptions: np.ndarray, magnitudes: np.ndarray, count: int, width: int
) -> np.ndarray:
    differences = np.empty(8 * signs.size, dtype=UNSIGNED[width])
    loops.expand_differences(_fixed(signs), _fixed(exceptions), _fixed(magnitudes), differences)
    return differences[:count]


def add_differences(bits: np.ndarray, indices: np.ndarray, differences: np.ndarray) -> np.ndarray:
    values = np.empty(indices.size, dtype=bits.dtype)
    loops.gather(_fixed(bits), _fixed(indices), values)
    loops.add_differences(values, _fixed(differences))
    return values


def place_members(
    bits: np.ndarray, boundaries: np.ndarray, lists: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray] | None:
    members = np.concatenate(lists)
    ends = np.cumsum([len(places) for places in lists], dtype=np.uint32)
    next_member = np.concatenate([np.zeros(1, np.uint32), ends[:-1]])
    indices, order = np.empty(members.size, np.uint32), np.empty(members.size, np.uint32)
    table = class_table(boundaries)
    placed = loops.place_members(_fixed(bits), table, _fixed(members), next_member, ends, indices, order)
    return (indices, order) if placed == members.size else None


def raw_elements(planes: list[np.ndarray], width: int) -> np.ndarray:
    elements = np.empty(planes[0].size, dtype=UNSIGNED[width])
    for which, plane in enumerate(planes):
        loops.add_plane(elements, _fixed(plane), which)
    loops.rotate_right(elements)
    return elements


def dense_elements(base: np.ndarray, planes: list[np.ndarray]) -> np.ndarray:
    elements = np.empty(base.size, dtype=base.dtype)
    for which, plane in enumerate(planes):
        loops.add_plane(elements, _fixed(plane), which)
    loops.undo_dense(_fixed(base), elements)
    return elements


def scatter(bits: np.ndarray, indices: np.ndarray, values: np.ndarray) -> np.ndarray:
    before = np.empty(indices.size, dtype=bits.dtype)
    loops.scatter(bits, _fixed(indices), _fixed(values), before)
    return before
