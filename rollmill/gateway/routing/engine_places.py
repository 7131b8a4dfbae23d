"""Places at the engines. A request that finds none waits; when too many wait, it gets 429.

An engine has `per_engine` places. So at overload the requests that are served keep their latency, and the rest are told
to come back. Who waits is served in this order: answers that an engine began and lost, production, rollouts; each by
arrival. If the queue is full, production takes the place of the rollout that came last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal

from rollmill.errors import GatewayError
from rollmill.gateway.routing.engines import EngineState

Priority = Literal[0, 1, 2]
RETRY_AFTER_S = 1.0


@dataclass
class _Waiter:
    choose: Callable[[], EngineState | None]
    key: Hashable
    number: int = 0
    place: asyncio.Future[EngineState] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Places:
    def __init__(self, longest_queue: int) -> None:
        self._longest_queue = longest_queue
        # one queue per priority; dicts, because a waiter that gives up leaves from the middle
        self._queues: tuple[dict[int, _Waiter], ...] = ({}, {}, {})
        self._number = 0

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues))

    def is_full(self, priority: Priority) -> bool:
        """Whether a request that finds no place now gets 429."""
        return priority > 0 and self.waiting >= self._longest_queue and (priority == 2 or not self._queues[2])

    async def take(
        self, choose: Callable[[], EngineState | None], priority: Priority, timeout: float, key: Hashable = None
    ) -> EngineState:
        """Waits for a place at the engine that `choose` returns; it returns None while no fit engine has one. For
        requests with the same `key` it returns None at the same times; None as `key`: it has its own.

        Raises TimeoutError after `timeout` seconds, and 429 if too many requests wait. The caller must `leave`.
        """
        engine = choose()
        if engine is not None:  # nobody who waits can use this place: it would have got it when it became free
            engine.in_flight += 1
            return engine
        waiter = self._enqueue(_Waiter(choose, key), priority)
        try:
            async with asyncio.timeout(timeout):
                return await waiter.place
        except BaseException:
            if waiter.place.done() and not waiter.place.cancelled() and waiter.place.exception() is None:
                self.leave(waiter.place.result())  # it got a place while it gave up
            raise
        finally:
            for queue in self._queues:
                queue.pop(waiter.number, None)

    def leave(self, engine: EngineState) -> None:
        """Gives a place back."""
        engine.in_flight -= 1
        self.fill(most=1)

    def fill(self, most: int | None = None) -> None:
        """Gives free places to those who wait: after an engine has changed, or `most` of them after one left."""
        placed = 0
        hopeless: set[Hashable] = set()  # keys without a free place: choosing again for each waiter takes too long
        for queue in self._queues:
            for number, waiter in list(queue.items()):
                if waiter.key in hopeless:
                    continue
                engine = waiter.choose()
                if engine is None:
                    if waiter.key is not None:
                        hopeless.add(waiter.key)
                    continue
                del queue[number]
                if waiter.place.done():  # it has given up
                    continue
                engine.in_flight += 1
                waiter.place.set_result(engine)
                placed += 1
                if placed == most:
                    return

    def _enqueue(self, waiter: _Waiter, priority: Priority) -> _Waiter:
        if self.is_full(priority):
            raise overloaded(self.waiting)
        if priority and self.waiting >= self._longest_queue:
            _, last = self._queues[2].popitem()
            if not last.place.done():  # it may have given up just now
                last.place.set_exception(overloaded(self.waiting))
        self._number += 1
        waiter.number = self._number
        self._queues[priority][waiter.number] = waiter
        return waiter


def overloaded(waiting: int) -> GatewayError:
    return GatewayError(
        f"the engines are busy, and {waiting} requests wait already",
        status=429,
        code="overloaded",
        hint="try again later; gateway.queue_requests is how many may wait",
        retry_after_s=RETRY_AFTER_S,
    )
