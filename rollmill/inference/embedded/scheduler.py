"""Chooses what the next step computes. Continuous batching: requests join and leave between any two steps.

Order: production before rollouts, then first come, first served. In a full batch a rollout loses its place to a
production request, but keeps its pages. When pages run out, they are taken in this order: from idle sessions (least
recently used first), from requests that lost their place, and from the newest running request (rollouts first), which
is computed again later. The oldest request always makes progress, and alone it always fits, so there is no deadlock.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.cache import BlockPool, CachedContext, SessionCache
from rollmill.inference.embedded.generation import Generation
from rollmill.inference.embedded.sampler import Draw
from rollmill.types import FinishReason


@dataclass(frozen=True)
class Work:
    """Compute positions [start, start + count) of a generation's context."""

    generation: Generation
    start: int
    count: int

    @property
    def completes(self) -> bool:
        """Whether it reaches the end of the context: then the next token is sampled."""
        return self.start + self.count == len(self.generation.tokens)

    @property
    def draw(self) -> Draw:
        """How its next token is drawn."""
        generation = self.generation
        return Draw(generation.request.sampling, generation.seed, self.start + self.count)


class Scheduler:
    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.pool = BlockPool(config.cache_tokens // config.block_size)
        self.sessions = SessionCache(self.pool)
        self.running: dict[int, Generation] = {}  # by number
        self._production: deque[Generation] = deque()
        self._rollouts: deque[Generation] = deque()
        self.preemptions = 0

    @property
    def waiting(self) -> int:
        return len(self._production) + len(self._rollouts)

    def everyone(self) -> list[Generation]:
        return [*self.running.values(), *self._production, *self._rollouts]

    def add(self, generation: Generation) -> None:
        self._queue(generation).append(generation)

    def schedule(self, served: int) -> list[Work]:
        """The work of the next step, with pages reserved. `served` is the served version number, which requests may
        wait for."""
        self._admit(served)
        work: list[Work] = []
        budget = self._config.prefill_chunk
        for generation in sorted(self.running.values(), key=lambda one: (one.is_rollout, one.number)):
            count = min(generation.missing, budget) if generation.missing > 1 else 1
            # an earlier generation may have taken this one's pages
            if count and generation.number in self.running and self._reserve(generation, generation.computed + count):
                budget -= count if generation.missing > 1 else 0
                work.append(Work(generation, generation.computed, count))
        return [item for item in work if item.generation.number in self.running]

    def finish(self, generation: Generation, reason: FinishReason) -> None:
        """Its pages stay with the session for the next turn, unless it was aborted."""
        self._remove(generation)
        if reason == "abort" or not generation.blocks:
            self._release(generation)
            return
        used = self._blocks_for(generation.computed)
        self.pool.give(generation.blocks[used:])
        context = CachedContext(generation.tokens[: generation.computed], generation.blocks[:used], generation.oldest)
        self.sessions.keep(generation.request.session, context)
        generation.blocks = []

    def _admit(self, served: int) -> None:
        for queue in (self._production, self._rollouts):
            for generation in [candidate for candidate in queue if candidate.request.min_version <= served]:
                if not self._fits(generation) or not self._has_place(generation):
                    return  # later requests must not overtake
                queue.remove(generation)
                self.running[generation.number] = generation
                self._reuse_session(generation)

    def _has_place(self, generation: Generation) -> bool:
        if len(self.running) < self._config.max_batch:
            return True
        rollouts = [candidate for candidate in self.running.values() if candidate.is_rollout]
        if generation.is_rollout or not rollouts:
            return False
        self._preempt(max(rollouts, key=lambda candidate: candidate.number))
        return True

    def _fits(self, generation: Generation) -> bool:
        """Whether there are pages for its context and one more token, without taking pages from a running request that
        comes first. If admitted without them, it would lose its place at once."""
        needed = self._blocks_for(len(generation.tokens) + 1) - len(generation.blocks)
        held = sum(len(other.blocks) for other in self._queued() if other is not generation)
        available = self.pool.free + self.sessions.blocks + held
        if not generation.is_rollout:
            available += sum(len(other.blocks) for other in self.running.values() if other.is_rollout)
        return needed <= available or not self.running

    def _reuse_session(self, generation: Generation) -> None:
        if not generation.computed and generation.cached_tokens is None:
            context = self.sessions.claim(generation.request.session, generation.tokens)
            if context is not None:
                generation.blocks, generation.computed = context.blocks, len(context.tokens)
                generation.oldest = context.oldest
        generation.admit(generation.computed)

    def _reserve(self, generation: Generation, positions: int) -> bool:
        """Reserves pages for `positions` positions. False if the generation itself had to give up its place."""
        needed = self._blocks_for(positions) - len(generation.blocks)
        while self.pool.free < needed:
            if not self._make_room(generation):
                self._preempt(generation)
                self._release(generation)
                return False
        generation.blocks += self.pool.take(max(needed, 0))
        return True

    def _make_room(self, generation: Generation) -> bool:
        if self.sessions.evict():
            return True
        holders = [other for other in self._queued() if other.blocks]
        if holders:
            self._release(max(holders, key=lambda other: other.number))
            return True
        victim = max(self.running.values(), key=lambda other: (other.is_rollout, other.number))
        if victim is generation:
            return False
        self._preempt(victim)
        self._release(victim)
        return True

    def _preempt(self, generation: Generation) -> None:
        del self.running[generation.number]
        self._queue(generation).appendleft(generation)
        generation.requeue()
        self.preemptions += 1

    def _release(self, generation: Generation) -> None:
        self.pool.give(generation.blocks)
        generation.blocks, generation.computed, generation.oldest = [], 0, None

    def _remove(self, generation: Generation) -> None:
        if self.running.pop(generation.number, None) is None:
            self._queue(generation).remove(generation)

    def _queue(self, generation: Generation) -> deque[Generation]:
        return self._rollouts if generation.is_rollout else self._production

    def _queued(self) -> Iterator[Generation]:
        return itertools.chain(self._production, self._rollouts)

    def _blocks_for(self, positions: int) -> int:
        return -(-positions // self._config.block_size)
