"""The length reward's own part: how many tokens summaries cost with it, and with as much RL without it.

    python -m benchmarks.summary_length [--quick] [--seeds 0 1 2] [--root DIRECTORY]

In `benchmarks.summaries` a wordy summary names a second number, which is easily taken for the key. RL for the solve
rate alone has a reason to leave it out, and does. Here the words that a summary does not need say nothing: they mislead
nobody, and only their tokens count. The arms are those of `benchmarks.summaries`, with every seed a chain of its own:

    base → learned → short      more RL, with the length reward
                   → control    as much more RL, without it

Seeds run side by side. On 16 cores three of them take about 8 minutes, on two cores one at a time is right. With
`--root` the runs stay in DIRECTORY, and what was interrupted goes on. `--quick` shows that it runs, not what it learns.

Attempts on one task are pooled over seeds, and tasks are resampled for the intervals. So they say nothing about the
luck of a seed: the table has each seed apart.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks.output import at_least, at_most, finish
from benchmarks.summaries import MORE, QUICK, Measured, Size, measured, tokens_share, train
from rollmill.evals.statistics import clustered_difference
from rollmill.runs.run import RunDirectory
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.query import TrajectoryQuery
from rollmill.trajectories.trajectory_store import TrajectoryStore

SIZE = Size(midtrain=400, steps=40, more=28, groups=6, tasks=128)
MARGIN = 0.05  # a loss of solve rate that the whole interval must exclude
Outcome = TypeVar("Outcome", bool, int)


class Chain(NamedTuple):
    """The versions that one seed made, measured, and the rollouts that the last two of them played."""

    learned: Measured
    short: Measured
    control: Measured
    played: dict[str, int]


def train_arm(root: Path, arm: str, seed: int, size: Size) -> None:
    folder = root / f"seed-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    train(folder, arm, seed, size, misleads=False)
    print(f"seed {seed}, {arm}: {time.monotonic() - began:.0f} s", flush=True)


def train_all(root: Path, seeds: Sequence[int], size: Size) -> None:
    """Every arm of every seed. Arms that do not need each other are trained at the same time."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(MORE) * len(seeds), mp_context=spawn) as pool:
        for arms in (("base",), ("learned",), MORE):
            begun = [pool.submit(train_arm, root, arm, seed, size) for seed in seeds for arm in arms]
            for each in begun:
                each.result()


def chain(folder: Path) -> Chain:
    runs = {arm: RunDirectory.open(folder / arm) for arm in ("learned", *MORE)}
    found = {arm: measured(run, "after") for arm, run in runs.items()}
    return Chain(**found, played={arm: _played(runs[arm]) for arm in MORE})


def _played(run: RunDirectory) -> int:
    store = TrajectoryStore(open_database(run.database_url), Objects.open(run.home_store))
    return len(store.find(TrajectoryQuery(run=f"{run.id}/{run.config.stages[0].name}")))


def pooled(parts: Iterable[dict[str, list[Outcome]]]) -> dict[str, list[Outcome]]:
    """By task, the attempts of all seeds."""
    found: dict[str, list[Outcome]] = {}
    for part in parts:
        for task, outcomes in part.items():
            found.setdefault(task, []).extend(outcomes)
    return found


def show(chains: dict[int, Chain]) -> None:
    table = Table(title="with and without the length reward, from the same version")
    for column in ("seed", "version", "solve rate", "95 % interval", "summary tokens", "rollouts played"):
        table.add_column(column)
    for seed, each in chains.items():
        for name in ("learned", *MORE):
            found: Measured = getattr(each, name)
            interval, played = f"{found.low:.3f} – {found.high:.3f}", each.played.get(name, "")
            table.add_row(str(seed), name, f"{found.rate:.3f}", interval, f"{found.summary_tokens:.1f}", str(played))
    Console().print(table)


def report(chains: dict[int, Chain]) -> tuple[dict[str, float], dict[str, Any]]:
    """The figures and the bars."""
    figures: dict[str, float] = {}
    for seed, each in chains.items():
        for name in ("learned", *MORE):
            found: Measured = getattr(each, name)
            figures |= {f"{name}_{seed}_rate": found.rate, f"{name}_{seed}_summary_tokens": found.summary_tokens}
        figures |= {f"{arm}_{seed}_played": count for arm, count in each.played.items()}
    rates = {name: pooled(getattr(each, name).by_task for each in chains.values()) for name in ("learned", *MORE)}
    spent = {name: pooled(getattr(each, name).spent for each in chains.values()) for name in ("learned", *MORE)}
    share = tokens_share(spent["control"], spent["short"])
    change = clustered_difference(rates["control"], rates["short"])
    figures |= {"summary_tokens_share_low": share.low, "summary_tokens_share_high": share.high}
    figures |= {"rate_change": change.value, "rate_change_high": change.high}
    for name in MORE:  # against where both began
        own, gain = tokens_share(spent["learned"], spent[name]), clustered_difference(rates["learned"], rates[name])
        figures |= {f"{name}_summary_tokens_share_of_learned": own.value}
        figures |= {f"{name}_gain": gain.value, f"{name}_gain_low": gain.low, f"{name}_gain_high": gain.high}
    bars = {"summary_tokens_share": at_most(share.value, 0.9), "rate_change_low": at_least(change.low, -MARGIN)}
    return figures, bars | {"short_gain": at_least(figures["short_gain"], 0.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, shrunk to about a minute")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--root", type=Path, help="where the runs are kept; not set: a directory that is deleted")
    given = parser.parse_args()
    seeds, size = (given.seeds[:1], QUICK) if given.quick else (given.seeds, SIZE)
    began, load = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        root = given.root or Path(folder)
        train_all(root, seeds, size)
        chains = {seed: chain(root / f"seed-{seed}") for seed in seeds}
    show(chains)
    figures, bars = report(chains)
    finish("summary_length", figures | {"load_before": load, "seconds": time.monotonic() - began}, bars)


if __name__ == "__main__":
    main()
