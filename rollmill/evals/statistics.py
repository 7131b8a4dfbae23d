"""Confidence intervals of solve rates and mean rewards. The gate, evaluations and reports all use these.

Attempts at one task are correlated: sixteen attempts at one task say less than one attempt at each of sixteen tasks. So
the `clustered_*` functions count whole tasks. `wilson` and `difference` are for independent attempts.

    rate or mean      Wilson's interval with the effective number of attempts (design effect), which is at least one
                      task's worth per task; quantiles of Student's t for tasks − 1 degrees of freedom: few tasks, wide
    difference        Newcombe's square-and-add of two such intervals, with the correlation of the tasks on both sides
    ratio of costs    of the logarithm, linearised

If all outcomes are equal, nothing is known of their spread: then each task counts as one attempt, so an interval never
has width 0. For the same reason a difference is never narrower than what tasks that all agree leave open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

Counts = tuple[int, int]  # solved, attempts
Values = Sequence[float]  # of the attempts at one task: rewards, or whether each was solved
_ANY = 20.0  # of a logarithm: a ratio with this half width may be anything
POWER = 0.8  # a suite "sees" a loss that it tells from none in this share of all comparisons


class Interval(NamedTuple):
    """A value and its confidence interval."""

    value: float
    low: float
    high: float


def wilson(solved: float, attempts: float, confidence: float = 0.95) -> Interval:
    """A solve rate with its Wilson score interval, which also holds near 0 and 1 and for few attempts."""
    if not 0 <= solved <= attempts:
        raise ValueError(f"{solved} solved of {attempts} attempts is impossible")
    z = student(confidence)
    return Interval(math.nan, 0.0, 1.0) if attempts == 0 else _score(solved / attempts, attempts, z)


def difference(before: Counts, after: Counts, confidence: float = 0.95) -> Interval:
    """`after` minus `before` for independent attempts: Newcombe's interval, built from the two Wilson intervals."""
    return combine(wilson(*before, confidence), wilson(*after, confidence))


def combine(before: Interval, after: Interval, correlation: float = 0.0) -> Interval:
    """The difference of two estimates with known intervals: square and add."""
    gain = after.value - before.value
    down = _sides(after.value - after.low, before.high - before.value, correlation)
    up = _sides(after.high - after.value, before.value - before.low, correlation)
    return Interval(gain, gain - down, gain + up)


def clustered_interval(tasks: Sequence[Values], confidence: float = 0.95) -> Interval:
    """A mean over several attempts per task: of outcomes (a solve rate) or of rewards."""
    known = [values for values in tasks if len(values)]
    if not known:
        return Interval(math.nan, 0.0, 1.0)
    found = _Clustered(known)
    return found.interval(student(confidence, len(known) - 1), found.low, found.high)


def clustered_difference(
    before: Mapping[str, Values], after: Mapping[str, Values], confidence: float = 0.95
) -> Interval:
    """`after` minus `before` on the same tasks (by id). Pairing removes the tasks' own difficulty."""
    shared = sorted(task for task in before.keys() & after.keys() if len(before[task]) and len(after[task]))
    if not shared:
        return Interval(math.nan, -1.0, 1.0)
    first, second = (_Clustered([side[task] for task in shared]) for side in (before, after))
    low, high = min(first.low, second.low), max(first.high, second.high)
    z = student(confidence, len(shared) - 1)
    found = combine(first.interval(z, low, high), second.interval(z, low, high), first.correlation(second))
    # what tasks that all agree leave open: one more could be as far away as the farthest, or as far as can be
    farthest = float(np.abs(second.means_T - first.means_T - found.value).max())
    least = (farthest if farthest > 1e-9 else high - low) * _score(0.0, len(shared), z).high
    down, up = max(found.value - found.low, least), max(found.high - found.value, least)
    return Interval(found.value, max(found.value - down, low - high), min(found.value + up, high - low))


def clustered_ratio(before_T2: np.ndarray, after_T2: np.ndarray, confidence: float = 0.95) -> Interval:
    """`after` over `before`, of costs on the same tasks. Row t of each array is (sum, count) of task t; the cost is sum
    over count. Costs that are 0 or without a count give a ratio of 0, infinity or NaN, without an interval."""
    first, second = cost(before_T2), cost(after_T2)
    value = second / first if first else (math.inf if second else math.nan)
    if not 0 < value < math.inf:
        return Interval(value, value, value)
    tasks = len(before_T2)
    relative_T = _relative(after_T2, second) - _relative(before_T2, first)
    error = math.sqrt(tasks / (tasks - 1) * float(relative_T @ relative_T)) if tasks > 1 else math.inf
    half = student(confidence, tasks - 1) * error if error else 0.0
    factor = math.exp(half) if half < _ANY else math.inf
    return Interval(value, value / factor, value * factor)


def cost(sums_T2: np.ndarray) -> float:
    """Sum over count of all tasks; infinite without a count, NaN without anything."""
    over, under = sums_T2.sum(axis=0).tolist()
    return over / under if under else (math.inf if over else math.nan)


def pass_at(k: int, outcomes: Sequence[bool]) -> float:
    """The probability that at least one of `k` of these attempts solves the task (Chen et al., 2021)."""
    return 1 - math.comb(len(outcomes) - sum(map(bool, outcomes)), k) / math.comb(len(outcomes), k)


def student(confidence: float, freedom: float = math.inf) -> float:
    """Student's t of a two-sided interval; infinite without a degree of freedom."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is between 0 and 1, not {confidence}")
    if freedom == 0:
        return math.inf
    if freedom == 1:
        return math.tan(math.pi * confidence / 2)
    if freedom == 2:
        return confidence * math.sqrt(2 / (1 - confidence**2))
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    # Abramowitz and Stegun, 26.7.5
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def seen(half_width: float, confidence: float, freedom: float) -> float:
    """The loss that a comparison tells from none with `POWER`, from the half width of its interval."""
    return half_width * (1 + NormalDist().inv_cdf(POWER) / student(confidence, freedom))


class _Clustered:
    """A mean, with its standard error over tasks. Each task has a value."""

    def __init__(self, tasks: Sequence[Values]) -> None:
        values, counts_T = np.fromiter(chain.from_iterable(tasks), np.float64), np.array(list(map(len, tasks)))
        sums_T = np.add.reduceat(values, np.cumsum(counts_T) - counts_T)
        self.tasks, self.means_T, self.value = len(tasks), sums_T / counts_T, float(values.mean())
        self.low, self.high = min(0.0, float(values.min())), max(1.0, float(values.max()))  # what a value may be
        self.residuals_T = (sums_T - self.value * counts_T) / len(values)
        independent = float(values.var()) / len(values)  # the design effect is at least one
        self.error = math.sqrt(max(self._covariance(self), independent))

    def _covariance(self, other: _Clustered) -> float:
        return self.tasks / max(self.tasks - 1, 1) * float(self.residuals_T @ other.residuals_T)

    def correlation(self, other: _Clustered) -> float:
        if not self.error * other.error:
            return 0.0
        return max(-1.0, min(1.0, self._covariance(other) / (self.error * other.error)))

    def interval(self, z: float, low: float, high: float) -> Interval:
        """For values between `low` and `high`."""
        width = high - low
        rate = (self.value - low) / width
        size = rate * (1 - rate) / (self.error / width) ** 2 if self.error > 1e-12 * width else self.tasks
        return Interval(*(low + width * each for each in _score(rate, size, z)))


def _score(rate: float, size: float, z: float) -> Interval:
    """Wilson's interval of a rate from `size` attempts, of which nothing need be whole."""
    if math.isinf(z):
        return Interval(rate, 0.0, 1.0)
    centre = (rate + z * z / (2 * size)) / (1 + z * z / size)
    half = z * math.sqrt(max(rate * (1 - rate), 0.0) / size + z * z / (4 * size**2)) / (1 + z * z / size)
    # with a rate of exactly 0 or 1, rounding could put a bound on the wrong side of the rate
    return Interval(rate, max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half)))


def _sides(one: float, other: float, correlation: float) -> float:
    return math.sqrt(max(one * one + other * other - 2 * correlation * one * other, 0.0))


def _relative(sums_T2: np.ndarray, rate: float) -> np.ndarray:
    over_T, under_T = sums_T2[:, 0], sums_T2[:, 1]
    return np.asarray((over_T - rate * under_T) / over_T.sum())
