"""Advantages, as in GRPO: how much better a trajectory did than its group.

advantage = reward − mean of the group's graded rewards. It is not divided by the standard deviation: a task that is
almost always solved would then count as much as one the policy can learn from. It is not divided by length: that would
favour short successes and long failures.

    rewards     [1, 0, 0, 1]  →  [+.5, −.5, −.5, +.5]
    rewards     [1, 1, 1]     →  no signal: every advantage is zero

A KL divergence in the reward has the same baseline: it subtracts its difference from the group's mean.
"""

from __future__ import annotations

import numpy as np


def has_signal(rewards_G: np.ndarray) -> bool:
    """Whether the graded rewards of a group differ by more than rounding."""
    return rewards_G.size > 1 and bool(np.ptp(rewards_G) > 1e-9)


def group_advantages(rewards_G: np.ndarray) -> np.ndarray:
    """float64 [G], from the graded rewards of one group; they sum to zero."""
    return rewards_G - rewards_G.mean()


def kl_advantages(kl_T: np.ndarray, groups_T: np.ndarray, factor: float) -> np.ndarray:
    """float64 [T]: what a reward of −factor · KL (k1 in the reward) adds to the advantage of each trajectory.

    `kl_T`: the sum over its tokens of log μ − log reference. `groups_T`: the index of its group.
    """
    sizes_G = np.bincount(groups_T)
    means_G = np.bincount(groups_T, weights=kl_T) / np.maximum(sizes_G, 1)
    return -factor * (kl_T - means_G[groups_T])
