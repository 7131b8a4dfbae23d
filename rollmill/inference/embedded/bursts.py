"""Bursts: several decode steps that run on the device without the host, each with the token that the last one drew.

    device   ── burst 1 ──┬── burst 2 ──┬── burst 3 ──
    host       launch 2   │  record 1, launch 3   │  record 2 …

The host launches the next burst before it records the last one, so the device does not wait. A request that ended in
burst 1 is still computed in burst 2: its rows there are dropped. They are written behind its last token, into pages
that were its own when burst 2 was launched; whoever gets these pages later writes them later, because the device runs
everything in order. From burst 3 on, its row is empty. When a request can join, or few rows are left, the last burst is
recorded and a step is scheduled as usual.

Only requests that are sampled with nothing but a temperature take part. No request joins and no weights change inside a
burst, so it is kept short: SECONDS at most, and one step if a request waits for a place. Where tokens are guessed, a
burst ends when a context is to be looked up again, and the next begins after that (`drafts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rollmill.inference.embedded.generation import Generation
from rollmill.inference.embedded.outputs import BurstOutput, BurstRunner
from rollmill.inference.embedded.sampler import is_plain
from rollmill.inference.embedded.scheduler import Scheduler, Work
from rollmill.types import PolicyRef

LONGEST = 16  # steps; not more than device_runner.LONGEST_BURST
SECONDS = 0.06  # that a burst should take; a quarter of it if users wait for its tokens


class BurstTokens(NamedTuple):
    """The tokens of one generation in a burst. Its log-probs may be not finite."""

    generation: Generation
    tokens: list[int]
    logprobs: list[float]
    routes: np.ndarray | None


class _Flight(NamedTuple):
    """A burst that the device computes."""

    rows: list[Generation | None]
    starts: np.ndarray  # the first position of each row
    steps: int
    policy: PolicyRef
    wait: Callable[[], BurstOutput]


class Bursts:
    def __init__(self, runner: BurstRunner, scheduler: Scheduler, stream_seconds: float) -> None:
        """`stream_seconds`: no burst with a streamed answer takes longer."""
        self._runner, self._scheduler, self._stream_seconds = runner, scheduler, stream_seconds
        self._flight: _Flight | None = None
        self._step_seconds = SECONDS / 4  # of the last burst; a guess before the first
        self.steps = 0  # of the burst that was landed last

    @property
    def flying(self) -> bool:
        return self._flight is not None

    @property
    def policy(self) -> PolicyRef:
        """The weights that compute the burst."""
        assert self._flight is not None
        return self._flight.policy

    def start(self, work: Sequence[Work], policy: PolicyRef) -> bool:
        """Launches a burst for `work`, whose pages are reserved for one step. False if it cannot be one."""
        if not all(_can_burst(item) for item in work):
            return False
        rows: list[Generation | None] = [item.generation for item in work]
        starts = np.array([item.start for item in work])
        steps = self._reserve(rows, starts, self._length())
        self._launch(rows, starts, max(steps, 1), policy, fresh=True)
        return True

    def land(self, go_on: bool) -> Iterator[BurstTokens]:
        """Waits for the burst and returns what it sampled. With `go_on`, the next one is launched before, if there is
        something to compute."""
        flight = self._flight
        assert flight is not None
        self._flight = None
        if go_on:
            self._go_on(flight)
        output = flight.wait()
        self._step_seconds, self.steps = output.seconds / flight.steps, flight.steps
        return self._sampled(flight, output)

    def _go_on(self, flight: _Flight) -> None:
        starts = flight.starts + flight.steps
        # a row that reaches its limit in this flight ends there, whatever it samples
        rows = [
            one if one is not None and one.number in self._scheduler.running and start < one.limit - 1 else None
            for one, start in zip(flight.rows, starts.tolist(), strict=True)
        ]
        live = sum(one is not None for one in rows)
        if not live or 2 * live < len(rows):
            return
        steps = self._reserve(rows, starts, self._length())
        if steps:
            self._launch(rows, starts, steps, flight.policy, fresh=False)

    def _length(self) -> int:
        if not self._scheduler.nobody_can_join:
            return 1
        running = self._scheduler.running.values()
        seconds = SECONDS / 4 if any(not one.is_rollout for one in running) else SECONDS
        if self._stream_seconds < seconds and any(one.stream for one in running):
            seconds = self._stream_seconds
        return max(1, min(LONGEST, int(seconds / max(self._step_seconds, 1e-6))))

    def _reserve(self, rows: Sequence[Generation | None], starts: np.ndarray, steps: int) -> int:
        """Reserves pages for as many of `steps` steps as there are pages, at least one; else returns 0. Positions at
        the limit are never computed for a token. 0 also if a context is to be looked up first."""
        live = [(one, start) for one, start in zip(rows, starts.tolist(), strict=True) if one is not None]
        steps = min(steps, max(one.limit - 1 - start for one, start in live))
        if self._scheduler.guesses:
            steps = min(steps, *(one.drafts.next_look - 1 - start for one, start in live))
        while steps > 0:
            if self._scheduler.reserve_ahead([(one, min(start + steps, one.limit - 1)) for one, start in live]):
                return steps
            steps //= 2
        return 0

    def _launch(
        self, rows: list[Generation | None], starts: np.ndarray, steps: int, policy: PolicyRef, *, fresh: bool
    ) -> None:
        wait = self._runner.launch(rows, starts.tolist() if fresh else None, steps)
        self._flight = _Flight(rows, starts, steps, policy, wait)

    def _sampled(self, flight: _Flight, output: BurstOutput) -> Iterator[BurstTokens]:
        """What each row sampled, up to its first stop token, its limit, or a log-prob that is not finite."""
        counts = _counts(flight, output)
        tokens, logprobs = output.tokens_KB.T.tolist(), output.logprobs_KB.T.tolist()
        # a copy: requests keep their routes, and a later burst writes into this memory
        routes = None if output.routes is None else output.routes.swapaxes(0, 1).copy()
        for row, (one, count) in enumerate(zip(flight.rows, counts, strict=True)):
            if one is not None and one.number in self._scheduler.running:
                own = None if routes is None else routes[row, :count]
                yield BurstTokens(one, tokens[row][:count], logprobs[row][:count], own)


def _can_burst(item: Work) -> bool:
    one = item.generation
    if item.count != 1 or not item.completes or one.request.top_logprobs:
        return False
    return is_plain(one.request.sampling, one.grammar)


def _counts(flight: _Flight, output: BurstOutput) -> list[int]:
    """How many tokens of each row count."""
    ends_KB = ~np.isfinite(output.logprobs_KB)
    by_stops: dict[tuple[int, ...], list[int]] = {}
    for row, one in enumerate(flight.rows):
        if one is not None and one.request.sampling.stop_tokens:
            by_stops.setdefault(tuple(one.request.sampling.stop_tokens), []).append(row)
    for stops, rows in by_stops.items():
        ends_KB[:, rows] |= np.isin(output.tokens_KB[:, rows], stops)
    first_B = np.where(ends_KB.any(0), ends_KB.argmax(0) + 1, flight.steps)
    limits_B = np.array([1 if one is None else one.limit - 1 for one in flight.rows]) - flight.starts
    counts: list[int] = np.minimum(first_B, limits_B).tolist()
    return counts
