"""Turns of gradings: many at once, or one alone, when a time-out on a busy host has to be repeated."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Turns:
    """One per event loop."""

    def __init__(self) -> None:
        self.alone = False  # the grading that has its turn is the only one
        self._changed = asyncio.Condition()
        self._together = 0
        self._want_alone = 0

    @contextlib.asynccontextmanager
    async def take(self, *, alone: bool) -> AsyncIterator[None]:
        await (self._begin_alone() if alone else self._begin())
        try:
            yield
        finally:
            async with self._changed:
                self.alone = False
                self._together -= not alone
                self._changed.notify_all()

    async def _begin(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self.alone and not self._want_alone)
            self._together += 1

    async def _begin_alone(self) -> None:
        async with self._changed:
            self._want_alone += 1
            try:
                await self._changed.wait_for(lambda: not self.alone and not self._together)
                self.alone = True
            finally:
                self._want_alone -= 1
                self._changed.notify_all()
