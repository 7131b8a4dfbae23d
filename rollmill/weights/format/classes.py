"""Classes of elements that change about as often: where to cut the range of magnitudes.

A step moves a weight by about as much whatever its size, so a small one, whose unit in the last place is small, changes
far oftener than a large one. Where the changes are takes fewer bits when classes are coded apart. What a class of N
elements of which n changed will cost is near N times the entropy of n / N, and what is not ±1 is priced alike; the
cheapest cut into a few classes is found exactly, by dynamic programming over the values that occur.
"""

from __future__ import annotations

import numpy as np

MOST_CLASSES = 8
_CLASS_BITS = 8 * 150  # what another class costs anyway: lengths, and the tables of its entropy coders


def choose_boundaries(elements: np.ndarray, changed: np.ndarray, unusual: np.ndarray, scale: float) -> np.ndarray:
    """Ascending bytes: a class is how many of them are not above an element's magnitude byte.

    Given are counts by magnitude byte (256 each): of all elements, of those that changed, of those that changed by
    other than ±1. `scale` is how many times the whole is larger than what was counted.
    """
    present = np.flatnonzero(elements)
    if present.size < 2:
        return np.empty(0, dtype=np.uint8)
    totals = [np.concatenate([[0.0], np.cumsum(counts[present])]) for counts in (elements, changed, unusual)]
    inside, moved, odd = (np.maximum(total[None, :] - total[:, None], 0) for total in totals)  # from row to column
    bits = scale * (_entropy(moved, inside) + _entropy(odd, moved)) + _CLASS_BITS
    bits[np.tril_indices(present.size + 1)] = np.inf
    # cost[j]: the values before the j-th in the classes so far; cuts[k][j]: where the last of k + 1 classes began
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
    """Bits that tell which `part` of the `whole` is meant."""
    share = np.clip(part / np.maximum(whole, 1), 1e-9, 1 - 1e-9)
    return np.asarray(-whole * (share * np.log2(share) + (1 - share) * np.log2(1 - share)))
