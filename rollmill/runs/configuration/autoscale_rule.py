"""The balance between sampling and training: how many engines the home region of a run should have.

    ledger: does a step compute?      ┐ once per ─► Balancer: keeps the last `window_s` seconds
    gateway: what do engines decode?  ┘ second        └─► decide(): a number of engines, with its reason

autoscaler.py takes the samples and acts on what is decided.

`decide` is a pure function. Engines that are busy for a share b of the time, and a trainer that computes for a share c,
are in balance with engines · b / c engines: then both are busy all the time. That is true only while engines have
enough to do together, so a trainer that waits while batches are nearly empty gets another advice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from pydantic import Field

from rollmill.config import Config

LOOK_S = 1.0  # between two samples
_WAITS, _IDLES = 0.1, 0.3  # shares of the time that are worth a change
_BUSY = 0.85  # the share of the time that engines should be busy: some room for bursts
_LATE = 5  # windows after which engines that were asked for and do not run are taken to have no place
_FILLED = 0.25  # the share of a batch below which another engine would not make answers faster


class BalanceConfig(Config):
    scale: Literal["off", "advise", "auto"] = Field(
        "advise",
        description="`advise`: say how many engines would keep engines and trainer busy, and why. `auto`: have as "
        "many. `off`: do not look.",
    )
    least: int = Field(1, ge=1, description="Fewest engines of the home region that `auto` keeps.")
    most: int = Field(8, ge=1, description="Most engines of the home region that `auto` starts.")
    window_s: float = Field(
        120.0,
        gt=0,
        description="Seconds that a decision looks back on, and at least the time between two changes. Smaller follows "
        "a changing load faster, and chance too.",
    )


class Sample(NamedTuple):
    """One look at the run."""

    computes: bool  # the trainer has groups: it computes a step
    queued: Sequence[int]  # requests that each engine has


@dataclass(frozen=True)
class Shares:
    """What the trainer and the engines did, as shares of the time."""

    waits: float  # the trainer had no groups
    idle: float  # an engine had no request, mean of all
    filled: float  # of the places in the batches of busy engines

    @classmethod
    def of(cls, samples: Sequence[Sample], capacity: int) -> Shares:
        looks = [queued for sample in samples for queued in sample.queued]
        busy = [min(queued / capacity, 1.0) for queued in looks if queued]
        return cls(
            waits=sum(not sample.computes for sample in samples) / len(samples),
            idle=1 - len(busy) / len(looks) if looks else 0.0,
            filled=sum(busy) / len(busy) if busy else 0.0,
        )


class Decision(NamedTuple):
    engines: int  # how many there should be
    reason: str


def decide(shares: Shares, engines: int, config: BalanceConfig, *, room: bool = True) -> Decision:
    """How many engines there should be instead of `engines`. At most twice as many, at least half as many. `room`:
    whether one more would have a device of its own."""
    seen = f"the trainer waits {shares.waits:.0%} of the time, engines are idle {shares.idle:.0%} of it"
    wanted = engines * (1 - shares.idle) / max(1 - shares.waits, 0.05) / _BUSY
    if shares.waits > _WAITS and wanted > engines:
        if shares.filled < _FILLED:
            advice = "more engines would not help: raise rollouts.concurrency or max_staleness, or shorten tools"
            return Decision(engines, f"{seen}, and their batches are {shares.filled:.0%} full: {advice}")
        if not room:
            return Decision(engines, f"{seen}: more engines would help, but no core or GPU is left for one")
        count = min(math.ceil(wanted), 2 * engines, max(config.most, engines))
        if count == engines:
            return Decision(engines, f"{seen}: more engines would help, but balance.most is {config.most}")
        return Decision(count, f"{seen}: more engines keep the trainer busy")
    if shares.idle > _IDLES and shares.waits <= _WAITS and wanted < engines:
        count = max(math.ceil(wanted), engines // 2, min(config.least, engines), 1)
        if count < engines:
            return Decision(count, f"{seen}: fewer engines are enough")
    if shares.waits > _WAITS and shares.idle > _IDLES:
        return Decision(engines, f"{seen}: rollouts themselves are slow, neither engines nor trainer are the limit")
    return Decision(engines, f"{seen}: in balance")


class Balancer:
    """Collects samples and decides when they fill a window. A change begins a new window. It decides about the engines
    that run: those that were asked for and do not come for `_LATE` windows do not count, and no more are asked for."""

    def __init__(self, config: BalanceConfig, capacity: int) -> None:
        self._config, self._capacity = config, capacity
        self._size = max(1, round(config.window_s / LOOK_S))
        self._samples: list[Sample] = []
        self._running = self._late = 0  # engines that run; looks since that number is another one than was asked for
        self._said: tuple[int, str] | None = None  # what was decided last: how many engines, and why

    def add(
        self, sample: Sample, engines: int, *, has_room: Callable[[], bool] = lambda: True
    ) -> dict[str, Any] | None:
        """What was decided, if that is new. `engines`: how many the run should have now. `has_room`: see `room` of
        `decide`."""
        running = len(sample.queued)
        if running != self._running:
            self._running, self._late = running, 0
        self._late = self._late + 1 if running != engines else 0
        if not running or 0 < self._late <= _LATE * self._size:
            self._samples.clear()  # an engine starts, or was lost: what it does then says nothing
            return None
        self._samples = [*self._samples[-(self._size - 1) :], sample] if self._size > 1 else [sample]
        if len(self._samples) < self._size:
            return None
        shares = Shares.of(self._samples, self._capacity)
        decision = decide(shares, running, self._config, room=not self._late and has_room())
        if self._late:
            decision = decision._replace(reason=f"{engines} engines are asked for, {running} run; {decision.reason}")
        changes = decision.engines != running
        self._samples = [] if changes else self._samples[-(self._size - self._size // 4) :]  # the next look, later
        said, self._said = self._said, (decision.engines, _kind(decision))
        if said == self._said and not (changes and self._config.scale == "auto"):
            return None
        return {**asdict(shares), "before": running, "engines": decision.engines, "reason": decision.reason}


def _kind(decision: Decision) -> str:
    """A reason without its figures: the same advice is not said again and again."""
    return decision.reason.rpartition(":")[2]


def describe(decided: Mapping[str, Any]) -> str:
    """One decision in words."""
    before, after = decided.get("before"), decided.get("engines")
    what = f"{before} engines" if before == after else f"{before} → {after} engines"
    verb = "" if before == after else " (done)" if decided.get("done") else " (advice)"
    return f"{what}{verb}: {decided.get('reason')}"
