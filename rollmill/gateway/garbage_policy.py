"""Collections of garbage that no request notices.

Python stops the process while it looks for cycles of objects that nobody uses: 0.4 to 0.9 µs per object, so 20 ms for
50,000, and the requests of 60 ms wait for it. Open sessions hold many objects, and hardly any of them becomes garbage
in a cycle: an answered request leaves none, a closed connection a few. So the collector looks at a few new objects at a
time, and not again at those that are in use then.

A request whose client goes away leaves a cycle with its body in it. So all objects are looked at from time to time, and
all requests wait meanwhile: 0.3 s with 2,000 open sessions of six answers each. So that is done while no request is in
flight, and seldom if it takes long; else only if the memory has grown by much that is not in an open session.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
_NEW_OBJECTS = 2_000  # looked at together
_LOOK_S = 1.0
_SOONEST_S = 600.0  # between two looks at all objects
_BYTE_S = 7e-9  # how long it takes for each byte that the log has of open sessions (to count objects takes long too)
_RARELY = 10_000  # the time between two looks, in times of what a look takes
_GROWTH, _GROWTH_BYTES = 1.25, 256 << 20  # of the memory between two looks: more is a reason to look
_SESSION = 8  # bytes of memory that an open session may take, for each of its bytes in the log; 3 were seen
_LONG_S = 0.1  # longer pauses are logged


def collect_little() -> None:
    """Keep collections short from now on. Call it after start-up, when all long-lived objects exist."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)
    if _leave not in gc.callbacks:
        gc.callbacks.append(_leave)


async def collect_all(is_idle: Callable[[], bool], recorded_bytes: Callable[[], int]) -> None:
    """Look at all objects from time to time, until cancelled. Does nothing while Python collects as usual.

    `recorded_bytes`: what the log has of open sessions.
    """
    last, kept, recorded = time.monotonic(), _resident_bytes(), recorded_bytes()
    while True:
        await asyncio.sleep(_LOOK_S)
        now = recorded_bytes()
        rested = time.monotonic() - last > max(_SOONEST_S, _RARELY * _BYTE_S * now)
        of_sessions = _SESSION * max(0, now - recorded)
        grown = _resident_bytes() > _GROWTH * kept + _GROWTH_BYTES + of_sessions
        if _leave in gc.callbacks and (grown or (rested and is_idle())):
            _look_at_all()
            last, kept, recorded = time.monotonic(), _resident_bytes(), recorded_bytes()


def _look_at_all() -> None:
    began = time.perf_counter()
    gc.disable()  # a collection by another thread between the next two would end in `_leave`
    gc.unfreeze()
    gc.collect()
    gc.enable()
    seconds = time.perf_counter() - began
    if seconds >= _LONG_S:
        log.warning("all requests waited for %.2f s: this process looked for garbage in all its memory", seconds)


def _leave(phase: str, about: dict[str, Any]) -> None:
    if phase == "stop":
        gc.freeze()


def _resident_bytes() -> int:
    """0 where the system has no such figure."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
