"""What is known about one request: for limits, metrics, the access log and traces. Never contents or secrets.

The middleware makes an account per request. The router adds to the current one while it samples, in whatever task.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from rollmill.gateway.access.keys import Key
from rollmill.histogram import Histogram


@dataclass
class Account:
    started: float = field(default_factory=time.perf_counter)
    key: Key | None = None
    session: str = ""
    traffic: str = ""
    model: str = ""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    queue_s: float = 0.0  # waited for an engine with a free place
    first_token_s: float | None = None  # from the start of the request
    between_tokens: Histogram = field(default_factory=Histogram)  # seconds per token of each later chunk
    forwarded: bool = False  # another worker answers and counts it
    on_end: list[Callable[[], None]] = field(default_factory=list)
    _heard: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.sampled_tokens

    def hear(self, tokens: int) -> None:
        """A chunk with `tokens` sampled tokens has come from an engine."""
        if not tokens:
            return
        now = time.perf_counter()
        if self.first_token_s is None:
            self.first_token_s = now - self.started
        else:
            self.between_tokens.add((now - self._heard) / tokens, tokens)
        self._heard = now
        self.sampled_tokens += tokens

    def end(self) -> None:
        actions, self.on_end = self.on_end, []  # they hold the account, which must not hold them: a cycle
        for action in actions:
            action()


_CURRENT: ContextVar[Account] = ContextVar("account")


def open_account() -> Account:
    account = Account()
    _CURRENT.set(account)
    return account


def current_account() -> Account:
    """The account of the request that this task works for; an unused one outside of requests."""
    return _CURRENT.get(None) or Account()
