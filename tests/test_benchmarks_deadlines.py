"""What `benchmarks.async_speedup` simulates: the price of the earliest-deadline rule, and slow tools."""

from __future__ import annotations

from pathlib import Path

from benchmarks.async_speedup import create, slow_tools
from benchmarks.deadline_price import simulate
from rollmill.kinds import build
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.namespace.client import NamespaceHost
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


async def test_commands_of_slow_tools_wait_and_say_so(tmp_path: Path) -> None:
    run = create(tmp_path, *slow_tools([0.25]), "name=slow")
    assert run.config.harness is not None
    harness, host = build(run.config.harness), NamespaceHost()
    machine = await host.create(BUILT_IN)
    try:
        result = await harness._exec(machine, ("true",))
        assert result.exit_code == 0 and result.seconds > 0.25  # the time it waited, and its own
    finally:
        await machine.close()
        await host.close()
        await harness.close()
