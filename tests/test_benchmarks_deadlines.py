"""The simulation that `benchmarks.async_speedup` prices the earliest-deadline rule with."""

from __future__ import annotations

from benchmarks.deadline_price import simulate
from rollmill.trajectories.pace import Pace

LONG_TAILED = [0.1] * 60 + [1.0] * 15 + [20.0] * 2


def test_the_rule_keeps_every_group_within_the_bound_and_costs_waiting() -> None:
    pace = Pace(groups_per_step=4, group_size=4, max_staleness=2)
    with_rule, without = (simulate(pace, LONG_TAILED, 0.5, steps=200, rule=rule) for rule in (True, False))
    assert with_rule.over_deadline == 0.0 < without.over_deadline < 1.0
    assert with_rule.due_share > 0.0 and with_rule.seconds_per_step > without.seconds_per_step


def test_equal_times_cost_nothing_and_synchronous_training_never_waits_for_due_groups() -> None:
    pace = Pace(groups_per_step=4, group_size=4, max_staleness=2)
    with_rule, without = (simulate(pace, [1.0], 0.5, steps=50, rule=rule) for rule in (True, False))
    assert with_rule == without and with_rule.due_share == with_rule.over_deadline == 0.0
    alone = simulate(Pace(4, 4, 0), LONG_TAILED, 0.5, steps=50, rule=True)
    assert alone.due_share == alone.over_deadline == 0.0
