"""Chooses what the next step computes. Continuous batching: requests join and leave between any two steps.

Order: production before rollouts, then first come, first served. In a full batch a rollout loses its place to a
production request, but keeps its pages. When pages run out, they are taken in this order: idle pages (least recently
used first), from requests that lost their place, and from the newest running request (rollouts first), which is
computed again later. The oldest request always makes progress, and alone it always fits, so there is no deadlock.

A prefix is computed once (`prefixes`): a request takes the pages that hold the next positions of its context, and waits
for those that another request is computing.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.generation import Generation
from rollmill.inference.embedded.pages import Pages
from rollmill.inference.embedded.prefixes import Prefixes
from rollmill.inference.embedded.sampler import Draw
from rollmill.types import FinishReason, PolicyRef

PROMPT_STEPS = 16  # for which running rollouts wait at most
DRAFTING_BATCH = 4  # requests; a step with more of them takes longer for every position that it computes
DRAFTED_POSITIONS = 128  # of a step with guesses; not more than plans.MOST_ROWS


@dataclass(slots=True)
class Work:
    """Compute positions [start, start + count) of a generation's context, which ends with guessed tokens.

    A twin has the same context as the generation of the work before it, which computes it: it computes nothing, and its
    token is drawn from the same logits."""

    generation: Generation
    start: int
    count: int
    drafts: tuple[int, ...] = ()
    twin_of: Generation | None = None

    @property
    def tokens(self) -> list[int]:
        """The tokens of its positions."""
        return [*self.generation.tokens[self.start : self.start + self.count], *self.drafts]

    @property
    def completes(self) -> bool:
        """Whether it reaches the end of the context: then the next token is sampled."""
        return self.start + self.count == len(self.generation.tokens) + len(self.drafts)

    @property
    def draw(self) -> Draw:
        """How its next token is drawn."""
        generation = self.generation
        request, position = generation.request, len(generation.tokens)
        start = len(request.tokens) - request.answered
        return Draw(request.sampling, generation.seed, position, generation.tokens, start, generation.grammar)

    @property
    def draws(self) -> list[Draw]:
        """How the next token is drawn, and the tokens after each guess."""
        first = self.draw
        needed = first.context if first.sampling.changes_logits else ()  # nothing else looks at it
        return [first] + [
            replace(first, position=first.position + count, context=[*needed, *self.drafts[:count]])
            for count in range(1, len(self.drafts) + 1)
        ]


class Scheduler:
    def __init__(
        self,
        config: EngineConfig,
        draft_tokens: int = 0,
        *,
        prompts_first: bool = False,
        long_guesses: bool = False,
    ) -> None:
        """`prompts_first`: while prompts fill whole steps, running rollouts wait for them, for up to PROMPT_STEPS. For
        devices on which a step with prompts costs much more than one without. `long_guesses`: always of `draft_tokens`
        tokens. For devices on which a few positions more in a step take hardly any time."""
        self._config, self._draft_tokens, self._prompts_first = config, draft_tokens, prompts_first
        self._long_guesses = long_guesses
        self._prompt_steps = 0  # since running rollouts were computed
        self.filled = False  # prompts filled the last step: there may be more of them
        self.pages = Pages(config.cache_tokens // config.block_size, config.block_size)
        self.prefixes = Prefixes(self.pages)
        self.running: dict[int, Generation] = {}  # by number
        self._production: OrderedDict[int, Generation] = OrderedDict()
        self._rollouts: OrderedDict[int, Generation] = OrderedDict()
        self.preemptions = 0
        self._changed = False  # a request came or went since the last schedule

    @property
    def waiting(self) -> int:
        return len(self._production) + len(self._rollouts)

    def waiting_like(self, generation: Generation) -> int:
        """The requests of its traffic class that wait."""
        return len(self._queue(generation))

    def everyone(self) -> list[Generation]:
        return [*self.running.values(), *self._queued()]

    def holds(self, generation: Generation) -> bool:
        return generation.number in self.running or generation.number in self._queue(generation)

    def add(self, generation: Generation) -> None:
        self._queue(generation)[generation.number] = generation
        self._changed = True

    def schedule(self, policy: PolicyRef) -> list[Work]:
        """The work of the next step, with pages reserved. `policy` is served now. Before the step runs, the caller
        copies the pages in `prefixes.copies`."""
        self.prefixes.follow(policy)
        self._admit(policy)
        self._changed = False
        work = self._choose()
        before = -1
        while not work and len(self.running) != before:  # one that others waited for has lost its place
            before = len(self.running)
            work = self._choose()
        return work

    def _choose(self) -> list[Work]:
        running = sorted(self.running.values(), key=attrgetter("is_rollout", "number"))
        if not self._prompts_first:
            work, _ = self._take(running, self._config.prefill_chunk)
        else:
            rollouts: list[Generation] = []
            first: list[Generation] = []
            for one in running:
                (rollouts if one.is_rollout and len(one.tokens) - one.computed == 1 else first).append(one)
            work, budget = self._take(first, self._config.prefill_chunk)
            self.filled = budget <= 0
            if self.filled and rollouts and self._prompt_steps < PROMPT_STEPS:
                self._prompt_steps += 1
            else:  # running rollouts wait only for prompts that fill whole steps, and only for a few of them
                self._prompt_steps = 0
                work += self._take(rollouts, budget)[0]
        gone = {item.generation.number for item in work} - self.running.keys()  # an earlier one has taken their pages
        if not gone:
            return work
        return [
            item
            for item in work
            if item.generation.number not in gone and (item.twin_of is None or item.twin_of.number not in gone)
        ]

    def _take(self, generations: Sequence[Generation], budget: int) -> tuple[list[Work], int]:
        """Their work, as far as `budget` positions of prompts allow, and what is left of the budget."""
        work: list[Work] = []
        twins: dict[int, list[Work]] = {}  # of each prompt that is computed to its end, by number
        for generation in generations:
            missing = len(generation.tokens) - generation.computed
            if generation.number not in self.running or not missing:
                continue  # an earlier generation has taken its pages, or its token is on its way
            if missing == 1:
                drafts = self._drafts(generation)
                if self._reserve(generation, generation.computed + 1 + len(drafts)):
                    work.append(Work(generation, generation.computed, 1 + len(drafts), drafts))
            elif budget <= 0 and not self.prefixes.finds_next(generation):
                continue
            elif (other := self.prefixes.extend(generation)) is not None:  # it waits for pages that another computes
                if generation.is_twin_of(other) and other.number in twins:
                    twins[other.number].append(Work(generation, len(generation.tokens), 0, twin_of=other))
            else:
                count = self._piece(generation, budget)
                if count and self._reserve(generation, generation.computed + count):
                    budget -= count if generation.missing > 1 else 0
                    work.append(Work(generation, generation.computed, count))
                    self.prefixes.promise(generation)
                    if work[-1].completes:
                        twins[generation.number] = []
        return [one for item in work for one in (item, *twins.get(item.generation.number, ()))], budget

    @property
    def guesses(self) -> bool:
        """Whether tokens are guessed now: not for a large batch, which has no time to spare."""
        return self._draft_tokens > 0 and len(self.running) <= DRAFTING_BATCH

    @property
    def guessed_positions(self) -> int:
        """The most positions of a step with guesses and without prompts. 0 if none are guessed."""
        batch = min(DRAFTING_BATCH, self._config.max_batch)
        return min(DRAFTED_POSITIONS, batch * (1 + self._draft_tokens)) if self._draft_tokens else 0

    def _drafts(self, generation: Generation) -> tuple[int, ...]:
        """Guessed tokens. None where they would take pages of others."""
        if not self.guesses or generation.grammar is not None:
            return ()
        left = generation.limit - len(generation.tokens) - 1
        most = min(self._draft_tokens, left, DRAFTED_POSITIONS // len(self.running) - 1)
        if most <= 0:
            return ()
        drafts = generation.drafts.guess(generation.tokens, most, grows=not self._long_guesses)
        needed = self._blocks_for(generation.computed + 1 + len(drafts)) - len(generation.blocks)
        return drafts if needed <= self.pages.available else ()

    def _piece(self, generation: Generation, budget: int) -> int:
        """How many positions of its prompt are computed now. A part of it ends with a page, if the budget allows, so
        that the pages after it can be shared."""
        if generation.missing <= max(budget, 1):
            return generation.missing
        aligned = budget - (generation.computed + budget) % self._config.block_size
        return aligned if aligned > 0 else budget

    def advance(
        self, work: list[Work], routes: np.ndarray | None, policy: PolicyRef, wrong: Mapping[int, int] = {}
    ) -> None:
        """Records that `work` was computed. `routes` has the rows of each work, in order. `wrong`: the number of a
        generation → how many of its guesses were wrong; these are at the end of its positions."""
        if routes is not None:
            self.store_routes([(item.generation, item.start, item.count) for item in work], routes)
        size, start = self._config.block_size, 0
        for item in work:
            generation, count = item.generation, item.count - wrong.get(item.generation.number, 0)
            if item.twin_of is not None:
                self.prefixes.join(generation, item.twin_of)
                continue
            generation.advance(count, None if routes is None else routes[start : start + count], policy)
            if count > 1 or generation.computed % size == 0 or generation.promised:
                self.prefixes.publish(generation, policy)
            start += item.count

    def reserve_ahead(self, positions: Sequence[tuple[Generation, int]]) -> bool:
        """Reserves pages for the first `positions` of each generation. False, and nothing is reserved, if that takes
        pages from others."""
        size = self._config.block_size
        needed = [(one, count) for one, end in positions if (count := -(-end // size) - len(one.blocks)) > 0]
        total = sum(count for _, count in needed)
        if total > self.pages.available:
            return False
        pages = iter(self.pages.take(total))
        for generation, count in needed:
            generation.blocks += itertools.islice(pages, count)
        return True

    @property
    def nobody_can_join(self) -> bool:
        """Whether no request that waits could be admitted: the last schedule admitted all it could, and none has come
        or gone since."""
        return not self.waiting or not self._changed

    def publish(self, generation: Generation, policy: PolicyRef) -> None:
        """Its new full pages, if any, can be found by content."""
        if generation.computed // self._config.block_size > generation.named:
            self.prefixes.publish(generation, policy)

    def finish(self, generation: Generation, reason: FinishReason) -> None:
        """The session's next turn goes on from its pages, unless it was aborted."""
        self._changed = True
        if self.running.pop(generation.number, None) is None:
            del self._queue(generation)[generation.number]
        if reason == "abort" or not generation.blocks:
            self._release(generation)
            return
        used = self._blocks_for(generation.computed)
        self.pages.give(generation.blocks[used:])
        self.prefixes.leave(generation, generation.blocks[:used])
        generation.blocks = []

    def forget_keys_and_values(self) -> None:
        """Every request computes its context again. For new weights when no token may depend on old ones."""
        for generation in self.everyone():
            self._release(generation)
        self.pages.forget_sessions()

    def store_routes(self, spans: Sequence[tuple[Generation, int, int]], routes: np.ndarray) -> None:
        """Keeps the routes of computed positions with their pages. A span is (generation, first position, number of
        positions); `routes` has the rows of all spans, in order."""
        size = self._config.block_size
        positions = [range(start, start + count) for _, start, count in spans]
        pages = [
            one.blocks[position // size] for (one, _, _), own in zip(spans, positions, strict=True) for position in own
        ]
        offsets = np.fromiter(itertools.chain.from_iterable(positions), np.int64, len(pages)) % size
        self.prefixes.routes.write(np.array(pages), offsets, routes)

    def _admit(self, policy: PolicyRef) -> None:
        spoken = 0  # pages that requests admitted here will take
        for queue in (self._production, self._rollouts):
            while (generation := _first_ready(queue, policy.number)) is not None:
                needed = self._pages_needed(generation, policy, spoken)
                if needed is None or not self._has_place(generation):
                    return  # later requests must not overtake
                spoken += needed
                del queue[generation.number]
                self.running[generation.number] = generation
                self.prefixes.start(generation, policy)
                generation.start()

    def _has_place(self, generation: Generation) -> bool:
        if len(self.running) < self._config.max_batch:
            return True
        rollouts = [candidate for candidate in self.running.values() if candidate.is_rollout]
        if generation.is_rollout or not rollouts:
            return False
        self._preempt(max(rollouts, key=lambda candidate: candidate.number))
        return True

    def _pages_needed(self, generation: Generation, policy: PolicyRef, spoken: int) -> int | None:
        """The pages that its context and one more token take. None if there are not enough without taking some from a
        running request that comes first: if admitted, it would lose its place at once."""
        needed = self._blocks_for(len(generation.tokens) + 1) - len(generation.blocks)
        if needed + spoken <= self.pages.available or not self.running:
            return needed
        needed -= self.prefixes.pages_in_use(generation, policy)
        available = self.pages.available - spoken
        available += sum(self._own_pages(other) for other in self._queued() if other is not generation)
        if not generation.is_rollout:
            available += sum(self._own_pages(other) for other in self.running.values() if other.is_rollout)
        return needed if needed <= available else None

    def _own_pages(self, generation: Generation) -> int:
        """Pages that would be free without it."""
        return sum(not self.pages.is_shared(block) for block in generation.blocks)

    def _reserve(self, generation: Generation, positions: int) -> bool:
        """Reserves pages for `positions` positions. False if the generation itself had to give up its place."""
        needed = self._blocks_for(positions) - len(generation.blocks)
        if needed <= 0:
            return True
        while self.pages.available < needed:
            if not self._make_room(generation):
                self._preempt(generation)
                self._release(generation)
                return False
        generation.blocks += self.pages.take(needed)
        return True

    def _make_room(self, generation: Generation) -> bool:
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
        queue = self._queue(generation)
        queue[generation.number] = generation
        queue.move_to_end(generation.number, last=False)
        self.prefixes.withdraw(generation)
        generation.requeue()
        self.preemptions += 1

    def _release(self, generation: Generation) -> None:
        self.prefixes.withdraw(generation)
        self.pages.give(generation.blocks)
        generation.release()

    def _queue(self, generation: Generation) -> OrderedDict[int, Generation]:
        return self._rollouts if generation.is_rollout else self._production

    def _queued(self) -> Iterator[Generation]:
        return itertools.chain(self._production.values(), self._rollouts.values())

    def _blocks_for(self, positions: int) -> int:
        return -(-positions // self._config.block_size)


def _first_ready(queue: OrderedDict[int, Generation], served: int) -> Generation | None:
    """The first that does not wait for a later version."""
    return next((one for one in queue.values() if one.request.min_version <= served), None)
