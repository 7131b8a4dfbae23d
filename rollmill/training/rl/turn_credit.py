"""Turn-level credit (`credit = "turns"`): each answer is compared with the answers of its group at the same turn.

    return R(t)      the reward of the trajectory without what its turns before t earned: turn t had no part in that
    advantage A(t)   R(t) minus the mean of R(t) of the other trajectories of the group that have a turn t;
                     if no other has one: minus the mean of their whole rewards

No value model is needed: the others of the group are the estimate. An answer's own choice has no part in its baseline,
so the gradient is that of the expected reward. tests/training/rl/test_turn_credit.py computes both by enumeration.

A reward says what single turns earned in its parts: `parts["turn.2"] = -0.1` of `value` was earned by answer 2, the
third one (process reward). Without such parts, only the baselines differ from `credit = "path"`: a late answer is
compared with those that came as far.

    turns of a group's trajectories     rewards     R(0)              R(1)             R(2)
    a  2, of which turn.0 = -0.1          0.9        0.9               1.0
    b  3                                  0.0        0.0               0.0              0.0
    c  3                                  1.0        1.0               1.0              1.0
    A of c                                           1 - 0.45          1 - 0.5          1 - 0.0

Turns are the answers on the way to the outcome (training/rl/credit.py), summaries and sub-agents included, in the
order in which they began.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollmill.training.rl.credit import credit_of, credited_answers
from rollmill.types import TURN, Grade, Segment


def turn_returns(reward: Grade, turns: int) -> np.ndarray:
    """float64 [turns]: what was earned from each turn on."""
    earned_t = np.array([float(reward.parts.get(f"{TURN}{turn}", 0.0)) for turn in range(turns)], np.float64)
    return reward.value - (np.cumsum(earned_t) - earned_t)


def turn_advantages(returns_G: Sequence[np.ndarray]) -> list[np.ndarray]:
    """float64 [turns] for each trajectory of a group, from its returns."""
    found = []
    for mine, returns_t in enumerate(returns_G):
        others = [each for index, each in enumerate(returns_G) if index != mine and each.size]
        whole = np.mean([each[0] for each in others]) if others else 0.0
        baselines = [
            np.mean(there) if (there := [each[turn] for each in others if each.size > turn]) else whole
            for turn in range(returns_t.size)
        ]
        found.append(returns_t - np.array(baselines, np.float64))
    return found


def group_token_advantages(group: Sequence[tuple[Sequence[Segment], Grade]]) -> list[list[np.ndarray]]:
    """For each trajectory of a group, for each of its segments: float32 [T], 0 where no turn is."""
    turns_G = [turns_of(segments) for segments, _ in group]
    returns_G = [turn_returns(reward, len(turns)) for (_, reward), turns in zip(group, turns_G, strict=True)]
    found = []
    for (segments, _), turns, advantages in zip(group, turns_G, turn_advantages(returns_G), strict=True):
        tokens = [np.zeros(len(segment.tokens), np.float32) for segment in segments]
        for (index, start, end), advantage in zip(turns, advantages.tolist(), strict=True):
            tokens[index][start:end] = advantage
        found.append(tokens)
    return found


def turns_of(segments: Sequence[Segment]) -> list[tuple[int, int, int]]:
    """Segment, start and end of each answer on the way to the outcome, in the order in which they began."""
    return credited_answers(segments, credit_of(segments, "path"))
