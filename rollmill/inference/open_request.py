"""One request inside an engine: its growing context, and when it came, waited and was answered."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rollmill.inference.engine import GenerateChunk, GenerateRequest


@dataclass(eq=False)
class OpenRequest:
    number: int  # order of arrival; the highest is the newest
    request: GenerateRequest
    stream: bool
    limit: int  # the length at which generation ends
    deliver: Callable[[GenerateChunk | Exception], None]
    tokens: list[int] = field(init=False)
    is_rollout: bool = field(init=False)
    arrived_at: float = field(init=False, default_factory=time.monotonic)
    first_token_at: float | None = field(init=False, default=None)
    sent_at: float = field(init=False, default=0.0)
    cached_tokens: int = field(init=False, default=0)  # positions that were found and not computed
    _queued_since: float | None = field(init=False)
    _queued_seconds: float = field(init=False, default=0.0)
    _requeued_seconds: float = field(init=False, default=0.0)  # the part of it after the first token

    def __post_init__(self) -> None:
        self.tokens = list(self.request.tokens)
        self.is_rollout = self.request.traffic == "rollout"
        self._queued_since = self.arrived_at

    def start(self) -> None:
        """It has a place now."""
        if self._queued_since is not None:
            waited = time.monotonic() - self._queued_since
            self._queued_since = None
            self._queued_seconds += waited
            self._requeued_seconds += waited if self.first_token_at is not None else 0.0

    def requeue(self) -> None:
        """It has lost its place and waits again."""
        self._queued_since = time.monotonic()

    def _timing(self) -> dict[str, float]:
        now = time.monotonic()
        waiting = 0.0 if self._queued_since is None else now - self._queued_since
        return {
            "queue_seconds": self._queued_seconds + waiting,
            "requeue_seconds": self._requeued_seconds,
            "first_token_seconds": (self.first_token_at or now) - self.arrived_at,
            "total_seconds": now - self.arrived_at,
        }
