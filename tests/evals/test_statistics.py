"""Intervals equal published values, and cover the true rate as often as they should."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.evals.statistics import clustered_difference, clustered_interval, difference, student, wilson


def tries(solved: int, attempts: int) -> list[bool]:
    return [index < solved for index in range(attempts)]


counts = st.integers(1, 400).flatmap(lambda attempts: st.tuples(st.integers(0, attempts), st.just(attempts)))


# Newcombe (1998), "Two-sided confidence intervals for the single proportion", table I, method 3
@pytest.mark.parametrize(
    ("solved", "attempts", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_matches_published_values(solved: int, attempts: int, low: float, high: float) -> None:
    interval = wilson(solved, attempts)
    assert (interval.low, interval.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


# Newcombe (1998), "Interval estimation for the difference between independent proportions", table II, method 10
@pytest.mark.parametrize(
    ("after", "before", "low", "high"),
    [((56, 70), (48, 80), 0.0524, 0.3339), ((9, 10), (3, 10), 0.1705, 0.8090), ((10, 10), (0, 10), 0.6075, 1.0)],
)
def test_difference_matches_published_values(
    after: tuple[int, int], before: tuple[int, int], low: float, high: float
) -> None:
    interval = difference(before, after)
    assert interval.value == pytest.approx(after[0] / after[1] - before[0] / before[1])
    assert (interval.low, interval.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@given(counts)
def test_wilson_contains_the_rate_and_stays_within_0_and_1(count: tuple[int, int]) -> None:
    interval = wilson(*count)
    assert 0 <= interval.low <= interval.value <= interval.high <= 1
    mirrored = wilson(count[1] - count[0], count[1])
    assert mirrored.low == pytest.approx(1 - interval.high) and mirrored.high == pytest.approx(1 - interval.low)


def test_without_attempts_the_interval_is_the_whole_range() -> None:
    interval = wilson(0, 0)
    assert math.isnan(interval.value) and (interval.low, interval.high) == (0, 1)
    assert math.isnan(clustered_interval([]).value)
    assert math.isnan(clustered_difference({}, {"a": [True]}).value)


@pytest.mark.parametrize("count", [(-1, 3), (4, 3)])
def test_impossible_counts_are_refused(count: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="is impossible"):
        wilson(*count)
    with pytest.raises(ValueError, match="confidence"):
        wilson(1, 2, confidence=95)


def test_clusters_widen_the_interval_when_attempts_of_a_task_agree() -> None:
    agreeing = [tries(16, 16), tries(0, 16)] * 16  # 512 attempts, but only 32 independent outcomes
    mixed = [tries(8, 16)] * 31 + [tries(9, 16)]
    as_tosses, as_attempts = wilson(16, 32), wilson(256, 512)
    clustered = clustered_interval(agreeing)
    assert clustered.value == 0.5
    assert clustered.high - clustered.low > 3 * (as_attempts.high - as_attempts.low)
    assert clustered.high - clustered.low == pytest.approx(as_tosses.high - as_tosses.low, rel=0.15)
    narrow = clustered_interval(mixed)
    assert narrow.high - narrow.low == pytest.approx(as_attempts.high - as_attempts.low, rel=0.05), "never narrower"


@pytest.mark.parametrize("solved", [0, 4])
def test_equal_outcomes_do_not_give_an_interval_of_width_0(solved: int) -> None:
    interval = clustered_interval([tries(solved, 4)] * 20)
    assert interval.value == solved / 4
    expected = wilson(20 if solved else 0, 20)  # each task counts once, and Student's t is a little wider
    assert (interval.low, interval.high) == (
        pytest.approx(expected.low, abs=0.03),
        pytest.approx(expected.high, abs=0.03),
    )
    same = {f"t{index}": tries(solved, 4) for index in range(20)}
    change = clustered_difference(same, same)
    assert change.low == pytest.approx(-change.high) and change.high == pytest.approx(
        1 - interval.low if solved else interval.high
    )


@pytest.mark.parametrize(("tasks", "attempts"), [(3, 1), (6, 2), (10, 4), (20, 4), (64, 4)])
def test_intervals_cover_the_truth_with_few_tasks_too(tasks: int, attempts: int) -> None:
    """300 simulations each of a rate, of the difference of equal versions, and of a loss near the edge."""
    random, covered = np.random.default_rng(7), Counter[str]()
    for _ in range(300):
        rate_T, high_T = random.beta(0.8, 1.2, tasks), random.beta(19, 1, tasks)
        same = [{str(t): random.random(attempts) < rate_T[t] for t in range(tasks)} for _ in range(2)]
        rate = clustered_interval(list(same[0].values()))
        covered["rate"] += rate.low <= 0.4 <= rate.high
        change = clustered_difference(same[0], same[1])
        covered["difference"] += change.low <= 0 <= change.high
        worse = [{str(t): random.random(attempts) < high_T[t] - loss for t in range(tasks)} for loss in (0.0, 0.1)]
        covered["edge"] += clustered_difference(worse[0], worse[1]).low <= -np.minimum(high_T, 0.1).mean()
    assert min(covered.values()) >= 0.92 * 300, covered


def test_rewards_have_intervals_too() -> None:
    random = np.random.default_rng(3)
    tasks = [list(random.normal(-3.0, 2.0, 4)) for _ in range(50)]
    interval = clustered_interval(tasks)
    assert interval.low < -3.0 < interval.high and interval.high - interval.low < 1.5
    constant = clustered_interval([[0.5, 0.5]] * 10)
    assert constant.low < 0.3 and constant.high > 0.7, "a reward that is always the same says nothing of its spread"


# Student's t of two-sided 95 % intervals, from any table
@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (40, 2.021)])
def test_quantiles_of_student(freedom: int, expected: float) -> None:
    assert student(0.95, freedom) == pytest.approx(expected, rel=2e-3)
    assert student(0.95) == pytest.approx(1.96, abs=1e-3) and student(0.95, 0) == math.inf


def test_pairing_removes_the_difficulty_of_tasks() -> None:
    solved = {f"t{i}": 8 if i % 2 else 1 for i in range(40)}
    before = {task: tries(count, 10) for task, count in solved.items()}
    after = {task: tries(count + 1 + index % 2, 10) for index, (task, count) in enumerate(solved.items())}
    paired = clustered_difference(before, after)
    unpaired = difference((sum(map(sum, before.values())), 400), (sum(map(sum, after.values())), 400))
    assert paired.value == pytest.approx(unpaired.value) == pytest.approx(0.15)
    assert 0 < paired.low <= paired.value <= paired.high
    assert paired.high - paired.low < (unpaired.high - unpaired.low) / 3


def test_only_shared_tasks_are_compared() -> None:
    before, after = (
        {"a": tries(1, 4), "b": tries(2, 4), "x": tries(4, 4), "z": []},
        {"a": tries(3, 4), "b": tries(2, 4), "y": tries(0, 4), "z": tries(4, 4)},
    )
    interval = clustered_difference(before, after)
    assert interval.value == pytest.approx(0.25)
