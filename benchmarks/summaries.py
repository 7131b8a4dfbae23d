"""Summaries that are learned: tasks that do not fit one window, before and after RL, and against two baselines.

    python -m benchmarks.summaries [--quick] [--seed 0] [--root DIRECTORY] [--only ARM ...]

Every arm is a run with real processes and real machines, on the walks of rollmill/demo/walks.py. All begin with one
mid-trained model, and get as many RL steps on as many rollouts of the same tasks:

    base           mid-training: the model imitates a teacher whose summaries are wrong on purpose. A part of its
                   documents shows the two other harnesses, by a teacher without fault
    learned        RL; the reward of the final answer reaches every summary
    note           RL under a harness that writes the summaries itself, by a fixed rule that does not know what matters
    truncation     RL under a harness that cuts old messages off instead
    short          more RL from `learned`, with the length reward
    control        as much more RL from `learned`, without it

Each arm is measured before and after its RL, on held-out tasks at temperature 1, with 95 % intervals over tasks. The
baselines also have a bound that no model could exceed but by guessing: the share of tasks whose key is still in the
context at the end.

With `--root` the runs stay in DIRECTORY, and one that was interrupted goes on. `--only` trains these arms and reports
nothing, so that a host with many cores can train `learned`, `note` and `truncation` side by side, then `short` and
`control`. `--quick` shows that it runs, not what is learned.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.output import at_least, at_most, finish
from benchmarks.summary_baselines import KEPT_CALLS, LAST_NOTE, reachable
from rollmill.config import validate_config
from rollmill.demo.walk_demonstrations import WalkHabits, walk_solve_rate
from rollmill.demo.walks import FILES, Walk
from rollmill.evals.evaluation import EvalResult
from rollmill.evals.statistics import Interval, clustered_difference, clustered_ratio
from rollmill.launch.supervise import drive
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.runs.stages import results_key
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Trajectory
from rollmill.weights.reading.weight_store import WeightStore

HERE = Path(__file__).parents[1]
CONFIG = HERE / "rollmill" / "demo" / "walks.toml"
# 100 sampled tokens cost 0.4: less than a solved task, so giving up early does not pay
LENGTH = {"kind": "length", "tokens_weight": 0.004, "tool_calls_weight": 0.0, "turns_weight": 0.0, "q": 0.0}
BASELINES = {"note": "FixedNote", "truncation": "Truncating"}
MORE = ("short", "control")  # begin where `learned` ends
ARMS = ("base", "learned", *BASELINES, *MORE)
SHOWN = 0.35  # documents of the two other harnesses, for each one of the teacher


class Size(NamedTuple):
    midtrain: int = 400  # steps
    steps: int = 60  # of RL
    more: int = 24  # of RL after that
    groups: int = 6
    tasks: int = 96  # held out


QUICK = Size(40, 2, 1, 2, 8)


Spent = dict[str, list[int]]  # by task: tokens sampled for summaries, per episode


class Measured(NamedTuple):
    rate: float
    low: float
    high: float
    by_task: dict[str, list[bool]]
    contexts: list[int]  # per episode
    spent: Spent
    tokens: float  # all that were sampled, mean per episode

    @property
    def summary_tokens(self) -> float:
        """Mean per episode."""
        return float(np.mean([tokens for each in self.spent.values() for tokens in each]))


def settings(arm: str, seed: int, size: Size, misleads: bool = True) -> dict[str, Any]:
    """`misleads`: of the teacher of summaries (`WalkHabits`)."""
    tree = tomllib.loads(CONFIG.read_text())
    tree |= {"name": arm, "seed": seed, "modules": str(HERE)}
    tree["evals"]["tasks"] = size.tasks
    midtrain, rl = tree["stages"]
    midtrain["steps"] = size.midtrain
    midtrain["sources"][0]["misleads"] = misleads
    midtrain["sources"].append({"kind": "benchmarks.summary_baselines:BaselineWalks", "weight": SHOWN})
    rl |= {"steps": size.more if arm in MORE else size.steps, "groups_per_step": size.groups}
    if arm in MORE:
        rl["training"]["optimizer"]["lr"] = 4e-4
    if arm == "short":
        tree["rewards"].append(LENGTH)
    if arm in BASELINES:
        tree["harness"]["kind"] = f"benchmarks.summary_baselines:{BASELINES[arm]}"
    return tree


def train(root: Path, arm: str, seed: int, size: Size, misleads: bool = True) -> RunDirectory:
    """Train an arm, or what is left of it."""
    if (root / arm / "run.json").exists():
        run = RunDirectory.open(root / arm)
    else:
        tree = settings(arm, seed, size, misleads)
        midtrain, rl = tree["stages"]
        tree["stages"] = [midtrain if arm == "base" else rl]
        if arm != "base":
            begin = RunDirectory.open(root / ("learned" if arm in MORE else "base"))
            line = begin.config.stages[0].name
            head = WeightStore(Objects.open(begin.home_store)).head(line, begin.config.form)
            tree["start"] = {"run": str(begin.path), "id": begin.id, "version": f"{line}@{head}"}
            del tree["model"], tree["tokenizer"]
        run = RunDirectory.create(root, validate_config(RunConfig, tree, arm))
    if arm == "base" or Objects.open(run.home_store).head(results_key(run, "after")) is None:
        drive(run)
    return run


def measured(run: RunDirectory, label: str) -> Measured:
    """An evaluation that the run made."""
    objects = Objects.open(run.home_store)
    (found,) = json.loads(objects.get(results_key(run, label)))
    result = EvalResult(**found)
    store = TrajectoryStore(open_database(run.database_url), objects)
    rows = [row for row in store.list(f"{run.id}/eval-{label}") if row.payload_key is not None]
    spent: Spent = {}
    contexts = []
    for row, each in zip(rows, store.load_many([row.id for row in rows]), strict=True):
        spent.setdefault(row.task_id, []).append(0 if run.config.name in BASELINES else spent_on_summaries(each))
        contexts.append(len(each.segments))
    tokens = sum(row.sampled_tokens or 0 for row in rows) / len(rows)
    return Measured(result.rate, result.low, result.high, result.by_task, contexts, spent, tokens)


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shrunk to about a minute")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, help="where the runs are kept; not set: a directory that is deleted")
    parser.add_argument("--only", nargs="+", choices=ARMS, metavar="ARM", help=f"train only: {', '.join(ARMS)}")
    parser.add_argument("--steps", type=int, help=f"RL steps of each arm (default {Size().steps})")
    parser.add_argument("--more", type=int, help=f"RL steps of short and control (default {Size().more})")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else Size()
    size = size._replace(steps=arguments.steps or size.steps, more=arguments.more or size.more)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.root or Path(folder)
        runs = {arm: train(root, arm, arguments.seed, size) for arm in arguments.only or ARMS}
        if arguments.only:
            return
        found = {"before": measured(runs["learned"], "before"), "learned": measured(runs["learned"], "after")}
        for arm in BASELINES:
            found |= {f"{arm}, before": measured(runs[arm], "before"), arm: measured(runs[arm], "after")}
        found |= {arm: measured(runs[arm], "after") for arm in MORE}
    show(found)
    finish("summaries", *report(found, size, time.monotonic() - started))


def report(found: dict[str, Measured], size: Size, seconds: float) -> tuple[dict[str, float], dict[str, Any]]:
    """The figures and the bars."""
    learned = found["learned"]
    walks = [Walk(id) for id in learned.by_task]
    figures = {"teacher": walk_solve_rate(walks, WalkHabits()), "seconds": seconds}
    figures |= {"steps": float(size.steps), "more_steps": float(size.more)}
    for name, each in found.items():
        key = name.replace(", ", "_")
        figures |= {f"{key}_rate": each.rate, f"{key}_low": each.low, f"{key}_high": each.high}
        figures |= {f"{key}_summary_tokens": each.summary_tokens, f"{key}_tokens": each.tokens}
    # episodes that end early are failures of the model; solved ones had to walk the whole way
    contexts = float(sorted(learned.contexts)[len(learned.contexts) // 2])
    bars = {"contexts_median": at_least(contexts, 10)}
    for name in ("before", *BASELINES):
        gain = clustered_difference(found[name].by_task, learned.by_task)
        figures |= {f"over_{name}": gain.value, f"over_{name}_high": gain.high}
        bars[f"over_{name}_low"] = at_least(gain.low, 0.01)
    for name, files in (("truncation", KEPT_CALLS), ("note", LAST_NOTE)):
        figures[f"{name}_most"] = sum(reachable(walk, files) for walk in walks) / len(walks)
        bars[f"low_over_{name}_most"] = at_least(learned.low - figures[f"{name}_most"], 0.0)
    control, short = found["control"], found["short"]
    change = clustered_difference(control.by_task, short.by_task)
    figures |= {"short_rate_change_low": change.low, "short_rate_change_high": change.high}
    bars["short_rate_change"] = at_least(change.value, 0.0)
    share = tokens_share(control.spent, short.spent)
    figures |= {"summary_tokens_share_low": share.low, "summary_tokens_share_high": share.high}
    bars["summary_tokens_share"] = at_most(share.value, 0.9)
    figures["summary_tokens_share_of_learned"] = short.summary_tokens / learned.summary_tokens
    return figures, bars


def tokens_share(before: Spent, after: Spent) -> Interval:
    """Tokens on summaries per episode, `after` over `before`, on the same tasks."""
    tasks = sorted(before.keys() & after.keys())
    sums = [np.array([(sum(each[task]), len(each[task])) for task in tasks], float) for each in (before, after)]
    return clustered_ratio(*sums)


if __name__ == "__main__":
    main()
