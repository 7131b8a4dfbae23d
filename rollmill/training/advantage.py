"""Advantages: how much better a trajectory did than its group.

advantage = reward − mean of the group's graded rewards. Not divided by the standard deviation, which would make a
task that is almost always solved weigh as much as one the policy can learn from, nor by length, which would favour
short successes and long failures.

    rewards     [1, 0, 0, 1]  →  [+.5, −.5, −.5, +.5]
    rewards     [1, 1, 1]     →  no signal: every advantage is zero
"""

from __future__ import annotations

import numpy as np


def has_signal(rewards_G: np.ndarray) -> bool:
    """Whether a group tells anything: its graded rewards differ (a fraction of a rounding error does not count)."""
    return rewards_G.size > 1 and bool(np.ptp(rewards_G) > 1e-9)


def group_advantages(rewards_G: np.ndarray) -> np.ndarray:
    """float64 [G] of the graded rewards of one group; they sum to zero."""
    return rewards_G - rewards_G.mean()
