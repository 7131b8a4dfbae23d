"""Collections of garbage that no request notices.

Python stops the process while it looks for cycles of objects that nobody uses: 0.4 µs per object, so 20 ms for 50,000,
and the requests of 60 ms wait for it. Open sessions hold many objects, and hardly any of them becomes garbage in a
cycle: a request leaves none, a closed connection a few. So the collector looks at a few new objects at a time, and not
again at those that are in use then. It looks at all when no request is in flight, after an hour in any case.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Any

_NEW_OBJECTS = 2_000  # looked at together
_LOOK_S = 1.0
_SOONEST_S, _LATEST_S = 600.0, 3600.0  # between two looks at all objects


def collect_little() -> None:
    """From now on. Call it when all that lives as long as the process is there."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)
    if _leave not in gc.callbacks:
        gc.callbacks.append(_leave)


def collect_as_usual() -> None:
    """Ends what `collect_little` began."""
    gc.callbacks.remove(_leave)
    gc.set_threshold(700, 10, 10)
    gc.unfreeze()


async def collect_all(is_idle: Callable[[], bool]) -> None:
    """Looks at all objects from time to time, for ever."""
    last = time.monotonic()
    while True:
        await asyncio.sleep(_LOOK_S)
        waited = time.monotonic() - last
        if waited > _LATEST_S or (waited > _SOONEST_S and is_idle()):
            gc.unfreeze()
            gc.collect()
            last = time.monotonic()


def _leave(phase: str, about: dict[str, Any]) -> None:
    if phase == "stop":
        gc.freeze()
