"""Patches: what changed between two versions, as lists an engine can write into its parameters in place.

They are kept while versions are taken one after the other, and given out with the update that leads past all of them.
New values are absolute, so writing patches twice does no harm; several for one element count in their order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

PATCH_BYTES = 256 << 20  # of memory for all patches together; tensors beyond it are copied whole


class Patch(NamedTuple):
    """Elements of one chunk of a tensor, and what they become."""

    start: int  # the chunk's first element in the tensor
    indices: np.ndarray  # uint32, ascending, counted from `start`
    values: np.ndarray  # unsigned integers of the element's width

    @property
    def bytes(self) -> int:
        return self.indices.nbytes + self.values.nbytes


TensorPatches = dict[str, list[Patch] | None]  # None: copy the tensor whole; tensors not named are unchanged


class Patches:
    """Collects; any thread may add. A tensor whose patches are larger than itself is better copied whole, and where the
    budget is 0 every changed tensor is."""

    def __init__(self, budget: int = PATCH_BYTES) -> None:
        self._lock = threading.Lock()
        self._budget = budget
        self._tensors: TensorPatches = {}
        self._sizes: dict[str, int] = {}
        self.bytes = 0

    def add(self, name: str, patch: Patch, tensor_bytes: int) -> None:
        with self._lock:
            patches = self._tensors.setdefault(name, [])
            if patches is None:
                return
            size = self._sizes.get(name, 0) + patch.bytes
            if size > tensor_bytes or self.bytes + patch.bytes > self._budget:
                self._drop(name)
                return
            patches.append(patch)
            self._sizes[name] = size
            self.bytes += patch.bytes

    def whole(self, names: Iterable[str]) -> None:
        """These are to be copied: what happened to them is not a list of changes."""
        with self._lock:
            for name in names:
                self._drop(name)

    def take(self) -> TensorPatches:
        """Everything so far, with which a new collection begins."""
        with self._lock:
            taken, self._tensors, self._sizes, self.bytes = self._tensors, {}, {}, 0
            return taken

    def _drop(self, name: str) -> None:
        self.bytes -= self._sizes.pop(name, 0)
        self._tensors[name] = None
