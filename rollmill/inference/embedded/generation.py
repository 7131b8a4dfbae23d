"""One request inside the engine: its pages of the cache, and the facts about its tokens that are not sent yet."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field

import numpy as np

from rollmill.inference.embedded.drafts import Drafts
from rollmill.inference.embedded.grammar import GrammarState
from rollmill.inference.embedded.pages import key_of_bytes, page_key, root_key, token_bytes
from rollmill.inference.engine import GenerateChunk
from rollmill.inference.open_request import OpenRequest
from rollmill.types import FinishReason, PolicyRef


@dataclass(eq=False)
class Generation(OpenRequest):
    """`blocks` are the pages with the keys and values of `tokens[:computed]`. The rest must be computed before the next
    token is sampled."""

    seed: int
    grammar: GrammarState | None = None
    drafts: Drafts = field(default_factory=Drafts)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    oldest: PolicyRef | None = None  # the oldest weights that wrote keys or values of `computed`
    named: int = 0  # pages that can be found by content: these and no later ones
    promised: list[bytes] = field(default_factory=list)  # keys of pages that it computes, and others wait for
    started: bool = False  # it has been admitted once
    _sent: int = field(init=False)  # tokens before this one were sent; those after it have what follows
    _logprobs: list[float] = field(default_factory=list)
    _policies: list[tuple[PolicyRef, int]] = field(default_factory=list)  # how many tokens each sampled, in order
    _kept: list[bytes] = field(default_factory=list)
    _best: list[list[tuple[int, float]]] = field(default_factory=list)
    _routes: list[np.ndarray] = field(default_factory=list)
    _routes_sent: int = 0  # positions before this one were reported, and are not reported again if recomputed
    _routes_held: int = 0
    _attended: PolicyRef | None = None  # the oldest weights whose keys or values a sampled token attended to
    _keys: list[bytes] = field(default_factory=list)  # of its full pages, under `_keys_policy`
    _keys_policy: PolicyRef | None = None
    _next: tuple[int, int, PolicyRef, bytes] | None = None  # the last answer of `next_key`, after what it depends on
    _compared: tuple[int, int, int] | None = None  # with whom, and both lengths; see `is_twin_of`
    _same: bool = False  # what that comparison found

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sent = len(self.tokens)

    @property
    def missing(self) -> int:
        return len(self.tokens) - self.computed

    def start(self) -> None:
        super().start()
        self.started = True

    def continue_session(self, blocks: list[int], count: int, oldest: PolicyRef | None) -> None:
        """Goes on from the first `count` positions of the session's last turn. Their routes were reported by it."""
        self.blocks, self.computed, self.oldest = blocks, count, oldest
        self.cached_tokens = self._routes_sent = count

    def reuse(self, count: int, routes: np.ndarray | None, policy: PolicyRef) -> None:
        """The next `count` positions were found in the cache. Their routes are reported as if they were computed."""
        if self.first_token_at is None:
            self.cached_tokens += count
        self.advance(count, routes, policy)

    def is_pure(self, policy: PolicyRef) -> bool:
        """Whether all its keys and values, if any, were written by the weights of `policy`."""
        return self.oldest is None or self.oldest is policy or self.oldest == policy

    def key_of(self, page: int, length: int, policy: PolicyRef, size: int) -> bytes:
        """The key of its page number `page` with `length` positions, under `policy`. Full pages have `size`."""
        if length == size:
            return self.parent_of(page + 1, policy, size)
        start = page * size
        return page_key(self.parent_of(page, policy, size), self.tokens[start : start + length])

    def next_key(self, policy: PolicyRef, size: int) -> bytes:
        """The key of the page after its last one, as far as its context reaches. It is remembered: a prompt that waits
        is asked in every step."""
        page, length = len(self.blocks), len(self.tokens)
        if self._next is None or self._next[:2] != (page, length) or self._next[2] is not policy:
            self._next = page, length, policy, self.key_of(page, min(size, length - page * size), policy, size)
        return self._next[3]

    def parent_of(self, page: int, policy: PolicyRef, size: int) -> bytes:
        """The key of the page before `page`, which is full; for page 0, that of an empty context."""
        if self._keys_policy is not policy:
            self._keys, self._keys_policy = [root_key(policy)], policy
        if len(self._keys) <= page:
            start = (len(self._keys) - 1) * size
            new = token_bytes(self.tokens[start : page * size])
            for at in range(0, len(new), 4 * size):
                self._keys.append(key_of_bytes(self._keys[-1], new[at : at + 4 * size]))
        return self._keys[page]

    def full_keys(self, page: int, count: int, policy: PolicyRef, size: int) -> list[bytes]:
        """The keys of `count` full pages from number `page` on."""
        self.parent_of(page + count, policy, size)
        return self._keys[page + 1 : page + count + 1]

    def take_keys(self, other: Generation, size: int) -> None:
        """Takes the keys of its full pages from `other`, if that has them and its context begins with this one: those
        of a group that come later hash their prompt only up to the first page."""
        full = len(self.tokens) // size
        helps = self._keys_policy is other._keys_policy and len(self._keys) <= full < len(other._keys)
        if helps and len(other.tokens) == len(self.tokens):
            self.is_twin_of(other)  # takes them, and remembers the comparison
        elif helps and other.tokens[: len(self.tokens)] == self.tokens:
            self._keys = other._keys[: full + 1]

    def is_twin_of(self, other: Generation) -> bool:
        """Whether both have the same context. Then the keys of full pages are taken from `other`, so that a group
        hashes its prompt once. Contexts are compared once while neither grows: one that waits for a long prompt is
        asked in every step."""
        pair = (other.number, len(other.tokens), len(self.tokens))
        if self._compared != pair:
            self._compared, self._same = pair, other.tokens == self.tokens
        if self._same and (self._keys_policy is not other._keys_policy or len(self._keys) < len(other._keys)):
            self._keys, self._keys_policy = list(other._keys), other._keys_policy
        return self._same

    def release(self) -> None:
        """Its pages are gone: the context is computed again, with routes as they were reported."""
        self.blocks, self.computed, self.oldest, self.named = [], 0, None, 0
        if self.first_token_at is None:
            self.cached_tokens = 0

    def advance(self, count: int, routes: np.ndarray | None, policy: PolicyRef) -> None:
        """Records that `count` more positions were computed with the weights of `policy`."""
        start, self.computed = self.computed, self.computed + count
        if self.oldest is None:
            self.oldest = policy
        if self.missing <= 0:  # the next token attends to them; when it is recorded, the pages may be gone
            self._attend()
        known = self._routes_sent + self._routes_held
        if routes is not None and self.computed > known:
            # a context recomputed after preemption keeps the routes that its tokens were sampled with
            self._routes.append(routes[known - start :])
            self._routes_held += self.computed - known

    def sample(
        self,
        token: int,
        logprob: float,
        policy: PolicyRef,
        kept: bytes = b"",
        best: list[tuple[int, float]] | None = None,
    ) -> FinishReason | None:
        """`kept` and `best`: the tokens that could be drawn, and the most likely ones, if the request asks for them."""
        if self.request.sampling.cuts:
            self._kept.append(kept)
        if self.request.top_logprobs:
            self._best.append(best or [])
        if self.grammar is not None:
            self.grammar.accept(token)
        return self._append([token], [logprob], policy)

    def extend(
        self, tokens: list[int], logprobs: list[float], policy: PolicyRef, routes: np.ndarray | None
    ) -> FinishReason | None:
        """Records the tokens of a burst, and that the positions they were drawn after were computed. Only the last may
        be a stop token."""
        self.advance(len(tokens), routes, policy)
        return self._append(tokens, logprobs, policy)

    def _append(self, tokens: list[int], logprobs: list[float], policy: PolicyRef) -> FinishReason | None:
        self.tokens += tokens
        self._logprobs += logprobs
        count = self._policies.pop()[1] if self._policies and self._policies[-1][0] is policy else 0
        self._policies.append((policy, count + len(tokens)))
        self._attend()
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
        if tokens[-1] in self.request.sampling.stop_tokens:
            return "stop"
        return "length" if len(self.tokens) >= self.limit else None

    def _attend(self) -> None:
        if self._attended is None:  # later tokens never attend to older ones: weights only move on
            self._attended = self.oldest

    def chunk(self, finish: FinishReason | None = None) -> GenerateChunk:
        """A chunk with everything not sent yet."""
        policies = list(dict.fromkeys(policy for policy, _ in self._policies))
        numbers = (count * [policies.index(policy)] for policy, count in self._policies)
        chunk = GenerateChunk(
            tokens=self.tokens[self._sent :],
            logprobs=self._logprobs,
            policy=list(itertools.chain.from_iterable(numbers)),
            policies=policies,
            kept=self._kept,
            routes_start=self._routes_sent,
            routes=np.concatenate(self._routes) if self._routes else None,
            finish=finish,
            top_logprobs=self._best,
        )
        if finish is not None:
            chunk.oldest_kv_policy, chunk.cached_tokens = self._attended or self.oldest, self.cached_tokens
            chunk.timing = self._timing()
        self._sent = len(self.tokens)
        self._logprobs, self._policies, self._kept, self._best, self._routes = [], [], [], [], []
        self._routes_sent, self._routes_held = self._routes_sent + self._routes_held, 0
        self.sent_at = time.monotonic()
        return chunk
