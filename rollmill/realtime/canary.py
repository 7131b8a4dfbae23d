"""Canary: a share of production gets the candidate, and its acceptance is compared with that of the live version.

The comparison is looked at again and again, so a plain 95 % interval would soon be wrong by chance. The interval here
is always valid: the probability that it ever excludes the truth, however often one looks, is at most 1 − confidence,
as far as rates are normally distributed; tests/realtime/test_canary.py simulates small and unequal arms.
It is that of a mixture sequential probability ratio test: the true difference is mixed over a normal distribution of
width `EFFECT` around 0 (Johari, Pekelis and Walsh, 2017).

    the whole interval is below 0                                    roll back
    the whole interval is above −max_loss                            promote
    `sessions` of the candidate are there, the estimate ≥ −max_loss  promote
    `sessions` of the candidate are there, the estimate is lower     hold
    else                                                             go on
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

EFFECT = 0.1  # differences of acceptance that are looked for; the interval is narrowest for these


class Arm(NamedTuple):
    """The sessions of one version that users said something about."""

    accepted: int
    sessions: int

    @property
    def rate(self) -> float:
        return self.accepted / self.sessions if self.sessions else math.nan


@dataclass(frozen=True)
class CanaryVerdict:
    decision: Literal["promote", "hold", "roll back", "go on"]
    difference: float  # candidate minus live
    low: float
    high: float
    reason: str


def always_valid(live: Arm, candidate: Arm, confidence: float = 0.95) -> tuple[float, float, float]:
    """The difference of the acceptance rates, candidate minus live, with its always-valid interval."""
    if not live.sessions or not candidate.sessions:
        return 0.0, -1.0, 1.0
    # each arm has its own variance: a small arm that is accepted less varies more than a large one that is accepted
    # always. Two accepted and two refused sessions more (Agresti and Coull, 1998): a rate near 0 or 1 would seem to
    # have less variance than it has
    rates = [((arm.accepted + 2) / (arm.sessions + 4), arm.sessions) for arm in (live, candidate)]
    variance = sum(rate * (1 - rate) / sessions for rate, sessions in rates)
    mixed = EFFECT**2
    evidence = 2 * math.log(1 / (1 - confidence)) + math.log((variance + mixed) / variance)
    half = math.sqrt(variance * (variance + mixed) / mixed * evidence)
    difference = candidate.rate - live.rate
    return difference, max(-1.0, difference - half), min(1.0, difference + half)


def decide(live: Arm, candidate: Arm, *, max_loss: float, sessions: int, confidence: float = 0.95) -> CanaryVerdict:
    difference, low, high = always_valid(live, candidate, confidence)
    seen = (
        f"accepted {candidate.accepted} of {candidate.sessions} candidate sessions, {live.accepted} of {live.sessions} "
        f"live ones: difference {difference:+.3f}, always-valid interval {low:+.3f} to {high:+.3f}"
    )
    if candidate.sessions and high < 0:
        return CanaryVerdict("roll back", difference, low, high, f"users accept the candidate less: {seen}")
    if candidate.sessions and low > -max_loss:
        return CanaryVerdict("promote", difference, low, high, f"no loss of more than {max_loss:g}: {seen}")
    if candidate.sessions < sessions or not live.sessions:
        return CanaryVerdict("go on", difference, low, high, seen)
    if difference >= -max_loss:
        return CanaryVerdict(
            "promote", difference, low, high, f"no regression in {candidate.sessions} sessions: {seen}"
        )
    why = f"the loss seems larger than {max_loss:g}, and is not certain: {seen}"
    return CanaryVerdict("hold", difference, low, high, why)
