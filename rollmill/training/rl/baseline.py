"""Baseline: what the reward of a trajectory is compared with. Whether a group has something to learn from is decided
in training/rl/signal.py, which also looks at what does not come from the reward.

group_mean      the mean of the group's graded rewards
leave_one_out   the mean of the others: group_mean · G / (G − 1), so that small groups are not scaled down
population      the mean of the last `population_window` graded trajectories of the same family that earlier, committed
                steps decided on, and of groups closed since. For live traffic: a group may be one trajectory. A family
                with fewer than 8 of them has nothing to compare with yet: its first groups are closed and counted.
none            0: the reward is the advantage. It was compared before it was stored, as in feedback/distil.py. With
                credit = "answers" a reward of 0 says nothing: one answer may have earned what another one lost

None of them depends on the policy's choice in the trajectory itself beyond what the mean of its own group takes back,
so the gradient points where it would without a baseline. A step's record keeps the advantages, so a step that runs
again uses the same ones.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Protocol

import numpy as np

from rollmill.training.config import RLConfig
from rollmill.training.rl.advantage import group_advantages, has_signal
from rollmill.trajectories.ledger import Ledger

FEWEST = 8  # like trajectories; the mean of fewer says little
_ROUNDING = 1e-9


class Baseline(Protocol):
    def read(self, committed: int) -> None:
        """Take in what the steps up to `committed` have decided on, and what was closed for the next one."""
        ...

    def advantages(self, family: str, rewards_G: np.ndarray) -> np.ndarray | str:
        """float64 [G], of the graded rewards of one group, or why their rewards say nothing."""
        ...


class GroupBaseline:
    def __init__(self, *, leave_one_out: bool) -> None:
        self._leave_one_out = leave_one_out

    def read(self, committed: int) -> None: ...

    def advantages(self, family: str, rewards_G: np.ndarray) -> np.ndarray | str:
        if rewards_G.size < 2:
            return "no other trajectory of its group is graded"
        if not has_signal(rewards_G):
            return f"all {rewards_G.size} graded rewards of its group are equal"
        scale = rewards_G.size / (rewards_G.size - 1) if self._leave_one_out else 1.0
        return scale * group_advantages(rewards_G)


class PopulationBaseline:
    def __init__(self, ledger: Ledger, window: int) -> None:
        self._ledger = ledger
        self._read = 0
        self._rewards: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=window))
        self._closed: dict[str, list[float]] = defaultdict(list)  # for the step that is looked for

    def read(self, committed: int) -> None:
        for result in self._ledger.results(self._read, committed):
            self._rewards[result.family].append(result.reward)
        self._read = max(self._read, committed)
        self._closed.clear()
        for result in self._ledger.results(committed, committed + 1):
            self._closed[result.family].append(result.reward)

    def advantages(self, family: str, rewards_G: np.ndarray) -> np.ndarray | str:
        known = [*self._rewards.get(family, ()), *self._closed.get(family, ())]
        if len(known) < FEWEST:
            return f"only {len(known)} trajectories of family {family!r} to compare with so far"
        advantages_G = rewards_G - np.mean(known)
        if not (np.abs(advantages_G) > _ROUNDING).any():
            return f"its reward is that of the last {len(known)} trajectories of family {family!r}"
        return advantages_G


class NoBaseline:
    def __init__(self, *, by_answer: bool) -> None:
        self._by_answer = by_answer

    def read(self, committed: int) -> None: ...

    def advantages(self, family: str, rewards_G: np.ndarray) -> np.ndarray | str:
        return rewards_G if self._by_answer or (np.abs(rewards_G) > _ROUNDING).any() else "its reward is 0"


def make_baseline(config: RLConfig, ledger: Ledger) -> Baseline:
    if config.baseline == "none":
        return NoBaseline(by_answer=config.credit == "answers")
    if config.baseline == "population":
        return PopulationBaseline(ledger, config.population_window)
    return GroupBaseline(leave_one_out=config.baseline == "leave_one_out")
