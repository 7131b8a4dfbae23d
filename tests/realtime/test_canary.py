"""A canary is decided by an interval that stays valid however often one looks."""

from __future__ import annotations

import numpy as np
import pytest

from rollmill.realtime.canary import Arm, always_valid, decide

BOUNDS = {"max_loss": 0.05, "sessions": 400}


@pytest.mark.parametrize(
    ("live", "candidate", "decision"),
    [
        (Arm(0, 0), Arm(0, 0), "go on"),
        (Arm(60, 100), Arm(30, 50), "go on"),
        (Arm(600, 1000), Arm(10, 100), "roll back"),
        (Arm(6000, 10000), Arm(6000, 10000), "promote"),  # the interval alone decides
        (Arm(240, 400), Arm(236, 400), "promote"),  # at the end the estimate does
        (Arm(600, 1000), Arm(208, 400), "hold"),
        (Arm(0, 0), Arm(400, 400), "go on"),  # nothing to compare with
    ],
)
def test_decisions(live: Arm, candidate: Arm, decision: str) -> None:
    verdict = decide(live, candidate, **BOUNDS)
    assert verdict.decision == decision and verdict.low <= verdict.difference <= verdict.high
    assert f"{candidate.accepted} of {candidate.sessions} candidate sessions" in verdict.reason


def wrongly_rolled_back(gain: float) -> int:
    """Of 300 simulated canaries with 600 sessions, looked at after each 10: how many are rolled back."""
    random, found = np.random.default_rng(1), 0
    for _ in range(300):
        live, candidate = (np.cumsum(random.random(600) < 0.6 + change) for change in (0.0, gain))
        found += any(
            always_valid(Arm(int(live[at]), at + 1), Arm(int(candidate[at]), at + 1))[2] < 0 for at in range(9, 600, 10)
        )
    return found


def test_looking_often_does_not_roll_back_what_is_as_good() -> None:
    assert wrongly_rolled_back(0.0) <= 15, "5 % of 300: both sides together"


def test_a_regression_is_found() -> None:
    assert wrongly_rolled_back(-0.25) >= 270


def test_more_sessions_narrow_the_interval() -> None:
    widths = [np.ptp(always_valid(Arm(count // 2, count), Arm(count // 2, count))[1:]) for count in (50, 500, 5000)]
    assert widths[0] > widths[1] > widths[2]


@pytest.mark.parametrize(("live", "candidate"), [(1.0, 0.9), (0.98, 0.93), (0.6, 0.55)])
def test_looking_often_does_not_promote_what_is_worse(live: float, candidate: float) -> None:
    """Of 300 simulated canaries with 19 live sessions for each of the candidate: how many the interval promotes."""
    random, found = np.random.default_rng(2), 0
    for _ in range(300):
        first, second = np.cumsum(random.random(19 * 199) < live), np.cumsum(random.random(199) < candidate)
        looks = ((Arm(int(first[19 * n - 1]), 19 * n), Arm(int(second[n - 1]), n)) for n in range(1, 200))
        found += any(always_valid(*arms)[1] > -0.05 for arms in looks)
    assert found <= 15, "5 % of 300: both sides together"
