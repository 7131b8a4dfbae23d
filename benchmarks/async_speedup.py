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
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.output import at_least, at_most, finish
from rollmill.cluster.drive import drive
from rollmill.cluster.run import RunConfig, RunDirectory
from rollmill.config import load_config
from rollmill.telemetry import read_events

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "rollmill" / "cli" / "demo.toml"
TOOL_TIMES = Path(__file__).with_name("tool_times.json")
STEP_SECONDS = 0.8  # what one training step of the demo's size takes on two cores, and so the mean of the tool times
WARMUP_STEPS = 2  # engines start, caches fill
MODES = {"synchronous": 0, "asynchronous": 2}


def tool_seconds() -> list[float]:
    recorded = list(json.loads(TOOL_TIMES.read_text())["seconds"].values())
    scale = STEP_SECONDS / statistics.mean(recorded)
    return [round(seconds * scale, 3) for seconds in recorded]


def run(
    root: Path, base: Path | None, name: str, steps: int, evals: int, max_staleness: int, midtrain: list[str]
) -> Path:
    """One run of the demo's configuration with slow tools; from the mid-trained weights of `base` if given."""
    overrides = [
        f"name={name}",
        f"steps={steps}",
        f"max_staleness={max_staleness}",
        f"rollouts.simulated_tool_seconds={tool_seconds() if base else []}",
        f"evals.tasks={max(evals, 1)}",
        "evals.family_tasks=0",
        "evals.greedy=false",
        *midtrain,
    ]
    directory = RunDirectory.create(root, load_config(RunConfig, DEMO, overrides))
    if base is not None:
        shutil.copytree(base / "store", directory.path / "store")
    drive(directory)
    return directory.path


def samples_per_second(run_path: Path, group_size: int, groups_per_step: int) -> tuple[float, float]:
    """Trajectories trained on a second, from the end of the warm-up to the last step; and their mean staleness."""
    steps = [event for event in read_events(run_path / "events") if event["kind"] == "step"]
    timed = steps[WARMUP_STEPS - 1 :]
    seconds = timed[-1]["at"] - timed[0]["at"]
    samples = (len(timed) - 1) * group_size * groups_per_step
    return samples / seconds, statistics.mean(step["staleness_mean"] for step in timed[1:])


def final_rate(run_path: Path) -> dict[str, float]:
    evals = [event for event in read_events(run_path / "events") if event["kind"] == "eval"]
    after = next(event for event in evals if event["label"] == "after")
    return {key: after[key] for key in ("rate", "low", "high")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the ratio only, under a minute")
    parser.add_argument("--steps", type=int, default=0, help="RL steps of each run")
    arguments = parser.parse_args()
    steps = arguments.steps or (6 if arguments.quick else 40)
    midtrain = ["midtrain.steps=30"] if arguments.quick else []
    figures: dict[str, float] = {}
    table = Table(title="tool times SIMULATED from a recorded distribution")
    for column in ("training", "samples/s", "mean staleness", "final solve rate"):
        table.add_column(column)
    with tempfile.TemporaryDirectory() as folder:
        base = run(Path(folder), None, "base", 0, 1, 0, midtrain)
        demo = RunDirectory.open(base).config
        for mode, max_staleness in MODES.items():
            evals = 0 if arguments.quick else demo.evals.tasks
            path = run(Path(folder), base, mode, steps, evals, max_staleness, midtrain)
            rate, staleness = samples_per_second(path, demo.group_size, demo.groups_per_step)
            figures |= {f"{mode}_samples_per_second": rate, f"{mode}_mean_staleness": staleness}
            solved = ""
            if not arguments.quick:
                final = final_rate(path)
                figures |= {f"{mode}_solve_rate": final["rate"], f"{mode}_solve_rate_low": final["low"]}
                figures |= {f"{mode}_solve_rate_high": final["high"]}
                solved = f"{final['rate']:.3f} ({final['low']:.3f} – {final['high']:.3f})"
            table.add_row(mode, f"{rate:.1f}", f"{staleness:.2f}", solved)
    figures["ratio"] = figures["asynchronous_samples_per_second"] / figures["synchronous_samples_per_second"]
    bars = {"ratio": at_least(figures["ratio"], 1.5)}
    if not arguments.quick:
        # equal within noise: no further apart than the wider of both 95 % intervals
        apart = abs(figures["asynchronous_solve_rate"] - figures["synchronous_solve_rate"])
        width = max(figures[f"{mode}_solve_rate_high"] - figures[f"{mode}_solve_rate_low"] for mode in MODES)
        bars["solve_rates_apart"] = at_most(apart, width)
    Console().print(table)
    finish("async_speedup", figures, bars)


if __name__ == "__main__":
    main()
