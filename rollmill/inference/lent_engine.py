"""An engine of production is lent to training and comes back: which requests it answers in each state.

    own ── lend ──► leaving ──► lent ── recall, or the loan ends ──► returning ──► own

own        all requests
leaving    all requests; gateways see in its health that it is lent and send no more production. When the last answer
           has ended, the weights of the other line are fetched
lent       rollouts only: production never gets tokens of weights that are not its own
returning  none; running rollouts are broken off, and their gateway goes on with them elsewhere
own        rollouts are refused for `CLOSED_S`: some were on their way while the engine was still lent
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rollmill.histogram import Histogram
from rollmill.inference.engine import EngineUnavailable
from rollmill.types import TrafficClass

CLOSED_S = 3.0  # gateways look at the table of engines once per second


@dataclass
class Loan:
    line: str
    opens_at: float  # not before this moment are weights switched: gateways should have seen the health
    ends_at: float = math.inf  # then the engine returns by itself: who lent it may be dead
    state: Literal["leaving", "lent", "returning"] = "leaving"
    recalled_at: float = math.inf


class Guests:
    """The requests that an engine process answers now, and who may come in."""

    def __init__(self) -> None:
        self.loan: Loan | None = None
        self.loans = 0  # that have begun
        self.returns = Histogram()  # seconds from a recall to the own weights
        self._tasks: dict[asyncio.Task[object], TrafficClass] = {}
        self._turned_out: set[asyncio.Task[object]] = set()
        self._closed_until = -math.inf

    def __len__(self) -> int:
        return len(self._tasks)

    @contextlib.contextmanager
    def answering(self, traffic: TrafficClass) -> Iterator[None]:
        """Around the answer to a request, in its task. Raises EngineUnavailable if another engine should answer."""
        why = self._refusal(traffic)
        if why is not None:
            raise EngineUnavailable(why, hint="ask another engine")
        task = asyncio.current_task()
        assert task is not None, "a request is answered in a task"
        self._tasks[task] = traffic
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._turned_out:
                raise
            task.uncancel()
            raise EngineUnavailable("the engine went back to production", hint="ask another engine") from None
        finally:
            del self._tasks[task]
            self._turned_out.discard(task)

    def open_loan(self, loan: Loan) -> None:
        """From here on no production is let in."""
        loan.state = "lent"
        self.loans += 1

    def turn_out(self, loan: Loan) -> None:
        """The engine returns: break off what was begun while it was lent, and refuse what is still on its way."""
        now = time.monotonic()
        loan.state, loan.recalled_at, self._closed_until = "returning", min(loan.recalled_at, now), now + CLOSED_S
        for task, traffic in self._tasks.items():
            if traffic == "rollout":
                self._turned_out.add(task)
                task.cancel()

    def end_loan(self, loan: Loan) -> None:
        """The engine has its own weights again."""
        self.returns.add(time.monotonic() - loan.recalled_at)
        self.loan = None

    def _refusal(self, traffic: TrafficClass) -> str | None:
        state = self.loan.state if self.loan else None
        late = traffic == "rollout" and state != "lent" and time.monotonic() < self._closed_until
        if state == "returning" or late:
            return "the engine returns to production"
        return "the engine is lent to training" if state == "lent" and traffic == "production" else None
