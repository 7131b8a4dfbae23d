"""The order in which documents are trained on. It depends on the seed alone, and needs no memory.

A source of N documents is read in epochs. The order of an epoch is a permutation of 0 … N − 1 that is computed place by
place (a Feistel network), so a run continues in the middle of an epoch without replaying it.

Sources are mixed in blocks of 1,000 documents. Each block has exactly the share of each source, in a drawn order:

    weights 3 : 1       a block      text text code text …       750 of the first source, 250 of the second
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np

BLOCK = 1000
_ROUNDS = 4


def permuted(place: int, count: int, key: str) -> int:
    """Where a permutation of `count` numbers sends `place`. `key` chooses the permutation."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    found = _feistel(place, half, key)
    while found >= count:  # the network permutes 4^half numbers, less than 4 · count: walk until one is in range
        found = _feistel(found, half, key)
    return found


def _feistel(number: int, half: int, key: str) -> int:
    mask = (1 << half) - 1
    left, right = number >> half, number & mask
    for turn in range(_ROUNDS):
        drawn = hashlib.blake2b(f"{key} {turn} {right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(drawn) & mask)
    return left << half | right


class Mix:
    """Which source each document of a mixture comes from."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.quotas = _quotas(weights)
        self._seed = seed
        self._block = functools.lru_cache(maxsize=4)(self._draw_block)

    def locate(self, index: int) -> tuple[int, int]:
        """The source of document `index`, and how many documents of that source come before it."""
        block, place = divmod(index, BLOCK)
        sources, ranks = self._block(block)
        source = int(sources[place])
        return source, block * self.quotas[source] + int(ranks[place])

    def _draw_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        sources = np.repeat(np.arange(len(self.quotas)), self.quotas)
        if len(self.quotas) > 1:
            sources = sources[[permuted(place, BLOCK, f"{self._seed} block {block}") for place in range(BLOCK)]]
        ranks = np.empty(BLOCK, np.int64)
        for source in range(len(self.quotas)):
            own = np.flatnonzero(sources == source)
            ranks[own] = np.arange(len(own))
        return sources, ranks


def _quotas(weights: Sequence[float]) -> list[int]:
    """Documents of each source in a block: proportional, at least one, largest remainders first."""
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    quotas = [max(1, int(share)) for share in exact]
    by_need = sorted(range(len(exact)), key=lambda source: quotas[source] - exact[source])
    for source in by_need[: max(0, BLOCK - sum(quotas))]:
        quotas[source] += 1
    while sum(quotas) > BLOCK:  # many sources were raised to one document
        quotas[quotas.index(max(quotas))] -= 1
    return quotas
