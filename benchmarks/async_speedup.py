"""Asynchronous against synchronous training: the same code, tasks, seeds and threads, `max_staleness` 2 against 0.

    python -m benchmarks.async_speedup [--quick] [--steps N]

Tool times are a SIMULATION: each test run also waits a time drawn from the recorded distribution of real test runs in
benchmarks/tool_times.json, scaled so that its mean is about one training step. Everything else is real: processes,
machines, deltas, training. The full run also compares the solve rates both ways of training end with.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.output import at_least, at_most, finish
from rollmill.cluster.drive import drive
from rollmill.cluster.run import RunConfig, RunDirectory
from rollmill.config import load_config
from rollmill.demo import CONFIG as DEMO
from rollmill.telemetry import read_events

TOOL_TIMES = Path(__file__).with_name("tool_times.json")
TRAINING_SECONDS = 0.012  # what training on one trajectory of the demo takes on such a core: the scale of tool times
WARMUP_STEPS = 2  # engines start, caches fill
MODES = {"synchronous": 0, "asynchronous": 2}
SUITE = ["evals.family_tasks=0", "evals.greedy=false"]
QUICK = [
    "midtrain.steps=60",
    "midtrain.training.threads=2",
    "groups_per_step=2",
    "steps=5",
    "evals.tasks=1",
    "evals.attempts=1",
]


def create(root: Path, *overrides: str) -> RunDirectory:
    return RunDirectory.create(root, load_config(RunConfig, DEMO, [*SUITE, *overrides]))


def midtrain(root: Path, overrides: list[str]) -> RunDirectory:
    """The weights both runs start from."""
    run = create(root, *overrides, "name=base")
    subprocess.run([sys.executable, "-m", "rollmill.cluster.role", "midtrain", str(run.path)], check=True)
    return run


def reinforce(root: Path, base: RunDirectory, mode: str, overrides: list[str]) -> RunDirectory:
    tools = tool_seconds(base.config.groups_per_step * base.config.group_size)
    slow = f"rollouts.simulated_tool_seconds={tools}"
    run = create(root, *overrides, slow, f"name={mode}", f"max_staleness={MODES[mode]}")
    shutil.copytree(base.home_store, run.home_store)
    drive(run)
    return run


def tool_seconds(trajectories: int) -> list[float]:
    """The recorded distribution, scaled so that its mean is the time of a training step on so many trajectories."""
    recorded = list(json.loads(TOOL_TIMES.read_text())["seconds"].values())
    scale = TRAINING_SECONDS * trajectories / statistics.mean(recorded)
    return [round(seconds * scale, 3) for seconds in recorded]


def measure(run: RunDirectory) -> dict[str, float]:
    """Trajectories consumed a second, from the end of the warm-up to the last step, and what training ended with."""
    events = read_events(run.events)
    steps = [event for event in events if event["kind"] == "step"][WARMUP_STEPS - 1 :]
    samples = (len(steps) - 1) * run.config.group_size * run.config.groups_per_step
    ages = [step["staleness_mean"] for step in steps[1:] if step["staleness_mean"] is not None]
    after = next(event for event in events if event["kind"] == "eval" and event["label"] == "after")
    return {
        "samples_per_second": samples / (steps[-1]["at"] - steps[0]["at"]),
        "mean_staleness": statistics.mean(ages) if ages else 0.0,
        "solve_rate": after["rate"],
        "solve_rate_low": after["low"],
        "solve_rate_high": after["high"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the ratio only, on smaller steps")
    parser.add_argument("--steps", type=int, help="RL steps of each run")
    arguments = parser.parse_args()
    overrides = [*(QUICK if arguments.quick else []), *([f"steps={arguments.steps}"] if arguments.steps else [])]
    with tempfile.TemporaryDirectory() as folder:
        base = midtrain(Path(folder), overrides)
        rows = {mode: measure(reinforce(Path(folder), base, mode, overrides)) for mode in MODES}
    table = Table(title="tool times SIMULATED from a recorded distribution")
    for column in ("training", "samples/s", "mean staleness", "final solve rate"):
        table.add_column(column)
    for mode, row in rows.items():
        rate = f"{row['solve_rate']:.3f} ({row['solve_rate_low']:.3f} – {row['solve_rate_high']:.3f})"
        cells = f"{row['samples_per_second']:.1f}", f"{row['mean_staleness']:.2f}", "" if arguments.quick else rate
        table.add_row(mode, *cells)
    Console().print(table)
    figures = {f"{mode}_{name}": value for mode, row in rows.items() for name, value in row.items()}
    synchronous, asynchronous = rows["synchronous"], rows["asynchronous"]
    figures["ratio"] = asynchronous["samples_per_second"] / synchronous["samples_per_second"]
    bars = {"ratio": at_least(figures["ratio"], 1.5)}
    if not arguments.quick:
        # equal within noise: no further apart than the wider of both 95 % intervals
        width = max(row["solve_rate_high"] - row["solve_rate_low"] for row in rows.values())
        bars["solve_rates_apart"] = at_most(abs(asynchronous["solve_rate"] - synchronous["solve_rate"]), width)
    finish("async_speedup", figures, bars)


if __name__ == "__main__":
    main()
