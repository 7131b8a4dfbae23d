"""A canary is decided by an interval that stays valid however often one looks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from rollmill.realtime.canary import Arm, always_valid, decide, needed

BOUNDS = {"max_loss": 0.05, "sessions": 400}


@pytest.mark.parametrize(
    ("live", "candidate", "decision"),
    [
        (Arm(0, 0, 10), Arm(0, 0, 10), "go on"),
        (Arm(60, 100, 100), Arm(30, 50, 50), "go on"),
        (Arm(600, 1000, 1000), Arm(10, 100, 100), "roll back"),
        (Arm(6000, 10000, 30000), Arm(6000, 10000, 30000), "promote"),
        (Arm(240, 400, 400), Arm(236, 400, 400), "hold"),  # it looks as good, and that is not enough
        (Arm(600, 1000, 1000), Arm(208, 400, 400), "hold"),
        (Arm(0, 0, 400), Arm(400, 400, 400), "go on"),  # nothing to compare with
        (Arm(6000, 10000, 50000), Arm(8000, 10000, 25000), "hold"),  # twice as many users say something
        (Arm(6000, 10000, 25000), Arm(8000, 10000, 50000), "hold"),  # half as many
        (Arm(9000, 10000, 10000), Arm(9000, 10000, 11500), "hold"),  # fewer of all sessions are accepted
    ],
)
def test_decisions(live: Arm, candidate: Arm, decision: str) -> None:
    verdict = decide(live, candidate, **BOUNDS)
    assert verdict.decision == decision
    for change in (verdict.acceptance, verdict.accepted_of_all, verdict.signals):
        assert change.low <= change.value <= change.high
    assert f"{candidate.accepted} of {candidate.sessions} candidate sessions" in verdict.reason


def test_a_held_canary_says_how_many_sessions_its_bound_takes() -> None:
    live, candidate = Arm(2280, 3800, 3800), Arm(120, 200, 200)
    verdict = decide(live, candidate, max_loss=0.05, sessions=200)
    count = needed(live, candidate, 0.05)
    assert verdict.decision == "hold" and f"takes about {count} sessions with a signal to show" in verdict.reason
    assert count is not None and 1000 < count < 2500
    assert needed(Arm(0, 0, 0), candidate, 0.05) is None
    random, promoted = np.random.default_rng(3), 0
    for _ in range(200):  # as many do show it, of a candidate that is as good
        arms = [Arm(int((random.random(n) < 0.6).sum()), n, n) for n in (19 * count, count)]
        promoted += decide(arms[0], arms[1], max_loss=0.05, sessions=count).decision == "promote"
    assert promoted >= 140, "4 of 5"


def looked_at(live: float, candidate: float) -> str:
    """A simulated canary with 19 live sessions for each of the candidate, until 400 of its sessions."""
    random = np.random.default_rng(looked_at.seeds)  # type: ignore[attr-defined]
    looked_at.seeds += 1  # type: ignore[attr-defined]
    first, second = np.cumsum(random.random(19 * 400) < live), np.cumsum(random.random(400) < candidate)
    for n in range(10, 401, 10):
        arms = Arm(int(first[19 * n - 1]), 19 * n, 19 * n), Arm(int(second[n - 1]), n, n)
        verdict = decide(arms[0], arms[1], max_loss=0.05, sessions=400)
        if verdict.decision != "go on":
            break
    return verdict.decision


looked_at.seeds = 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("loss", [0.05, 0.08, 0.1])
def test_what_is_worse_is_not_promoted_at_the_end(loss: float) -> None:
    assert sum(looked_at(0.6, 0.6 - loss) == "promote" for _ in range(100)) <= 5


def test_of_one_user_only_some_sessions_count() -> None:
    said = [("loud", True)] * 50 + [("quiet", None), ("other", False), ("", True), ("", True)]
    assert Arm.of(said, most=5) == Arm(accepted=7, sessions=8, all=9)


def test_a_policy_that_invites_clicks_is_not_promoted() -> None:
    """A is right in 80 % of sessions; users who are content say nothing, the others undo it. B is right in 50 % and
    asks for a click. Of those who say something, more accept B, and of all sessions too: only how many speak tells."""
    right = {"A": 0.8, "B": 0.5}
    speak = {("A", True): 0.1, ("A", False): 0.6, ("B", True): 0.6, ("B", False): 0.1}
    random = np.random.default_rng(0)

    def arm(share: float, count: int) -> Arm:
        found = Counter[str]()
        for _ in range(count):
            policy = "B" if random.random() < share else "A"
            solved = bool(random.random() < right[policy])
            said = random.random() < speak[policy, solved]
            found += Counter({"accepted": said and solved, "sessions": int(said), "all": 1})
        return Arm(found["accepted"], found["sessions"], found["all"])

    decisions = [decide(arm(0.27, 12000), arm(0.61, count), max_loss=0.05, sessions=100) for count in (650, 12000)]
    assert [each.decision for each in decisions] == ["hold", "hold"]
    assert decisions[1].acceptance.low > 0 and decisions[1].accepted_of_all.low > 0, "both look better"
    assert "users say something more often" in decisions[1].reason or "signals" in decisions[1].reason


def wrongly_rolled_back(gain: float) -> int:
    """Of 300 simulated canaries with 600 sessions, looked at after each 10: how many are rolled back."""
    random, found = np.random.default_rng(1), 0
    for _ in range(300):
        live, candidate = (np.cumsum(random.random(600) < 0.6 + change) for change in (0.0, gain))
        found += any(
            always_valid((int(live[at]), at + 1), (int(candidate[at]), at + 1)).high < 0 for at in range(9, 600, 10)
        )
    return found


def test_looking_often_does_not_roll_back_what_is_as_good() -> None:
    assert wrongly_rolled_back(0.0) <= 15, "5 % of 300: both sides together"


def test_a_regression_is_found() -> None:
    assert wrongly_rolled_back(-0.25) >= 270


def test_more_sessions_narrow_the_interval() -> None:
    widths = [np.ptp(always_valid((count // 2, count), (count // 2, count))[1:]) for count in (50, 500, 5000)]
    assert widths[0] > widths[1] > widths[2]


@pytest.mark.parametrize(("live", "candidate"), [(1.0, 0.9), (0.98, 0.93), (0.6, 0.55)])
def test_looking_often_does_not_promote_what_is_worse(live: float, candidate: float) -> None:
    """Of 300 simulated canaries with 19 live sessions for each of the candidate: how many the interval promotes."""
    random, found = np.random.default_rng(2), 0
    for _ in range(300):
        first, second = np.cumsum(random.random(19 * 199) < live), np.cumsum(random.random(199) < candidate)
        looks = (((int(first[19 * n - 1]), 19 * n), (int(second[n - 1]), n)) for n in range(1, 200))
        found += any(always_valid(*arms)[1] > -0.05 for arms in looks)
    assert found <= 15, "5 % of 300: both sides together"
