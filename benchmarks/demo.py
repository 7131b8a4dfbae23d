"""The demo on three seeds, and as a control the same wall time spent on more mid-training instead of RL.

    python -m benchmarks.demo [--quick] [--seeds 0 1 2]

Every run is the whole circle with real processes. `--quick` shrinks one seed to under a minute: it shows that the
benchmark runs, not what the demo learns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.output import at_least, at_most, finish
from rollmill.cluster.drive import drive
from rollmill.cluster.report import report_run
from rollmill.cluster.run import RunConfig, RunDirectory
from rollmill.config import load_config
from rollmill.demo import CONFIG as DEMO

QUICK = ["midtrain.steps=40", "steps=3", "evals.tasks=8", "evals.family_tasks=4", "groups_per_step=2"]


def run(root: Path, name: str, seed: int, *overrides: str) -> dict[str, Any]:
    """One run of the demo's configuration; the figures of its report."""
    directory = RunDirectory.create(root, load_config(RunConfig, DEMO, [f"name={name}", f"seed={seed}", *overrides]))
    drive(directory)
    report_run(directory)
    return json.loads((directory.path / "report.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, shrunk to under a minute")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--controls", type=int, default=3, help="how many of the seeds get a control run")
    arguments = parser.parse_args()
    extra = QUICK if arguments.quick else []
    seeds = arguments.seeds[:1] if arguments.quick else arguments.seeds
    steps = load_config(RunConfig, DEMO, extra).midtrain.steps
    rows: list[tuple[int, dict[str, Any], dict[str, Any] | None]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            demo = run(Path(folder), f"demo-{seed}", seed, *extra)
            print(f"seed {seed}: {json.dumps(demo)}", flush=True)
            phases = demo["phases"]
            control = None
            if len(rows) < arguments.controls:
                longer = round(steps * (1 + phases["reinforce"] / phases["mid-train"]))
                control = run(Path(folder), f"control-{seed}", seed, *extra, f"midtrain.steps={longer}", "steps=0")
            rows.append((seed, demo, control))
    table = Table(title="held-out solve rate, sampled at temperature 1")
    for column in ("seed", "before", "after RL", "gain", "after as much more mid-training", "seconds"):
        table.add_column(column)
    for seed, demo, control in rows:
        before, after = demo["solve_rate_before"], demo["solve_rate_after"]
        cells = [f"{rate:.3f}" for rate in (before, after, after - before)]
        mid = f"{control['solve_rate_before']:.3f}" if control else ""
        table.add_row(str(seed), *cells, mid, f"{demo['seconds']:.0f}")
    Console().print(table)
    gains = [demo["solve_rate_after"] - demo["solve_rate_before"] for _, demo, _ in rows]
    over_control = [demo["solve_rate_after"] - control["solve_rate_before"] for _, demo, control in rows if control]
    figures = {"gain_least": min(gains), "gain_most": max(gains), "over_control_least": min(over_control)}
    figures["seconds_most"] = max(demo["seconds"] for _, demo, _ in rows)
    bars = {"gain": at_least(min(gains), 0.35), "over_control": at_least(min(over_control), 0.2)}
    finish("demo", figures, bars | {"seconds": at_most(figures["seconds_most"], 360)})


if __name__ == "__main__":
    main()
