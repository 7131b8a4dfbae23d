"""The audit: a checksum of one tensor that host image and device copy compute alike, and that keeps up with changes.

    audit = Σ over elements i of mix(i · 0x9E3779B97F4A7C15 + v_i)                     all arithmetic modulo 2^64
    mix(z): z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31

i counts a tensor's elements from 0 in row-major order, v_i is the element's bits as an unsigned number; `mix` is the
finaliser of splitmix64, a bijection. So one element that changed always changes the sum; several, exchanged or shifted
ones do but for one chance in 2^64, and no two (i, v) have the same key in a tensor of fewer than 2^30 elements. The sum
does not depend on the order it is made in, and moves by what the changed elements alone contribute. It finds accidents,
not attacks: what is downloaded is checked with a cryptographic digest before it gets this far.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
FIRST_FACTOR, SECOND_FACTOR = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BLOCK = 1 << 13  # elements at a time, so that what is computed with stays in the cache
_COMPILED_FROM = 1 << 20  # elements; a smaller tensor is done before a compiler has started
_UNSIGNED = {1: "u1", 2: "<u2", 4: "<u4"}


def audit_host(data: np.ndarray, width: int) -> int:
    """The audit of a tensor given as flat uint8 with elements of `width` bytes."""
    elements = data.view(_UNSIGNED[width])
    compiled = _compiled() if elements.size >= _COMPILED_FROM else None
    if compiled is not None:
        return int(compiled(elements))
    positions, scratch = np.arange(_BLOCK, dtype=np.uint64) * np.uint64(GOLDEN), np.empty(_BLOCK, dtype=np.uint64)
    total = 0
    for start in range(0, elements.size, _BLOCK):
        block = elements[start : start + _BLOCK]
        keys = positions[: block.size] + np.uint64(start * GOLDEN % 2**64)
        keys += block
        total += _sum_mixed(keys, scratch[: block.size])
    return total % 2**64


def _sum_mixed(keys: np.ndarray, scratch: np.ndarray) -> int:
    """Sum of `mix` of the keys, which are overwritten."""
    for shift, factor in ((30, FIRST_FACTOR), (27, SECOND_FACTOR)):
        np.right_shift(keys, np.uint64(shift), out=scratch)
        keys ^= scratch
        keys *= np.uint64(factor)
    np.right_shift(keys, np.uint64(31), out=scratch)
    keys ^= scratch
    return int(keys.sum())


@functools.cache
def _compiled() -> Callable[[np.ndarray], int] | None:
    try:
        from numba import njit, uint64
    except ImportError:
        return None

    @njit(nogil=True, cache=True)
    def audit(elements):
        total = uint64(0)
        for i in range(elements.size):
            key = uint64(i) * uint64(GOLDEN) + uint64(elements[i])
            key = (key ^ (key >> uint64(30))) * uint64(FIRST_FACTOR)
            key = (key ^ (key >> uint64(27))) * uint64(SECOND_FACTOR)
            total += key ^ (key >> uint64(31))
        return total

    return audit
