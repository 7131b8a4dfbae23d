"""The loops of the codings over the elements of a chunk, in two versions: `plain` in numpy, `compiled` with numba.

Both have the same functions and give the same bytes. Loading a compiler takes seconds (and the first time on a machine
it must also run), which only large chunks repay. Small models never wait for it, and nothing requires it.
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
    except (ImportError, RuntimeError):  # no numba, a numba that does not support this numpy, or no place for its cache
        return None
    return compiled
