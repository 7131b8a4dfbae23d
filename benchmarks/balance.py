"""How the number of engines follows a load that shifts: a SIMULATION in virtual time. `python -m benchmarks.balance`

A trainer takes 10 s per step of 16 groups. An engine makes a group in 2 s, later in 5 s, then in 1 s, while fewer than
32 groups are there; so 3.2, 8 and 1.6 engines are in balance. An engine joins 20 s after it was asked for. What is
decided is decided by the code that runs (rollmill/runs/configuration/autoscale_rule.py). Beside it: the same load, a
fixed number.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.output import at_least, at_most, finish
from rollmill.runs.configuration.autoscale_rule import BalanceConfig, Balancer, Sample

CAPACITY, GROUPS_PER_STEP, STEP_S, MOST_GROUPS, JOIN_S = 8, 16, 10, 32, 20
STRETCH_S = 1000
LOADS = (2.0, 5.0, 1.0)  # seconds of an engine per group, in each stretch


class Second(NamedTuple):
    computes: bool  # the trainer
    engines: int
    idle: bool  # the engines
    reason: str | None = None  # of a change


def load(now: int) -> float:
    return LOADS[min(now // STRETCH_S, len(LOADS) - 1)]


def simulate(
    config: BalanceConfig | None, seconds: int, sampling_s: Callable[[int], float] = load, engines: int = 1
) -> list[Second]:
    """Without `config`, the number of engines stays."""
    balancer = Balancer(config, CAPACITY) if config is not None else None
    joining, working, groups, left, found = 0, engines, 0.0, 0, []
    for now in range(seconds):
        room = groups < MOST_GROUPS
        working = engines if joining == 0 else min(working, engines)
        groups += working / sampling_s(now) if room else 0.0
        if left == 0 and groups >= GROUPS_PER_STEP:
            groups, left = groups - GROUPS_PER_STEP, STEP_S
        computes, left = left > 0, max(0, left - 1)
        joining = max(0, joining - 1)
        told = balancer.add(Sample(computes, [CAPACITY if room else 0] * working), engines) if balancer else None
        changed = told is not None and told["engines"] != engines
        found.append(Second(computes, engines, not room, told["reason"] if changed and told else None))
        if changed and told:
            engines, joining = told["engines"], JOIN_S
    return found


def summary(run: list[Second]) -> tuple[float, float, float]:
    """Share of the time that the trainer computes, that engines have work, and the mean number of engines."""
    count = len(run)
    busy = sum(second.engines for second in run if not second.idle) / sum(second.engines for second in run)
    return sum(second.computes for second in run) / count, busy, sum(second.engines for second in run) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same: it takes less than a second")
    parser.parse_args()
    seconds, figures = STRETCH_S * len(LOADS), {}
    print("SIMULATION, in virtual time\n\nengines   trainer computes   engines have work   mean engines")
    runs = {"2": simulate(None, seconds, engines=2), "8": simulate(None, seconds, engines=8)}
    runs["auto"] = simulate(BalanceConfig(window_s=60, most=12), seconds)
    for name, run in runs.items():
        computes, busy, mean = summary(run)
        print(f"{name:7} {computes:15.0%} {busy:18.0%} {mean:16.1f}")
        figures |= {f"computes_{name}": computes, f"busy_{name}": busy, f"engines_{name}": mean}
    print()
    for now, second in enumerate(runs["auto"]):
        if second.reason is not None:
            print(f"{now:5} s: {second.engines} → {runs['auto'][now + 1].engines}: {second.reason}")
    changes = sum(second.reason is not None for second in runs["auto"])
    bars = {"computes_auto": at_least(figures["computes_auto"], 0.8), "changes": at_most(changes, 12)}
    finish("balance", {**figures, "changes": changes}, bars)


if __name__ == "__main__":
    main()
