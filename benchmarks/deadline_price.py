"""What the earliest-deadline rule costs in waiting: a SIMULATION in virtual time, called by `benchmarks.async_speedup`.

Groups take as long as their longest episode; an episode is a few tool calls, whose times are drawn. Rollouts run at the
same time, and a training step takes a fixed time. Which groups a step takes is decided by the trainer's own code
(rollmill/training/rl/deadlines.py). Without the rule, a step takes whatever finished first. Long groups are then
trained on after their deadline, and their tokens would have to be masked. Both are simulated on the same draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rollmill.training.rl.deadlines import Candidate, choose_groups
from rollmill.trajectories.pace import Pace

CALLS = 3  # tool calls of an episode


@dataclass
class Simulated:
    seconds_per_step: float = 0.0
    due_share: float = 0.0  # of the time: enough groups were ready, and the step waited for older ones
    over_deadline: float = 0.0  # share of trained groups


@dataclass
class _Mill:
    """All groups that no step has taken, by number; and who finishes when."""

    pace: Pace
    durations: Sequence[float]
    now: float = 0.0
    version: int = 0
    started: int = 0
    open: dict[int, tuple[int, float]] = field(default_factory=dict)  # number → deadline, end

    def admit(self, leased: int) -> None:
        """Start groups as the dispatcher would; `leased`: groups of the step that trains now."""
        most = (self.pace.max_staleness + 1) * self.pace.groups_per_step
        while len(self.open) + leased < most:
            end = self.now + self.durations[self.started]
            self.open[self.started] = (self.pace.deadline(self.version), end)
            self.started += 1

    def choose(self, rule: bool) -> list[int] | None:
        size = self.pace.groups_per_step
        if rule:
            groups = [Candidate(str(number), due, end <= self.now) for number, (due, end) in self.open.items()]
            take = choose_groups(groups, self.version + 1, size).take
            return None if take is None else [int(number) for number in take]
        ready = sorted((end, number) for number, (_, end) in self.open.items() if end <= self.now)
        return [number for _, number in ready[:size]] if len(ready) >= size else None


def simulate(pace: Pace, tools: Sequence[float], training_seconds: float, *, steps: int, rule: bool) -> Simulated:
    draw = np.random.default_rng(0)
    groups = (steps + pace.max_staleness + 2) * pace.groups_per_step
    episodes = draw.choice(np.asarray(tools), size=(groups, pace.group_size, CALLS)).sum(2)
    mill = _Mill(pace, episodes.max(1).tolist())
    late, due_seconds = 0, 0.0
    for _ in range(steps):
        mill.admit(leased=0)
        enough_at = None
        while (taken := mill.choose(rule)) is None:
            ends = sorted(end for _, end in mill.open.values())
            if enough_at is None and ends[pace.groups_per_step - 1] <= mill.now:
                enough_at = mill.now
            mill.now = next(end for end in ends if end > mill.now)
        due_seconds += 0.0 if enough_at is None else mill.now - enough_at
        late += sum(mill.open.pop(number)[0] < mill.version + 1 for number in taken)
        mill.admit(leased=len(taken))
        mill.now += training_seconds
        mill.version += 1
    count = steps * pace.groups_per_step
    return Simulated(mill.now / steps, due_seconds / mill.now, late / count)
