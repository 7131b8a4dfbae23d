"""A prefix that several requests share is computed once, and its pages are shared.

    start     a request is admitted: it goes on from its session's last turn, if that is still there
    extend    before it computes: takes the pages that hold the next positions of its context, or waits for them
    join      another one has computed the same context: takes all its pages
    promise   it computes the rest of its context: others with the same prefix wait for its pages
    publish   after a step: its new full pages, and the end of its prompt, can be found by content
    leave     it has finished: the next turn of its session may go on from its pages

Only pages of the served policy are found by content (see `pages`). A request that ran when weights changed keeps its
pages and goes on with them; from then on it publishes nothing. So keys and values of an older policy reach only the
requests that were running, and later turns of their sessions, and `oldest_kv_policy` says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollmill.inference.embedded.generation import Generation
from rollmill.inference.embedded.pages import PageRoutes, Pages
from rollmill.types import PolicyRef


class Prefixes:
    def __init__(self, pages: Pages) -> None:
        self._pages, self._size = pages, pages.block_size
        self.routes = PageRoutes(pages.size, pages.block_size)
        self.copies: list[tuple[int, int]] = []  # (source, target): pages to copy before the next step, in order
        self._promises: dict[bytes, Generation] = {}
        self._policy: PolicyRef | None = None
        self._hashed: Generation | None = None  # the last one whose keys were all computed, for the served policy
        self.hits = self.hit_tokens = 0

    def follow(self, policy: PolicyRef) -> None:
        """`policy` is served now. What is being computed is no longer all of one policy: no request waits for it."""
        if policy is not self._policy:
            self._policy, self._hashed = policy, None
            for generation in set(self._promises.values()):
                self.withdraw(generation)

    def start(self, generation: Generation, policy: PolicyRef) -> None:
        if generation.started or generation.computed:
            return  # it goes on after it lost its place
        context = self._pages.claim(generation.request.session, generation.tokens)
        if context is not None:
            self._pages.hold(context.blocks)
            generation.continue_session(context.blocks, len(context.tokens), context.oldest)
            generation.named = len(context.tokens) // self._size if generation.is_pure(policy) else 0
            self._count(generation, len(context.tokens))

    def finds_next(self, generation: Generation) -> bool:
        """Whether the page after its last one is there or promised, so that `extend` may get it further."""
        policy = self._policy
        if policy is None or not self._at_boundary(generation) or not generation.is_pure(policy):
            return False
        key = generation.next_key(policy, self._size)
        return self._pages.find(key) is not None or self._promises.get(key, generation) is not generation

    def extend(self, generation: Generation) -> Generation | None:
        """Takes the pages that hold the next positions. Returns the request that computes them, if it has to wait for
        one."""
        policy, size = self._policy, self._size
        assert policy is not None
        if not self._at_boundary(generation) or not generation.is_pure(policy):
            return None
        hashed = self._hashed
        if hashed is not None and hashed is not generation and len(hashed.tokens) == len(generation.tokens):
            generation.is_twin_of(hashed)  # then it hashes nothing
        self._take_full_pages(generation, policy)
        if generation.missing <= 1:
            return None
        length = min(size, generation.missing)
        key = generation.key_of(len(generation.blocks), length, policy, size)
        page = self._pages.find(key)
        if page is not None:  # the last position is computed again: it gives the next token
            self._copy(generation, page, length - 1)
            return None
        other = self._promises.get(key)
        # production does not wait for a rollout, which may have to wait itself
        if other is not None and other is not generation and other.is_rollout <= generation.is_rollout:
            return other
        self._copy_part(generation, length - 1)
        return None

    def join(self, generation: Generation, other: Generation) -> None:
        """`other` has computed the same context with the served policy: takes its full pages, and a copy of the last
        one, to which both will write. If there is no page for it, its positions are computed again."""
        size, first = self._size, len(generation.blocks)
        full = len(generation.tokens) // size
        pages, count = other.blocks[first:full], full * size - generation.computed
        self._pages.hold(pages)
        if len(generation.tokens) % size and self._pages.available:
            target = self._pages.take(1)[0]
            self.copies.append((other.blocks[full], target))
            self.routes.copy(other.blocks[full], target)
            pages, count = [*pages, target], len(generation.tokens) - generation.computed
        self._reuse(generation, pages, count)

    def _take_full_pages(self, generation: Generation, policy: PolicyRef) -> None:
        """All that are found, but not one that would leave nothing to compute."""
        first, most = len(generation.blocks), (generation.missing - 1) // self._size
        # keys are computed for one page first: most contexts find none
        if most <= 0 or self._pages.find(generation.parent_of(first + 1, policy, self._size)) is None:
            return
        if self._hashed is not None:
            generation.take_keys(self._hashed, self._size)
        pages = self._pages.find_first(generation.full_keys(first, most, policy, self._size))
        self._pages.hold(pages)
        self._reuse(generation, pages, len(pages) * self._size)

    def promise(self, generation: Generation) -> None:
        """It computes the rest of its context. If that is of one policy, others may wait for its pages."""
        policy, size = self._policy, self._size
        assert policy is not None
        if generation.promised or not generation.is_pure(policy):
            return
        first, full = generation.computed // size, len(generation.tokens) // size
        keys = generation.full_keys(first, full - first, policy, size)
        if len(generation.tokens) % size:
            keys.append(generation.key_of(full, len(generation.tokens) % size, policy, size))
        self._hashed = generation
        generation.promised = [key for key in keys if self._promises.setdefault(key, generation) is generation]

    def withdraw(self, generation: Generation) -> None:
        """No request waits for it any more."""
        for key in generation.promised:
            if self._promises.get(key) is generation:
                del self._promises[key]
        generation.promised = []

    def publish(self, generation: Generation, policy: PolicyRef) -> None:
        """Its new full pages can be found; at the end of the prompt, the page that is not full too."""
        if not generation.is_pure(policy):
            return
        size, computed = self._size, generation.computed
        first, full = generation.named, computed // size
        if full > first:
            keys = generation.full_keys(first, full - first, policy, size)
            for page, key in zip(generation.blocks[first:full], keys, strict=True):
                self._pages.name(page, key)
                if self._promises.get(key) is generation:
                    del self._promises[key]
            generation.named = full
        if generation.promised and not generation.missing:
            if computed % size:
                self._name(generation, generation.named, computed % size, policy)
            self.withdraw(generation)

    def leave(self, generation: Generation, blocks: list[int]) -> None:
        """Gives its pages back. They are kept for the session's next turn, and for others if of one policy."""
        policy, rest = generation.oldest, generation.computed % self._size
        if rest and generation.named == len(blocks) - 1 and policy is not None and policy is self._policy:
            self._name(generation, generation.named, rest, policy)
        self.withdraw(generation)
        self._pages.keep(generation.request.session, generation.tokens[: generation.computed], blocks, policy)
        self._pages.give(blocks, keep=True)

    def pages_in_use(self, generation: Generation, policy: PolicyRef) -> int:
        """How many full pages of its context it would share with running requests, from the start."""
        count, size = 0, self._size
        if generation.blocks:
            return 0
        while (count + 1) * size < len(generation.tokens):
            key = generation.key_of(count, size, policy, size)
            page = self._pages.find(key)
            if key not in self._promises and (page is None or not self._pages.in_use(page)):
                break
            count += 1
        return count

    def _at_boundary(self, generation: Generation) -> bool:
        return generation.computed == len(generation.blocks) * self._size

    def _name(self, generation: Generation, number: int, length: int, policy: PolicyRef) -> None:
        key = generation.key_of(number, length, policy, self._size)
        part = None if length == self._size else (generation.parent_of(number, policy, self._size), length)
        self._pages.name(generation.blocks[number], key, part)
        if self._promises.get(key) is generation:
            del self._promises[key]

    def _copy_part(self, generation: Generation, most: int) -> None:
        """Looks for a page that begins like the rest of the context, longest first, and copies it."""
        assert self._policy is not None
        number = len(generation.blocks)
        for length in self._pages.part_lengths(generation.parent_of(number, self._policy, self._size)):
            if length > most:
                continue
            page = self._pages.find(generation.key_of(number, length, self._policy, self._size))
            if page is not None:
                self._copy(generation, page, length)
                return

    def _copy(self, generation: Generation, page: int, count: int) -> None:
        """Copies a page of which the first `count` positions are wanted: the request goes on to write to it."""
        if not self._pages.available:
            return
        self._pages.hold([page])  # so that it is not evicted for its own copy
        if self._pages.available:
            target = self._pages.take(1)[0]
            self.copies.append((page, target))
            self.routes.copy(page, target)
            self._reuse(generation, [target], count)
        self._pages.give([page])

    def _reuse(self, generation: Generation, blocks: Sequence[int], count: int) -> None:
        assert self._policy is not None
        generation.blocks += blocks
        generation.reuse(count, self.routes.read(blocks, count), self._policy)
        generation.named = generation.computed // self._size
        self._count(generation, count)

    def _count(self, generation: Generation, tokens: int) -> None:
        if generation.first_token_at is None:
            self.hits += generation.cached_tokens == tokens
            self.hit_tokens += tokens
