"""Queues of a dispatcher: episodes that run and episodes that are graded each have slots of their own.

An episode gives its slot back when it has handed in. So a slow grader keeps no engine idle, and episodes that start
never stand before one that only has to be graded. Machines are started in a third queue, that of the pool
(machines/pool.py).
"""

from __future__ import annotations

import asyncio


class Queue:
    """At most `most` are inside at once; the others wait, first come, first served. Use it by `async with`."""

    def __init__(self, most: int) -> None:
        self._slots = asyncio.Semaphore(most)
        self.inside = 0

    @property
    def full(self) -> bool:
        return self._slots.locked()

    async def __aenter__(self) -> None:
        await self._slots.acquire()
        self.inside += 1

    async def __aexit__(self, *_: object) -> None:
        self.inside -= 1
        self._slots.release()
