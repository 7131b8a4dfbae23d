"""Advantages: how much better a trajectory did than its group.

advantage = reward − mean of the group's graded rewards. Not divided by the standard deviation, which would make a
task that is almost always solved weigh as much as one the policy can learn from, nor by length, which would favour
short successes and long failures.

    rewards     [1, 0, 0, 1]  →  [+.5, −.5, −.5, +.5]
    rewards     [1, 1, 1]     →  no signal: every advantage is zero

A KL divergence in the reward goes through the same baseline: what it takes off is its difference from the group's mean.
"""

from __future__ import annotations

import numpy as np


def has_signal(rewards_G: np.ndarray) -> bool:
    """Whether a group tells anything: its graded rewards differ (a fraction of a rounding error does not count)."""
    return rewards_G.size > 1 and bool(np.ptp(rewards_G) > 1e-9)


def group_advantages(rewards_G: np.ndarray) -> np.ndarray:
    """float64 [G] of the graded rewards of one group; they sum to zero."""
    return rewards_G - rewards_G.mean()


def kl_advantages(kl_T: np.ndarray, groups_T: np.ndarray, factor: float) -> np.ndarray:
    """float64 [T]: what to add to the advantage of each trajectory for a reward of −factor · its KL (k1 in the reward).

    `kl_T`: the sum over its tokens of log μ − log reference; `groups_T`: the group each belongs to, as an index.
    """
    sizes_G = np.bincount(groups_T)
    means_G = np.bincount(groups_T, weights=kl_T) / np.maximum(sizes_G, 1)
    return -factor * (kl_T - means_G[groups_T])
