"""Rate limits and budgets of keys.

Requests and tokens per minute are buckets that refill continuously and start full. A request needs one request and at
least one token in its buckets. The tokens of an answer are subtracted when it ends, so a bucket can go below zero, and
the next request waits longer. Limits are counted per gateway; its workers share the buckets. Used tokens are added to
the database a few seconds later; a killed gateway loses at most that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections import defaultdict

from rollmill.errors import GatewayError, StorageError
from rollmill.gateway.access.buckets import Buckets
from rollmill.gateway.access.keys import Key, KeyStore

log = logging.getLogger(__name__)
_FLUSH_S = 2.0


class KeyLimits:
    def __init__(self, store: KeyStore | None, buckets: Buckets | None = None) -> None:
        self._store = store
        self._buckets = buckets or Buckets()
        self._unsaved: defaultdict[str, int] = defaultdict(int)
        self._counting = threading.Lock()  # of _unsaved: answers count in the event loop, `save` runs in a thread
        self._saving = threading.Lock()  # one `save` at a time: two would save the same tokens
        self._before: dict[str, int] = {}  # key -> used tokens when this process first saw it
        self._mine: defaultdict[str, int] = defaultdict(int)  # key -> tokens used through this process

    def admit(self, key: Key, *, samples: bool = True) -> None:
        """Counts one request of a key. Raises 429 with Retry-After over a rate, 402 over the budget. One that does not
        sample is limited only by the number of requests."""
        if samples and key.budget_tokens is not None and self._used(key) >= key.budget_tokens:
            raise GatewayError(
                f"the budget of this key, {key.budget_tokens} tokens, is used up",
                status=402,
                code="insufficient_quota",
                hint="`rollmill keys create` makes a key with another budget",
            )
        limits = {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute if samples else None}
        if not any(limits.values()):
            return
        with self._buckets.locked():
            for unit, per_minute in limits.items():
                wait = 0.0 if per_minute is None else self._buckets.wait_s(f"{unit} {key.id}", per_minute, 1)
                if wait > 0:
                    raise GatewayError(
                        f"the limit of this key is {per_minute} {unit} per minute",
                        status=429,
                        code="rate_limit_exceeded",
                        hint=f"try again in {math.ceil(wait)} s",
                        retry_after_s=wait,
                    )
            if key.requests_per_minute is not None:
                self._buckets.take(f"requests {key.id}", key.requests_per_minute, 1)

    def used(self, key: Key, tokens: int) -> None:
        """Counts the tokens of an answer, prompt included."""
        if key.tokens_per_minute is not None:
            with self._buckets.locked():
                self._buckets.take(f"tokens {key.id}", key.tokens_per_minute, tokens)
        if key.created_at:  # bootstrap keys are not in the database
            with self._counting:
                self._unsaved[key.id] += tokens
            self._mine[key.id] += tokens

    async def run(self) -> None:
        """Saves used tokens until it is cancelled."""
        try:
            while True:
                await asyncio.sleep(_FLUSH_S)
                await asyncio.to_thread(self.save)
        finally:
            with contextlib.suppress(StorageError):
                self.save()

    def save(self) -> None:
        with self._saving:
            with self._counting:
                tokens = dict(self._unsaved)
            if not tokens or self._store is None:
                return
            try:
                self._store.add_usage(tokens)
            except StorageError as error:
                log.warning("the usage of keys cannot be saved now: %s", error)
                return
            with self._counting:
                for id, count in tokens.items():
                    self._unsaved[id] -= count
                    if not self._unsaved[id]:
                        del self._unsaved[id]

    def _used(self, key: Key) -> int:
        # `key` may have been read before the last save, and other gateways save too: the larger count is right
        before = self._before.setdefault(key.id, key.used_tokens)
        return max(before + self._mine[key.id], key.used_tokens)
