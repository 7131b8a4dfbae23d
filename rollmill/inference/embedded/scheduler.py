"""Who is computed in the next step. Continuous batching: requests join and leave between any two steps.

Order: production before rollouts, then first come, first served. A full batch yields a rollout's place to production;
its pages stay with it. When pages run out they are taken, in this order, from idle sessions (least recently used
first), from requests that lost their place, and from the youngest running request (rollouts first), which is computed
again later. The oldest request always makes progress, and alone it always fits, so nothing deadlocks.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.answer import Answer
from rollmill.inference.embedded.cache import BlockPool, CachedContext, SessionCache
from rollmill.inference.embedded.sampler import Draw
from rollmill.types import FinishReason


@dataclass(frozen=True)
class Work:
    """Compute positions [start, start + count) of an answer's context."""

    answer: Answer
    start: int
    count: int

    @property
    def completes(self) -> bool:
        """Whether the last position is the context's last: then the next token is sampled."""
        return self.start + self.count == len(self.answer.tokens)

    @property
    def draw(self) -> Draw:
        """What its next token is drawn with."""
        answer = self.answer
        return Draw(answer.request.sampling, answer.seed, self.start + self.count)


class Scheduler:
    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.pool = BlockPool(config.cache_tokens // config.block_size)
        self.sessions = SessionCache(self.pool)
        self.running: dict[int, Answer] = {}  # by number
        self._production: deque[Answer] = deque()
        self._rollouts: deque[Answer] = deque()
        self.preemptions = 0

    @property
    def waiting(self) -> int:
        return len(self._production) + len(self._rollouts)

    def everyone(self) -> list[Answer]:
        return [*self.running.values(), *self._production, *self._rollouts]

    def add(self, answer: Answer) -> None:
        self._queue(answer).append(answer)

    def schedule(self, served: int) -> list[Work]:
        """The next step's work, with pages reserved; `served` is the version number requests may wait for."""
        self._admit(served)
        work: list[Work] = []
        budget = self._config.prefill_chunk
        for answer in sorted(self.running.values(), key=lambda answer: (answer.is_rollout, answer.number)):
            count = min(answer.missing, budget) if answer.missing > 1 else 1
            # an earlier answer may have taken this one's place meanwhile
            if count and answer.number in self.running and self._reserve(answer, answer.computed + count):
                budget -= count if answer.missing > 1 else 0
                work.append(Work(answer, answer.computed, count))
        return [item for item in work if item.answer.number in self.running]

    def finish(self, answer: Answer, reason: FinishReason) -> None:
        """Its pages stay with the session for the next turn, unless the client went away."""
        self._remove(answer)
        if reason == "abort" or not answer.blocks:
            self._release(answer)
            return
        used = self._blocks_for(answer.computed)
        self.pool.give(answer.blocks[used:])
        context = CachedContext(answer.tokens[: answer.computed], answer.blocks[:used], answer.oldest)
        self.sessions.keep(answer.request.session, context)
        answer.blocks = []

    def _admit(self, served: int) -> None:
        for queue in (self._production, self._rollouts):
            for answer in [candidate for candidate in queue if candidate.request.min_version <= served]:
                if not self._fits(answer) or not self._has_place(answer):
                    return  # whoever comes later must not overtake
                queue.remove(answer)
                self.running[answer.number] = answer
                self._reuse_session(answer)

    def _has_place(self, answer: Answer) -> bool:
        if len(self.running) < self._config.max_batch:
            return True
        rollouts = [candidate for candidate in self.running.values() if candidate.is_rollout]
        if answer.is_rollout or not rollouts:
            return False
        self._preempt(max(rollouts, key=lambda candidate: candidate.number))
        return True

    def _fits(self, answer: Answer) -> bool:
        """Whether its whole context and one more token find pages without taking any from a running request that would
        go first. Admitting it anyway would only make it lose its place at once."""
        needed = self._blocks_for(len(answer.tokens) + 1) - len(answer.blocks)
        held = sum(len(other.blocks) for other in self._queued() if other is not answer)
        available = self.pool.free + self.sessions.blocks + held
        if not answer.is_rollout:
            available += sum(len(other.blocks) for other in self.running.values() if other.is_rollout)
        return needed <= available or not self.running

    def _reuse_session(self, answer: Answer) -> None:
        if not answer.computed and answer.cached_tokens is None:
            context = self.sessions.claim(answer.request.session, answer.tokens)
            if context is not None:
                answer.blocks, answer.computed = context.blocks, len(context.tokens)
                answer.oldest = context.oldest
        answer.admit(answer.computed)

    def _reserve(self, answer: Answer, positions: int) -> bool:
        """Pages for that many positions. False: the answer itself had to give up its place."""
        needed = self._blocks_for(positions) - len(answer.blocks)
        while self.pool.free < needed:
            if not self._make_room(answer):
                self._preempt(answer)
                self._release(answer)
                return False
        answer.blocks += self.pool.take(max(needed, 0))
        return True

    def _make_room(self, answer: Answer) -> bool:
        if self.sessions.evict():
            return True
        holders = [other for other in self._queued() if other.blocks]
        if holders:
            self._release(max(holders, key=lambda other: other.number))
            return True
        victim = max(self.running.values(), key=lambda other: (other.is_rollout, other.number))
        if victim is answer:
            return False
        self._preempt(victim)
        self._release(victim)
        return True

    def _preempt(self, answer: Answer) -> None:
        del self.running[answer.number]
        self._queue(answer).appendleft(answer)
        self.preemptions += 1

    def _release(self, answer: Answer) -> None:
        self.pool.give(answer.blocks)
        answer.blocks, answer.computed, answer.oldest = [], 0, None

    def _remove(self, answer: Answer) -> None:
        if self.running.pop(answer.number, None) is None:
            self._queue(answer).remove(answer)

    def _queue(self, answer: Answer) -> deque[Answer]:
        return self._rollouts if answer.is_rollout else self._production

    def _queued(self) -> Iterator[Answer]:
        return itertools.chain(self._production, self._rollouts)

    def _blocks_for(self, positions: int) -> int:
        return -(-positions // self._config.block_size)
