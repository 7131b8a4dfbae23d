"""Python's garbage collection while an engine decodes on a device.

By default Python looks for garbage after every 700 new objects. Requests are many objects that live for long, and
almost nothing of an engine is garbage that only a collection finds. A thousand requests spent a fifth of the host's
time on collections, and the longest of them stopped the decode loop for 0.1 s.
"""

from __future__ import annotations

import gc

_RARE = (20_000, 50, 50)  # new objects per collection; collections per one of older objects; of these per full one
_usual = gc.get_threshold()


def collect_rarely() -> None:
    """From now on. What is in memory now is not looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_RARE)


def collect_as_usual() -> None:
    gc.unfreeze()
    gc.set_threshold(*_usual)
