"""The audit: a checksum of one tensor. Host weights and device copy compute the same one, and it can be updated.

    audit = Σ over elements i of mix(i · 0x9E3779B97F4A7C15 + v_i)                     all arithmetic modulo 2^64
    mix(z): z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31

i is the index of an element in row-major order, from 0. v_i is the element's bits as an unsigned number. `mix` is the
finaliser of splitmix64, a bijection. If one element changes, the sum always changes. If several change, or are swapped
or shifted, it stays the same with a chance of 1 in 2^64. In a tensor of fewer than 2^30 elements no two (i, v) share a
key. The order of summation does not matter, so a change of few elements costs only their own terms. The audit finds
accidents, not attacks: a cryptographic digest has checked every download before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
FIRST_FACTOR, SECOND_FACTOR = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BLOCK = 1 << 13  # elements at a time, so that all operands stay in the cache
_COMPILED_FROM = 1 << 20  # elements; loading a compiler takes longer than a smaller tensor
_UNSIGNED = {1: "u1", 2: "<u2", 4: "<u4"}


def audit_host(data: np.ndarray, width: int, first: int = 0, *, compiled: bool = False) -> int:
    """The audit of a tensor given as flat uint8 with elements of `width` bytes; or the summand of a part of it that
    begins with element `first`. `compiled`: there is so much to audit that loading a compiler is worth it."""
    elements = data.view(_UNSIGNED[width])
    loop = _compiled() if compiled or elements.size >= _COMPILED_FROM else None
    if loop is not None:
        return int(loop(elements, first))
    positions, scratch = np.arange(_BLOCK, dtype=np.uint64) * np.uint64(GOLDEN), np.empty(_BLOCK, dtype=np.uint64)
    total = 0
    for start in range(0, elements.size, _BLOCK):
        block = elements[start : start + _BLOCK]
        keys = positions[: block.size] + np.uint64((first + start) * GOLDEN % 2**64)
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
def _compiled() -> Callable[[np.ndarray, int], int] | None:
    try:
        from numba import njit, uint64
    except ImportError:
        return None

    @njit(nogil=True, cache=True)
    def audit(elements: Any, first: Any) -> Any:
        total = uint64(0)
        for i in range(elements.size):
            key = uint64(first + i) * uint64(GOLDEN) + uint64(elements[i])
            key = (key ^ (key >> uint64(30))) * uint64(FIRST_FACTOR)
            key = (key ^ (key >> uint64(27))) * uint64(SECOND_FACTOR)
            total += key ^ (key >> uint64(31))
        return total

    return audit
