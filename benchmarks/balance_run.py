"""What `[balance] scale = "auto"` does for a real run.

    python -m benchmarks.balance_run [--quick] [--base RUN] [--steps N]

The same small run on this host, once with one engine and once with as many as the balance decides, one to four.
Decode time is SIMULATED (fleet_engine.py), as if each engine had a GPU of its own; so the host says that it has cores
left for one more. Everything else is real: trainer, dispatcher, gateway, engines that come and go, and every decision.
Beside each other: seconds per step, and the share of the time that the trainer waits. --base names a mid-trained run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from benchmarks.fleet import create, midtrained
from benchmarks.fleet_engine import KIND
from benchmarks.output import at_least, finish
from rollmill.launch.autoscaler import read_decisions
from rollmill.launch.supervise import drive
from rollmill.runs.configuration.autoscale_rule import describe
from rollmill.runs.run import RunDirectory
from rollmill.telemetry import read_events

CORES = 64  # that the host says it has


def balanced_run(root: Path, base: RunDirectory, name: str, *overrides: str) -> RunDirectory:
    """A run that is mid-trained already, whose engines are slowed."""
    run = create(
        root,
        name,
        f"modules='{Path(__file__).parents[1]}'",
        f"engines=[{{kind='{KIND}'}}]",
        "device=cpu",
        "engine.max_batch=8",
        "stages.rl.groups_per_step=2",
        "stages.rl.group_size=4",
        "balance.window_s=5",
        "balance.most=4",
        *overrides,
    )
    shutil.copytree(base.home_store, run.home_store)
    return run


def drive_with_room(run: RunDirectory, on_tick: Callable[[], None] = lambda: None) -> None:
    """Decoding that is simulated needs no cores, so the balance is told that there are some left."""
    with mock.patch("os.sched_getaffinity", return_value=set(range(CORES))):
        drive(run, on_tick)


def measure(run: RunDirectory) -> dict[str, float]:
    drive_with_room(run)
    steps = [event for event in read_events(run.events) if event["kind"] == "step"]
    later = steps[len(steps) // 2 :]  # the balance has had its time by then
    seconds = [b["at"] - a["at"] for a, b in itertools.pairwise(later)]
    waited = sum(event["wait_seconds"] for event in later[1:])
    return {"step_s": statistics.mean(seconds), "waits": waited / sum(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="6 steps")
    parser.add_argument("--base", type=Path, help="a mid-trained run")
    parser.add_argument("--steps", type=int, default=14)
    arguments = parser.parse_args()
    steps = 6 if arguments.quick else arguments.steps
    figures: dict[str, float] = {"load_before": os.getloadavg()[0], "steps": steps}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        base = RunDirectory.open(arguments.base) if arguments.base is not None else midtrained(root)
        for name, scale in (("one", "advise"), ("auto", "auto")):
            run = balanced_run(root, base, name, f"balance.scale={scale}", f"stages.rl.steps={steps}")
            found = measure(run)
            figures |= {f"{key}_{name}": value for key, value in found.items()}
            print(f"{name}: {found['step_s']:.1f} s per step, the trainer waits {found['waits']:.0%} of the time")
            for decided in read_decisions(run):
                print(f"    {describe(decided)}")
        figures["changes"] = sum(bool(decided["done"]) for decided in read_decisions(run))
    figures |= {"speedup": figures["step_s_one"] / figures["step_s_auto"], "load_after": os.getloadavg()[0]}
    finish("balance_run", figures, {"speedup": at_least(figures["speedup"], 1.5)})


if __name__ == "__main__":
    main()
