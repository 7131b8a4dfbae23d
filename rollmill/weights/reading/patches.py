"""Patches: the changes between two versions, as lists that an engine writes into its parameters in place.

They are collected while host weights move from version to version, and handed out with the next update. New values are
absolute, so writing a patch twice does no harm. If several patches change one element, the last one counts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

PATCH_BYTES = 256 << 20  # memory for all patches; tensors that do not fit are copied whole


class Patch(NamedTuple):
    """Elements of one chunk of a tensor, and their new values."""

    start: int  # the chunk's first element in the tensor
    indices: np.ndarray  # uint32, ascending, counted from `start`
    values: np.ndarray  # unsigned integers of the element's width

    @property
    def bytes(self) -> int:
        return self.indices.nbytes + self.values.nbytes


TensorPatches = dict[str, list[Patch] | None]  # None: copy the tensor whole; tensors not named are unchanged


class Patches:
    """Collects patches; any thread may add. A tensor whose patches are larger than itself is copied whole. With a
    budget of 0 every changed tensor is copied whole."""

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
        """Mark these tensors to be copied whole: their changes are not known as a list."""
        with self._lock:
            for name in names:
                self._drop(name)

    def take(self) -> TensorPatches:
        """Return everything collected so far, and start again with nothing."""
        with self._lock:
            taken, self._tensors, self._sizes, self.bytes = self._tensors, {}, {}, 0
            return taken

    def _drop(self, name: str) -> None:
        self.bytes -= self._sizes.pop(name, 0)
        self._tensors[name] = None
