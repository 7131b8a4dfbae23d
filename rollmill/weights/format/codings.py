"""Codings: the bytes of one chunk, alone or as the difference from the same chunk of a base. Lossless, bit for bit.

    raw        byte planes of the elements themselves, the exponent in a plane of its own; needs no base
    dense      byte planes of every element's difference from the base
    sparse     only the elements that changed: gaps between indices, signs, and differences other than ±1
    classed    `sparse` per class of elements (by exponent in the base), because small weights change more often
    overwrite  gaps, and the new elements themselves; needs no base, and applying it twice is harmless

Differences are counted in units in the last place. Elements are mapped to integers that keep the order of the numbers
(a bijection: −0, NaN payloads and subnormals each have their own integer) and subtracted modulo 2^width. So one
optimizer step is mostly ±1, and every value comes back exactly without a special case.

Payloads are untrusted: decoding returns elements of the chunk or raises WeightsError. The caller checks the chunk's
digest, which tells whether they are the right elements. Loops over elements are in `kernels`; their inputs are checked
here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Literal, NamedTuple, get_args

import numpy as np

from rollmill.errors import WeightsError
from rollmill.weights.format.byte_streams import Streams, pack_streams
from rollmill.weights.format.kernels import kernels_for, plain
from rollmill.weights.format.kernels.plain import SKIP, UNSIGNED

Coding = Literal["raw", "dense", "sparse", "classed", "overwrite"]
CODINGS: tuple[Coding, ...] = get_args(Coding)
SPARSE_CODINGS: frozenset[Coding] = frozenset({"sparse", "classed", "overwrite"})
Goal = Literal["fast", "small", "overwrite"]  # what deltas are optimised for: speed, size, or needing no base

_FEW, _MANY = 1 / 16, 3 / 4  # shares of changed elements: from the first on `dense` is tried, from the second on `raw`
_STRETCH = 4096  # elements; codings are compared on stretches of a chunk
_STRETCHES: dict[Goal, int] = {"fast": 16, "small": 64, "overwrite": 0}
MOST_CLASSES = 8
_CLASS_BITS = 8 * 150  # the fixed cost of one more class: lengths, and the tables of its entropy coders


class EncodedPayload(NamedTuple):
    coding: Coding
    payload: bytes
    changed: int  # elements; 0 means there is nothing to send


class Changes(NamedTuple):
    """Elements of a chunk and their new values."""

    indices: np.ndarray  # uint32, ascending
    values: np.ndarray  # unsigned integers of the element's width


class _Plan(NamedTuple):
    coding: Coding
    boundaries: np.ndarray  # of classes


# --- encoding


def encode_full(new: np.ndarray, width: int) -> bytes:
    """`raw` payload of a chunk given as flat uint8."""
    bits = new.view(UNSIGNED[width])
    kernels = kernels_for(bits.size)
    return pack_streams(kernels.raw_plane(bits, plane) for plane in range(width))


def encode_difference(base: np.ndarray, new: np.ndarray, width: int, goal: Goal = "fast") -> EncodedPayload:
    """The payload that turns `base` into `new` (flat uint8), in the best coding for `goal`."""
    old_bits, new_bits = base.view(UNSIGNED[width]), new.view(UNSIGNED[width])
    plan = _choose(old_bits, new_bits, goal)
    changed, streams = _streams(plan, old_bits, new_bits)
    return EncodedPayload(plan.coding, pack_streams(streams), changed) if changed else EncodedPayload("sparse", b"", 0)


def encode_as(coding: Coding, old: np.ndarray, new: np.ndarray, width: int) -> bytes:
    """The payload in a given coding. Elements are unsigned integers of their width."""
    boundaries = _boundaries(*_sample(old, new, "small")) if coding == "classed" else np.empty(0, np.uint8)
    return pack_streams(_streams(_Plan(coding, boundaries), old, new)[1])


def _streams(plan: _Plan, old: np.ndarray, new: np.ndarray) -> tuple[int, Iterable[np.ndarray]]:
    """The number of elements that differ, and the streams of the payload, mostly generated on demand."""
    kernels = kernels_for(new.size)
    if plan.coding == "raw":
        return kernels.count_changed(old, new), (kernels.raw_plane(new, plane) for plane in range(new.itemsize))
    if plan.coding == "dense":
        planes = (kernels.dense_plane(old, new, plane) for plane in range(new.itemsize))
        return kernels.count_changed(old, new), planes
    if plan.coding == "classed":
        classes = kernels.collect_classed(old, new, plan.boundaries)
        return sum(found[1].size for found in classes), _classed_streams(kernels, plan.boundaries, classes)
    if plan.coding == "sparse":
        return kernels.sparse_streams(old, new)
    indices, _, values = kernels.collect(old, new)
    return indices.size, _overwrite_streams(kernels, new.size, indices, values)


def _sparse_streams(
    kernels: ModuleType, size: int, indices: np.ndarray, differences: np.ndarray, values: np.ndarray
) -> Iterator[np.ndarray]:
    yield kernels.gap_bytes(indices, size)
    signs, exceptions, magnitudes, literals = kernels.split_differences(differences, values)
    yield signs
    yield kernels.gap_bytes(exceptions, indices.size)
    yield magnitudes
    yield literals.view(np.uint8)


def _classed_streams(
    kernels: ModuleType, boundaries: np.ndarray, classes: Iterable[tuple[int, np.ndarray, np.ndarray, np.ndarray]]
) -> Iterator[np.ndarray]:
    yield boundaries
    for size, members, differences, values in classes:
        yield from _sparse_streams(kernels, size, members, differences, values)


def _overwrite_streams(kernels: ModuleType, size: int, indices: np.ndarray, values: np.ndarray) -> Iterator[np.ndarray]:
    yield kernels.gap_bytes(indices, size)
    for plane in range(values.itemsize):
        yield kernels.raw_plane(values, plane)


# --- choosing a coding


def _choose(old: np.ndarray, new: np.ndarray, goal: Goal) -> _Plan:
    """The coding with the smallest estimated payload among those that serve `goal`. The estimate uses a sample.

    A sample can mislead. The payload is then larger than necessary, but never wrong.
    """
    none = np.empty(0, dtype=np.uint8)
    if goal == "overwrite":
        return _Plan("overwrite", none)
    old_sample, new_sample, scale = _sample(old, new, goal)
    boundaries = _boundaries(old_sample, new_sample, scale) if goal == "small" else none
    plans = [_Plan("classed", boundaries) if boundaries.size else _Plan("sparse", none)]
    share = np.count_nonzero(old_sample != new_sample) / max(new_sample.size, 1)
    if share >= _FEW:
        plans.append(_Plan("dense", none))
    if share >= _MANY:
        plans.append(_Plan("raw", none))
    if len(plans) == 1:
        return plans[0]
    return min(plans, key=lambda plan: len(pack_streams(_streams(plan, old_sample, new_sample)[1])))


def _sample(old: np.ndarray, new: np.ndarray, goal: Goal) -> tuple[np.ndarray, np.ndarray, float]:
    """Evenly spread stretches of the elements, and the ratio of the whole to the sample."""
    stretches = _STRETCHES[goal]
    if new.size <= stretches * _STRETCH:
        return old, new, 1.0
    starts = np.linspace(0, new.size - _STRETCH, stretches).astype(np.int64)
    old_sample, new_sample = (np.concatenate([bits[s : s + _STRETCH] for s in starts]) for bits in (old, new))
    return old_sample, new_sample, new.size / new_sample.size


def _boundaries(old: np.ndarray, new: np.ndarray, scale: float) -> np.ndarray:
    indices, differences, _ = plain.collect(old, new)
    one = differences.dtype.type(1)
    unusual = indices[(differences != one) & (differences != np.negative(one))]
    elements, changed, odd = (
        np.bincount(plain.magnitude_bytes(bits), minlength=256) for bits in (old, old[indices], old[unusual])
    )
    return choose_boundaries(elements, changed, odd, scale)


# --- classes
#
# One step moves all weights by about the same amount, so a small weight (with a small unit in the last place) changes
# far more often than a large one. The positions of the changes take fewer bits when each class of magnitudes is coded
# separately. A class of N elements of which n changed costs about N times the entropy of n / N. Changes other than ±1
# are priced the same way. Dynamic programming over the values that occur finds the cheapest cut into classes exactly.


def choose_boundaries(elements: np.ndarray, changed: np.ndarray, unusual: np.ndarray, scale: float) -> np.ndarray:
    """Ascending bytes. The class of an element is the number of boundaries that are at most its magnitude byte.

    The arguments are counts per magnitude byte (256 each): of all elements, of the changed ones, and of those that
    changed by other than ±1. `scale` is the ratio of the whole to what was counted.
    """
    present = np.flatnonzero(elements)
    if present.size < 2:
        return np.empty(0, dtype=np.uint8)
    totals = [np.concatenate([[0.0], np.cumsum(counts[present])]) for counts in (elements, changed, unusual)]
    inside, moved, odd = (np.maximum(total[None, :] - total[:, None], 0) for total in totals)  # from row to column
    bits = scale * (_entropy(moved, inside) + _entropy(odd, moved)) + _CLASS_BITS
    bits[np.tril_indices(present.size + 1)] = np.inf
    # cost[j]: the cost of the values before the j-th; cuts[k][j]: where the last of k + 1 classes begins
    cost, cuts, best = bits[0], [np.zeros(present.size + 1, dtype=np.intp)], (bits[0, -1], 0)
    for more in range(1, MOST_CLASSES):
        ways = cost[:, None] + bits
        cuts.append(ways.argmin(axis=0))
        cost = ways.min(axis=0)
        best = min(best, (cost[-1], more))
    boundaries, place = [], present.size
    for more in range(best[1], 0, -1):
        place = int(cuts[more][place])
        boundaries.append(int(present[place]))
    return np.array(boundaries[::-1], dtype=np.uint8)


def _entropy(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """The bits needed to say which `part` elements of `whole` are meant."""
    share = np.clip(part / np.maximum(whole, 1), 1e-9, 1 - 1e-9)
    return np.asarray(-whole * (share * np.log2(share) + (1 - share) * np.log2(1 - share)))


# --- decoding


def decode_chunk(
    coding: Coding, payload: bytes | memoryview, base: np.ndarray | None, size: int, width: int
) -> np.ndarray:
    """The decoded chunk (flat uint8, `size` bytes, newly allocated)."""
    if coding != "raw" and base is None:
        raise WeightsError(f"a {coding} payload needs a base")
    if size % width or (base is not None and base.size != size):
        raise WeightsError(f"a chunk of {size} bytes cannot have this base, or elements of {width} bytes")
    try:
        if base is not None and coding in SPARSE_CODINGS:
            changes = decode_changes(coding, payload, base, width)
            result = base.copy()
            scatter(result, changes, width)
            return result
        streams, kernels = Streams(payload), kernels_for(size // width)
        planes = [streams.exactly(size // width) for _ in range(width)]
        streams.end()
        if base is None or coding == "raw":
            return kernels.raw_elements(planes, width).view(np.uint8)
        return kernels.dense_elements(base.view(UNSIGNED[width]), planes).view(np.uint8)
    except MemoryError:
        raise WeightsError(f"not enough memory to decode a chunk of {size} bytes") from None


def decode_changes(coding: Coding, payload: bytes | memoryview, base: np.ndarray, width: int) -> Changes:
    """The elements that a sparse coding changes, with their new values. The base is not modified."""
    bits = base.view(UNSIGNED[width])
    streams, kernels = Streams(payload), kernels_for(bits.size)
    if coding == "sparse":
        moves = _Moves(kernels, streams, bits.size, width)
        values = kernels.add_differences(bits, moves.indices, moves.differences)
        values[moves.escaped] = moves.literals
        changes = Changes(moves.indices, values)
    elif coding == "classed":
        changes = _decode_classed(kernels, streams, bits)
    elif coding == "overwrite":
        indices = _read_gaps(kernels, streams, bits.size)
        planes = [streams.exactly(indices.size) for _ in range(width)]
        changes = Changes(indices, kernels.raw_elements(planes, width))
    else:
        raise WeightsError(f"a {coding} payload is not a list of changes")
    streams.end()
    return changes


def scatter(chunk: np.ndarray, changes: Changes, width: int) -> np.ndarray:
    """Writes the changes into a chunk (flat uint8). Returns the previous values, so that they can be restored."""
    bits = chunk.view(UNSIGNED[width])
    if changes.indices.size and int(changes.indices.max()) >= bits.size:
        raise WeightsError(f"changes of a larger chunk than one of {chunk.size} bytes")
    return kernels_for(bits.size).scatter(bits, changes.indices, changes.values)


class _Moves:
    """The five streams of `sparse`, read and checked: differences of elements with indices below `limit`, literals."""

    def __init__(self, kernels: ModuleType, streams: Streams, limit: int, width: int) -> None:
        self.indices = _read_gaps(kernels, streams, limit)
        count = self.indices.size
        signs = streams.exactly((count + 7) // 8)
        exceptions = _read_gaps(kernels, streams, count)
        magnitudes = streams.exactly(exceptions.size)
        self.differences = kernels.expand_differences(signs, exceptions, magnitudes, count, width)
        self.escaped = exceptions[magnitudes == 0]
        self.literals = streams.exactly(self.escaped.size * width).view(UNSIGNED[width])


def _decode_classed(kernels: ModuleType, streams: Streams, bits: np.ndarray) -> Changes:
    boundaries = streams.at_most(MOST_CLASSES - 1)
    if np.any(boundaries[1:] <= boundaries[:-1]):
        raise WeightsError("the boundaries of a classed payload are not ascending")
    classes: list[_Moves] = []
    changed = 0
    for _ in range(boundaries.size + 1):
        classes.append(_Moves(kernels, streams, bits.size, bits.itemsize))
        changed += classes[-1].indices.size
        if changed > bits.size:
            raise WeightsError(f"a payload changes {changed} elements of {bits.size}")
    placed = kernels.place_members(bits, boundaries, [moves.indices for moves in classes])
    if placed is None:
        raise WeightsError("a payload changes more elements of a class than the class has")
    indices, order = placed
    differences = np.concatenate([moves.differences for moves in classes])[order]
    values = kernels.add_differences(bits, indices, differences)
    escaped = np.flatnonzero(differences == 0)
    if escaped.size:
        literals = np.concatenate([moves.differences for moves in classes])
        literals[literals == 0] = np.concatenate([moves.literals for moves in classes])
        values[escaped] = literals[order[escaped]]
    return Changes(indices, values)


def _read_gaps(kernels: ModuleType, streams: Streams, limit: int) -> np.ndarray:
    """Indices below `limit`, ascending."""
    data = streams.at_most(limit + limit // SKIP + 1)
    if not data.size:
        return np.empty(0, dtype=np.uint32)
    if data[-1] == SKIP:
        raise WeightsError("a list of gaps ends in the middle of one")
    count = int(np.count_nonzero(data != SKIP))
    reached = int(data.sum(dtype=np.int64)) + count - 1
    if reached >= limit:
        raise WeightsError(f"a payload changes element {reached} of {limit}")
    return kernels.expand_gaps(data, count)
