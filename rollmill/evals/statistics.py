"""Confidence intervals of solve rates, from counts.

Attempts at one task are correlated: sixteen attempts at one task say less than one attempt at each of sixteen tasks. So
the `clustered_*` functions resample whole tasks. `wilson` and `difference` are for independent attempts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

Counts = tuple[int, int]  # solved, attempts
Outcomes = Sequence[bool]  # per attempt at one task: solved or not


class Interval(NamedTuple):
    """A value and its confidence interval."""

    value: float
    low: float
    high: float


def wilson(solved: int, attempts: int, confidence: float = 0.95) -> Interval:
    """A solve rate with its Wilson score interval, which also holds near 0 and 1 and for few attempts."""
    if not 0 <= solved <= attempts:
        raise ValueError(f"{solved} solved of {attempts} attempts is impossible")
    if attempts == 0:
        return Interval(math.nan, 0.0, 1.0)
    rate, z = solved / attempts, _z(confidence)
    centre = (rate + z * z / (2 * attempts)) / (1 + z * z / attempts)
    half = z * math.sqrt(rate * (1 - rate) / attempts + z * z / (4 * attempts**2)) / (1 + z * z / attempts)
    # with a rate of exactly 0 or 1, rounding could put a bound on the wrong side of the rate
    return Interval(rate, max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half)))


def difference(before: Counts, after: Counts, confidence: float = 0.95) -> Interval:
    """`after` minus `before` for independent attempts: Newcombe's interval, built from the two Wilson intervals."""
    return combine(wilson(*before, confidence), wilson(*after, confidence))


def combine(before: Interval, after: Interval) -> Interval:
    """The difference of two independent estimates with known intervals."""
    gain = after.value - before.value
    down = math.hypot(after.value - after.low, before.high - before.value)
    up = math.hypot(after.high - after.value, before.value - before.low)
    return Interval(gain, gain - down, gain + up)


def clustered_interval(
    tasks: Sequence[Outcomes], confidence: float = 0.95, *, resamples: int = 4000, seed: int = 0
) -> Interval:
    """A solve rate over several attempts per task: percentile bootstrap over tasks."""
    counts_T2 = _counts([outcomes for outcomes in tasks if outcomes])
    if len(counts_T2) == 0:
        return Interval(math.nan, 0.0, 1.0)
    solved, attempts = counts_T2.sum(axis=0)
    if solved in (0, attempts):
        # all resamples are equal, so the bootstrap would give an interval of width 0; count each task once instead
        edge = wilson(len(counts_T2) if solved else 0, len(counts_T2), confidence)
        return Interval(float(solved / attempts), edge.low, edge.high)
    drawn_R2 = counts_T2[_draw(len(counts_T2), resamples, seed)].sum(axis=1)
    low, high = _percentiles(_rate(drawn_R2), confidence)
    return Interval(float(solved / attempts), low, high)


def clustered_difference(
    before: Mapping[str, Outcomes],
    after: Mapping[str, Outcomes],
    confidence: float = 0.95,
    *,
    resamples: int = 4000,
    seed: int = 0,
) -> Interval:
    """`after` minus `before` on the same tasks (by id). Resampling pairs removes the tasks' own difficulty."""
    shared = sorted(task for task in before.keys() & after.keys() if before[task] and after[task])
    if not shared:
        return Interval(math.nan, -1.0, 1.0)
    first_T2, second_T2 = _counts([before[task] for task in shared]), _counts([after[task] for task in shared])
    chosen_RT = _draw(len(shared), resamples, seed)
    gains_R = _rate(second_T2[chosen_RT].sum(axis=1)) - _rate(first_T2[chosen_RT].sum(axis=1))
    gain = float(_rate(second_T2.sum(axis=0)) - _rate(first_T2.sum(axis=0)))
    low, high = _percentiles(gains_R, confidence)
    return Interval(gain, min(low, gain), max(high, gain))


def clustered_change(
    before_T2: np.ndarray,
    after_T2: np.ndarray,
    confidence: float = 0.95,
    *,
    relative: bool = False,
    resamples: int = 4000,
    seed: int = 0,
) -> Interval:
    """How a rate changed on the same tasks. Row t of each array is (sum, count) of task t; the rate is sum over count.

    The change is `after` minus `before`, or, if `relative`, `after` over `before`. A rate whose count is 0 is infinite.
    """
    chosen_RT = _draw(len(before_T2), resamples, seed)

    def change(before_2: np.ndarray, after_2: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            first, second = _rate(before_2.astype(np.float64)), _rate(after_2.astype(np.float64))
            return second / first if relative else second - first

    value = float(change(before_T2.sum(axis=0), after_T2.sum(axis=0)))
    drawn_R = change(before_T2[chosen_RT].sum(axis=1), after_T2[chosen_RT].sum(axis=1))
    known_R = drawn_R[~np.isnan(drawn_R)]  # an infinite change counts: of a cost, it is the worst there is
    if not known_R.size:
        return Interval(value, -math.inf, math.inf)
    tail = (1 - confidence) / 2  # values that were drawn: nothing lies between a number and infinity
    low = float(np.quantile(known_R, tail, method="lower"))
    high = float(np.quantile(known_R, 1 - tail, method="higher"))
    return Interval(value, min(low, value), max(high, value))


def _z(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is between 0 and 1, not {confidence}")
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def _counts(tasks: Sequence[Outcomes]) -> np.ndarray:
    return np.array([(sum(map(bool, outcomes)), len(outcomes)) for outcomes in tasks], dtype=np.int64).reshape(-1, 2)


def _rate(counts: np.ndarray) -> np.ndarray:
    return counts[..., 0] / counts[..., 1]


def _draw(tasks: int, resamples: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, tasks, size=(resamples, tasks))


def _percentiles(values: np.ndarray, confidence: float) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)
