"""Summaries that are learned: tasks that do not fit one window, before and after RL, and against two baselines.

    python -m benchmarks.summaries [--quick] [--seed 0] [--root DIRECTORY] [--no-short]

With `--root` the runs stay in DIRECTORY, and one that was interrupted goes on. Every run is the whole circle with real
processes and real machines, on the walks of rollmill/demo/walks.py:

    before         the model imitates a teacher whose summaries are wrong on purpose
    learned        after RL; the reward of the final answer reaches every summary
    short          more RL from there, with the length reward
    truncation     the learned model under a harness that cuts old messages off instead
    fixed note     the learned model under a harness that writes the summaries itself, without knowing what matters

The model was hardly trained under the last two harnesses. So the bars compare with what no model could exceed there but
by guessing: the share of tasks whose key is still in the context at the end.

Rates are at temperature 1, with 95 % intervals over tasks. `--quick` shows that it runs, not what is learned.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.output import at_least, at_most, finish
from benchmarks.summary_baselines import KEPT_CALLS, LAST_NOTE, reachable
from rollmill.cluster.drive import drive
from rollmill.cluster.run import RunConfig, RunDirectory
from rollmill.cluster.service import Target, evaluate, serving
from rollmill.cluster.stages import results_key
from rollmill.config import validate_config
from rollmill.demo.walk_demonstrations import WalkHabits, walk_solve_rate
from rollmill.demo.walks import FILES, Walk
from rollmill.environments.sections import HarnessSection
from rollmill.evals.run import EvalResult
from rollmill.evals.statistics import clustered_difference
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.store import TrajectoryStore
from rollmill.types import Trajectory, Version

CONFIG = Path(__file__).parents[1] / "rollmill" / "demo" / "walks.toml"
# 100 sampled tokens cost 0.4: less than a solved task, so giving up early does not pay
LENGTH = {"kind": "length", "tokens_weight": 0.004, "tool_calls_weight": 0.0, "turns_weight": 0.0, "q": 0.0}
BASELINES = {"truncation": "Truncating", "fixed note": "FixedNote"}


class Measured(NamedTuple):
    rate: float
    low: float
    high: float
    by_task: dict[str, list[bool]]
    contexts: list[int]  # per episode
    summary_tokens: float  # sampled for summaries, mean per episode
    tokens: float  # all that were sampled, mean per episode


def settings(name: str, seed: int, quick: bool) -> dict[str, Any]:
    tree = tomllib.loads(CONFIG.read_text())
    tree |= {"name": name, "seed": seed}
    if quick:
        tree["evals"]["tasks"] = 8
        for stage, steps in zip(tree["stages"], (40, 2), strict=True):
            stage["steps"] = steps
        tree["stages"][1]["groups_per_step"] = 2
    return tree


def train(root: Path, tree: dict[str, Any]) -> RunDirectory:
    """Train a run, or what is left of it."""
    if (root / tree["name"] / "run.json").exists():
        run = RunDirectory.open(root / tree["name"])
    else:
        run = RunDirectory.create(root, validate_config(RunConfig, tree, tree["name"]))
    if Objects.open(run.home_store).head(results_key(run, "after")) is None:
        drive(run)
    return run


def shortened(root: Path, learned: RunDirectory, seed: int, quick: bool) -> RunDirectory:
    """More RL from the last version of `learned`, with the length reward."""
    tree = settings("short", seed, quick)
    (stage,) = (stage for stage in tree["stages"] if stage["kind"] == "rl")
    if not quick:
        stage["steps"] = 24
        stage["training"]["optimizer"]["lr"] = 4e-4
    version = Version("rl", learned.config.stage("rl").steps)
    tree["stages"] = [stage]
    tree["rewards"].append(LENGTH)
    tree["start"] = {"run": str(learned.path), "id": learned.id, "version": str(version)}
    del tree["model"], tree["tokenizer"]
    return train(root, tree)


def own(run: RunDirectory, label: str) -> Measured:
    """An evaluation that the run made itself."""
    (result,) = json.loads(Objects.open(run.home_store).get(results_key(run, label)))
    return measured(run, EvalResult(**result))


def under(run: RunDirectory, harness: str) -> Measured:
    """The last version of the run under another harness."""
    version = Version("rl", run.config.stage("rl").steps)
    target = Target("version", str(version), version, run.config.form)
    with serving(run, target, "eval") as (service, cluster):
        section = {**run.config.harness.model_dump(mode="json"), "kind": f"benchmarks.summary_baselines:{harness}"}
        object.__setattr__(service, "config", run.config.model_copy(update={"harness": HarnessSection._read(section)}))
        (result,) = evaluate(service, cluster, run.config.evals, version)
    return measured(run, result)


def measured(run: RunDirectory, result: EvalResult) -> Measured:
    store = TrajectoryStore(open_database(run.database_url), Objects.open(run.home_store))
    rows = store.list(f"{run.id}/eval-{result.label}")[: result.attempts]  # newest first: those of this evaluation
    found = store.load_many([row.id for row in rows if row.payload_key is not None])
    return Measured(
        rate=result.rate,
        low=result.low,
        high=result.high,
        by_task=result.by_task,
        contexts=[len(each.segments) for each in found],
        summary_tokens=sum(map(spent_on_summaries, found)) / len(found),
        tokens=sum(row.sampled_tokens or 0 for row in rows) / len(rows),
    )


def spent_on_summaries(trajectory: Trajectory) -> int:
    """The last answer of a segment that a summary follows is that summary."""
    followed = {segment.parent[0] for segment in trajectory.segments if segment.parent and segment.cause == "summary"}
    last = [segment.spans[-1] for segment in trajectory.segments if segment.id in followed and segment.spans]
    return sum(span.end - span.start for span in last)


def show(found: dict[str, Measured]) -> None:
    table = Table(title=f"walks through {FILES} files")
    for column in ("summaries", "solve rate", "95 % interval", "contexts", "summary tokens", "sampled tokens"):
        table.add_column(column)
    for name, each in found.items():
        mean = sum(each.contexts) / len(each.contexts)
        cells = [f"{each.rate:.3f}", f"{each.low:.3f} – {each.high:.3f}", f"{mean:.1f}"]
        table.add_row(name, *cells, f"{each.summary_tokens:.1f}", f"{each.tokens:.1f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shrunk to about a minute")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, help="where the runs are kept; not set: a directory that is deleted")
    parser.add_argument("--no-short", action="store_true", help="leave out the run with the length reward")
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.root or Path(folder)
        learned = train(root, settings("learned", arguments.seed, arguments.quick))
        found = {"before": own(learned, "before"), "learned": own(learned, "after")}
        show(found)
        if not arguments.no_short:
            short = shortened(root, learned, arguments.seed, arguments.quick)
            found |= {"learned, again": own(short, "before"), "short": own(short, "after")}
        found |= {name: under(learned, harness) for name, harness in BASELINES.items()}
    show(found)
    finish("summaries", *report(found, time.monotonic() - started))


def report(found: dict[str, Measured], seconds: float) -> tuple[dict[str, float], dict[str, Any]]:
    """The figures and the bars."""
    learned = found["learned"]
    walks = [Walk(id) for id in learned.by_task]
    figures = {"teacher": walk_solve_rate(walks, WalkHabits()), "seconds": seconds}
    for name, each in found.items():
        key = name.replace(", ", "_").replace(" ", "_")
        figures |= {f"{key}_rate": each.rate, f"{key}_low": each.low, f"{key}_high": each.high}
        figures |= {f"{key}_summary_tokens": each.summary_tokens}
    gain = clustered_difference(found["before"].by_task, learned.by_task)
    figures |= {"gain": gain.value, "gain_high": gain.high}
    # episodes that end early are failures of the model; solved ones had to walk the whole way
    contexts = float(sorted(learned.contexts)[len(learned.contexts) // 2])
    bars = {"gain_low": at_least(gain.low, 0.0), "contexts_median": at_least(contexts, 10)}
    for name, files in (("truncation", KEPT_CALLS), ("fixed_note", LAST_NOTE)):
        figures[f"{name}_most"] = sum(reachable(walk, files) for walk in walks) / len(walks)
        bars[f"low_over_{name}_most"] = at_least(learned.low - figures[f"{name}_most"], 0.0)
    if "short" in found:
        again, short = found["learned, again"], found["short"]
        change = clustered_difference(again.by_task, short.by_task)
        figures |= {"short_rate_change_low": change.low, "short_rate_change_high": change.high}
        bars["short_rate_change"] = at_least(change.value, 0.0)
        bars["summary_tokens_share"] = at_most(short.summary_tokens / again.summary_tokens, 0.9)
    return figures, bars


if __name__ == "__main__":
    main()
