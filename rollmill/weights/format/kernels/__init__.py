"""The loops of the codings over the elements of a chunk, twice: `plain` in numpy, `compiled` with numba.

Both have the same functions and give the same bytes. Large chunks are worth the seconds it takes to load a compiler
(and, the first time on a machine, to run it); small models never wait for one, and nothing depends on it.
"""

from __future__ import annotations

import functools
from types import ModuleType

from rollmill.weights.format.kernels import plain

COMPILED_ELEMENTS = 1 << 20  # chunks of at least this many


def kernels_for(elements: int) -> ModuleType:
    return (_compiled() or plain) if elements >= COMPILED_ELEMENTS else plain


@functools.cache
def _compiled() -> ModuleType | None:
    try:
        from rollmill.weights.format.kernels import compiled
    except (ImportError, RuntimeError):  # no numba, one that does not know this numpy, or nowhere to keep its cache
        return None
    return compiled
