"""Canary: a share of production gets the candidate, and what users say is compared with what they say to the live one.

The comparison is looked at again and again, so a plain 95 % interval would soon be wrong by chance. The interval here
is always valid: the probability that it ever excludes the truth, however often one looks, is at most 1 − confidence,
as far as rates are normally distributed; tests/realtime/test_canary.py simulates small and unequal arms.
It is that of a mixture sequential probability ratio test: the true difference is mixed over a normal distribution of
width `EFFECT` around 0 (Johari, Pekelis and Walsh, 2017).

    rate                  of                        what has to be shown before a promotion
    acceptance            sessions with a signal    no loss of more than max_loss
    accepted of all       all sessions              no loss of more than max_loss
    signals               all sessions              no change of more than max_loss, up or down

Acceptance alone can be won without better work: by inviting those to speak who are content, and keeping the others
silent. Then more or fewer users speak, or fewer sessions are accepted of all. Sessions without a signal count as not
accepted (intent to treat).

    acceptance is below that of live, over the whole interval       roll back
    all three are shown                                             promote
    signals or accepted of all are surely beyond max_loss           hold
    `sessions` of the candidate with a signal are there             hold: nothing is promoted because it looks well
    else                                                            go on
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rollmill.evals.statistics import POWER, Interval, student

EFFECT = 0.1  # differences of rates that are looked for; the interval is narrowest for these
_MOST_SESSIONS = 10**7


class Arm(NamedTuple):
    """The sessions of one version."""

    accepted: int
    sessions: int  # in which users said something
    all: int

    @classmethod
    def of(cls, said: Iterable[tuple[str, bool | None]], most: int) -> Arm:
        """Of (user, whether the session was accepted; None without a signal), in order. Of one user at most `most`
        sessions count; sessions that name no user all do."""
        seen: Counter[str] = Counter()
        counted = []
        for user, accepted in said:
            seen[user] += bool(user)
            if seen[user] <= most:
                counted.append(accepted)
        return cls(counted.count(True), len(counted) - counted.count(None), len(counted))


@dataclass(frozen=True)
class CanaryVerdict:
    decision: Literal["promote", "hold", "roll back", "go on"]
    acceptance: Interval  # candidate minus live, each with its always-valid interval
    accepted_of_all: Interval
    signals: Interval
    reason: str


def always_valid(live: tuple[int, int], candidate: tuple[int, int], confidence: float = 0.95) -> Interval:
    """The difference of two rates, candidate minus live, with its always-valid interval. Each is (count, of)."""
    if not live[1] or not candidate[1]:
        return Interval(0.0, -1.0, 1.0)
    # each arm has its own variance: a small arm that is accepted less varies more than a large one that is accepted
    # always. Two accepted and two refused sessions more (Agresti and Coull, 1998): a rate near 0 or 1 would seem to
    # have less variance than it has
    rates = [((count + 2) / (of + 4), of) for count, of in (live, candidate)]
    half = _half_width(sum(rate * (1 - rate) / of for rate, of in rates), confidence)
    difference = candidate[0] / candidate[1] - live[0] / live[1]
    return Interval(difference, max(-1.0, difference - half), min(1.0, difference + half))


def _half_width(variance: float, confidence: float) -> float:
    mixed = EFFECT**2
    evidence = 2 * math.log(1 / (1 - confidence)) + math.log((variance + mixed) / variance)
    return math.sqrt(variance * (variance + mixed) / mixed * evidence)


def needed(live: Arm, candidate: Arm, max_loss: float, confidence: float = 0.95) -> int | None:
    """About how many sessions of the candidate with a signal show, of a candidate that is as good, that nothing is lost
    (in `POWER` of all canaries). From the live rates and the shares of sessions so far; None if nothing is known."""
    if not (live.sessions and candidate.all and candidate.sessions):
        return None
    share = live.all / candidate.all
    accepted, spoken = live.accepted / live.sessions, (live.sessions + 2) / (live.all + 4)

    def shows(sessions: int) -> bool:
        for rate, of in ((accepted, sessions), (accepted * spoken, sessions / spoken), (spoken, sessions / spoken)):
            variance = max(rate * (1 - rate), 1 / (of + 4)) / of * (1 + 1 / share)
            if _half_width(variance, confidence) + math.sqrt(variance) * student(2 * POWER - 1) > max_loss:
                return False
        return True

    sessions = 16
    while not shows(sessions) and sessions < _MOST_SESSIONS:
        sessions = math.ceil(1.05 * sessions)
    return sessions


def decide(live: Arm, candidate: Arm, *, max_loss: float, sessions: int, confidence: float = 0.95) -> CanaryVerdict:
    acceptance = always_valid((live.accepted, live.sessions), (candidate.accepted, candidate.sessions), confidence)
    of_all = always_valid((live.accepted, live.all), (candidate.accepted, candidate.all), confidence)
    signals = always_valid((live.sessions, live.all), (candidate.sessions, candidate.all), confidence)
    seen = (
        f"accepted {candidate.accepted} of {candidate.sessions} candidate sessions with a signal ({candidate.all} in "
        f"all), {live.accepted} of {live.sessions} live ones ({live.all}): acceptance {_told(acceptance)}, accepted of "
        f"all {_told(of_all)}, signals {_told(signals)}"
    )

    def verdict(decision: Literal["promote", "hold", "roll back", "go on"], why: str = "") -> CanaryVerdict:
        return CanaryVerdict(decision, acceptance, of_all, signals, f"{why}: {seen}" if why else seen)

    if not (live.sessions and candidate.sessions):
        return verdict("go on")
    if acceptance.high < 0:
        return verdict("roll back", "users accept the candidate less")
    if min(acceptance.low, of_all.low, signals.low) >= -max_loss and signals.high <= max_loss:
        return verdict("promote", f"no loss of more than {max_loss:g}")
    if signals.low > max_loss or signals.high < -max_loss:
        said = "more" if signals.value > 0 else "less"
        return verdict("hold", f"users say something {said} often, so acceptance cannot be compared")
    if of_all.high < -max_loss:
        return verdict("hold", "fewer of all sessions are accepted")
    if candidate.sessions < sessions:
        return verdict("go on")
    about = needed(live, candidate, max_loss, confidence)
    return verdict("hold", f"no loss of more than {max_loss:g} takes about {about} sessions with a signal to show")


def _told(change: Interval) -> str:
    return f"{change.value:+.3f} ({change.low:+.3f} to {change.high:+.3f})"
