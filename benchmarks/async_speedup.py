"""Asynchronous against synchronous training: the same code, tasks, seeds and threads, `max_staleness` 2 against 0.

    python -m benchmarks.async_speedup [--quick] [--steps N]

Tool times are a SIMULATION: each test run also waits a time drawn from a recorded distribution of real test runs,
scaled so that its mean is about one training step. It is long-tailed: the mean is six times the median, the longest a
hundred times. Everything else is real: processes, machines, deltas, training. The ratio depends on that scale: say
"simulated tool times" wherever it is quoted.

The model is mid-trained until most groups carry signal, also with --quick: groups without signal are replaced, and the
ratio would mostly be about them. The table shows the share of rollouts that were trained on, and the interval of each
ratio (bootstrap over steps). "Waits for due" is the price of the rule that a step must not overtake a group that is
due: the share of time in which enough groups were ready, and the step waited for older ones. The full run also compares
the final solve rates of both ways of training.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field
from rich.console import Console
from rich.table import Table

from benchmarks.output import at_least, at_most, finish
from rollmill.config import load_config
from rollmill.demo import CONFIG as DEMO
from rollmill.demo.coding import CodingConfig, CodingHarness
from rollmill.launch.supervise import drive
from rollmill.machines.machine import ExecResult, Machine
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.telemetry import read_events
from rollmill.training.stage import RolloutSettings

# seconds of one run of each module of Python's own test suite, in a process of its own
RECORDED = [
    float(seconds)
    for seconds in """
    1.537 0.534 0.303 0.079 0.089 0.078 2.06 1.746 0.112 0.516 0.068 0.369 0.121 0.098 0.121 0.35 29.142 6.1 0.803
    0.327 0.617 0.727 0.143 0.076 0.088 0.363 0.094 0.088 0.346 0.141 0.522 0.728 0.436 0.13 0.072 0.101 0.683 0.946
    33.471 0.167 2.927 1.576 0.066 0.239 0.087 1.739 0.142 0.083 0.136 0.087 0.077 0.789 0.233 7.607 0.14 0.698
    0.495 0.08 0.621 2.766 0.186 0.123 0.772 0.133 6.049 0.077 0.39 0.683 0.073 0.106 31.002 0.969 0.585 0.15 8.596
    0.272 0.222 6.998 8.273 0.853
    """.split()
]
TRAINING_SECONDS = 0.012  # of one trajectory of the demo on one core: the scale of tool times
WARMUP_STEPS = 2  # engines start, caches fill
MODES = {"synchronous": 0, "asynchronous": 2}
SUITE = ["evals.family_tasks=0", "evals.fresh_tasks=0", "evals.greedy=false"]
QUICK = [
    "stages.midtrain.steps=180",
    "stages.midtrain.documents_per_step=12",  # few, but the model then solves about a fifth of the training tasks
    "stages.rl.groups_per_step=2",
    "stages.rl.steps=6",
    "evals.tasks=1",
    "evals.attempts=1",
]


def create(root: Path, *overrides: str) -> RunDirectory:
    return RunDirectory.create(root, load_config(RunConfig, DEMO, [*SUITE, *overrides]))


def midtrain(root: Path, overrides: list[str]) -> RunDirectory:
    """The weights both runs start from."""
    run = create(root, *overrides, "name=base")
    subprocess.run([sys.executable, "-m", "rollmill.launch.role", "trainer", str(run.path), "midtrain"], check=True)
    return run


def rl_settings(run: RunDirectory) -> RolloutSettings:
    stage = run.config.stage("rl")
    assert isinstance(stage, RolloutSettings)
    return stage


def samples_per_step(run: RunDirectory) -> int:
    return rl_settings(run).groups_per_step * rl_settings(run).group_size


def reinforce(root: Path, base: RunDirectory, mode: str, overrides: list[str]) -> RunDirectory:
    tools = tool_seconds(samples_per_step(base))
    run = create(root, *overrides, *slow_tools(tools), f"name={mode}", f"stages.rl.max_staleness={MODES[mode]}")
    shutil.copytree(base.home_store, run.home_store)
    drive(run)
    return run


def slow_tools(seconds: list[float]) -> list[str]:
    return ["harness.kind=benchmarks.async_speedup:SlowTools", f"harness.tool_seconds={seconds}"]


def tool_seconds(trajectories: int) -> list[float]:
    """The recorded distribution, scaled so that its mean is the time of a training step on `trajectories`."""
    scale = TRAINING_SECONDS * trajectories / statistics.mean(RECORDED)
    return [round(seconds * scale, 3) for seconds in RECORDED]


@dataclass(frozen=True)
class Measured:
    """One run from the end of its warm-up to its last step."""

    samples_per_step: float  # of the groups that steps trained on: a step may run short
    seconds: list[float]  # between the ends of two steps
    trained_share: float  # of the rollouts; the others belong to groups without signal
    mean_staleness: float
    due_share: float  # of the time: steps waited for due groups, although enough others were ready
    due_seconds_per_step: float
    solve_rate: float
    solve_rate_low: float
    solve_rate_high: float

    @property
    def samples_per_second(self) -> float:
        return self.samples_per_step / statistics.mean(self.seconds)


def measure(run: RunDirectory) -> Measured:
    events = read_events(run.events)
    steps = [event for event in events if event["kind"] == "step"][WARMUP_STEPS - 1 :]
    samples = statistics.mean(step["groups"] for step in steps[1:]) * rl_settings(run).group_size
    ages = [step["staleness_mean"] for step in steps[1:] if step["staleness_mean"] is not None]
    groups = sum(step["groups"] + step["groups_closed"] for step in steps[1:])
    due = sum(step["due_seconds"] for step in steps[1:])
    after = next(event for event in events if event["kind"] == "eval" and event["label"] == "after")
    return Measured(
        samples_per_step=samples,
        seconds=[later["at"] - earlier["at"] for earlier, later in itertools.pairwise(steps)],
        trained_share=sum(step["trajectories"] for step in steps[1:]) / (groups * rl_settings(run).group_size),
        mean_staleness=statistics.mean(ages) if ages else 0.0,
        due_share=due / (steps[-1]["at"] - steps[0]["at"]),
        due_seconds_per_step=due / (len(steps) - 1),
        solve_rate=after["rate"],
        solve_rate_low=after["low"],
        solve_rate_high=after["high"],
    )


def ratio_interval(synchronous: Measured, asynchronous: Measured, resamples: int = 4000) -> tuple[float, float]:
    """95 % interval of the ratio of samples per second: bootstrap over the steps of each run."""
    draw = np.random.default_rng(0)
    means = [
        draw.choice(run.seconds, size=(resamples, len(run.seconds))).mean(axis=1) for run in (synchronous, asynchronous)
    ]
    low, high = np.quantile(means[0] / means[1], [0.025, 0.975])
    return float(low), float(high)


def show(rows: dict[str, Measured], ratio: str, tail: str, *, solve_rates: bool) -> None:
    table = Table(title=f"tool times SIMULATED from a recorded distribution: {tail}")
    columns = ["training", "samples/s", "seconds per step", "trained on", "mean staleness", "waits for due"]
    for column in [*columns, *(["final solve rate"] if solve_rates else [])]:
        table.add_column(column)
    for mode, row in rows.items():
        spread = f"{statistics.mean(row.seconds):.2f} ({min(row.seconds):.2f} – {max(row.seconds):.2f})"
        cells = [f"{row.samples_per_second:.1f}", spread, f"{row.trained_share:.0%}", f"{row.mean_staleness:.2f}"]
        cells.append(f"{row.due_share:.0%} ({row.due_seconds_per_step:.2f} s per step)")
        if solve_rates:
            cells.append(f"{row.solve_rate:.3f} ({row.solve_rate_low:.3f} – {row.solve_rate_high:.3f})")
        table.add_row(mode, *cells)
    Console().print(table)
    print(f"asynchronous over synchronous, with simulated tool times: {ratio}")


# --- tools that take long


class SlowToolsConfig(CodingConfig):
    tool_seconds: tuple[float, ...] = Field(min_length=1, description="Each command also waits one of these.")


class SlowTools(CodingHarness):
    """The coding harness, whose commands take as long as in a larger repository. Only the waiting is simulated."""

    def __init__(self, config: SlowToolsConfig) -> None:
        super().__init__(config)
        self._seconds = config.tool_seconds
        self._draw = random.Random(0)  # as the demo's seed

    async def exec(self, machine: Machine, argv: Sequence[str], **options: Any) -> ExecResult:
        simulated = self._draw.choice(self._seconds)
        await asyncio.sleep(simulated)
        result = await super().exec(machine, argv, **options)
        return replace(result, seconds=result.seconds + simulated)  # the command took it, nobody waited


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the ratio only, on smaller steps")
    parser.add_argument("--steps", type=int, help="RL steps of each run")
    arguments = parser.parse_args()
    overrides = QUICK if arguments.quick else []
    if arguments.steps:
        overrides = [*overrides, f"stages.rl.steps={arguments.steps}"]
    with tempfile.TemporaryDirectory() as folder:
        base = midtrain(Path(folder), overrides)
        tools = tool_seconds(samples_per_step(base))
        rows = {mode: measure(reinforce(Path(folder), base, mode, overrides)) for mode in MODES}
    synchronous, asynchronous = rows["synchronous"], rows["asynchronous"]
    ratio = asynchronous.samples_per_second / synchronous.samples_per_second
    low, high = ratio_interval(synchronous, asynchronous)
    tail = f"median {statistics.median(tools):.2f} s, mean {statistics.mean(tools):.2f} s, longest {max(tools):.1f} s"
    show(rows, f"{ratio:.2f}× ({low:.2f} – {high:.2f})", tail, solve_rates=not arguments.quick)
    rates = ("solve_rate", "solve_rate_low", "solve_rate_high")
    names = ("samples_per_second", "trained_share", "mean_staleness", "due_share", "due_seconds_per_step", *rates)
    figures = {f"{mode}_{name}": getattr(row, name) for mode, row in rows.items() for name in names}
    figures |= {"tool_seconds_median": statistics.median(tools), "tool_seconds_mean": statistics.mean(tools)}
    figures |= {"simulated_ratio": ratio, "simulated_ratio_low": low, "simulated_ratio_high": high}
    bars = {
        "simulated_ratio": at_least(ratio, 1.5),
        "trained_share": at_least(min(row.trained_share for row in rows.values()), 0.3),
    }
    if not arguments.quick:
        # equal within noise: no further apart than the wider of both 95 % intervals
        width = max(row.solve_rate_high - row.solve_rate_low for row in rows.values())
        bars["solve_rates_apart"] = at_most(abs(asynchronous.solve_rate - synchronous.solve_rate), width)
    finish("async_speedup", figures, bars)


if __name__ == "__main__":
    main()
