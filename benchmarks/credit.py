"""More signal per rollout, measured: plain RL, credit by turns, process rewards, and distillation from hints, at equal
rollouts.

    python -m benchmarks.credit [--seeds 0 1 2] [--steps 12] [--arms plain process] [--base RUN] [--quick]

Per seed, the demo's model is mid-trained once (or taken from --base). Every arm begins there, and trains as many steps
on groups of the same sizes:

    plain     the reward of the hidden tests, the same for every turn
    turns     each turn is compared with the same turn of its group
    process   the same, and each wrong edit costs the turn that made it 0.2 (`EditProcess`)
    hints     a hint teaches the turn of the last wrong edit (`EditHint`: worth 0, and all arms have it)

Solve rates are of held-out tasks, the same ones and the same draws for every arm; differences from plain RL have 95 %
intervals over tasks.

A group without signal is replaced, so arms may play more groups than they train on: `rollouts` counts what was played.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.output import at_least, finish
from rollmill import telemetry
from rollmill.config import load_config
from rollmill.demo import CONFIG as DEMO
from rollmill.demo.micro_repos import repository_of
from rollmill.environments.episode import Episode
from rollmill.environments.rewards import transcript
from rollmill.evals.statistics import clustered_difference
from rollmill.launch.supervise import drive
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.query import TrajectoryQuery
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import TURN, Reward

REWARDS = '{kind="calls"},{kind="benchmarks.credit:EditHint"}'
ARMS = {
    "plain": (),
    "turns": ('stages.rl.credit="turns"',),
    "process": (
        'stages.rl.credit="turns"',
        f'rewards=[{REWARDS},{{kind="benchmarks.credit:EditProcess",weight=0.2}}]',
    ),
    "hints": ("stages.rl.hint_factor=0.05",),
}
MIDTRAIN = 140
Rates = dict[str, list[bool]]  # task → its attempts


def wrong_edits(episode: Episode) -> list[tuple[int, str]]:
    """The turn of each edit that is not what the task asks for, and what it should have written."""
    wanted = f"return {repository_of(episode.task.id).function.code}"
    return [
        (turn, wanted)
        for turn, message in enumerate(transcript.answers(episode))
        for name, arguments in transcript.calls_of(message)
        if name == "edit" and arguments is not None and str(arguments.get("text", "")).strip() != wanted
    ]


class EditHint:
    """Worth nothing. If the last edit is wrong, its evidence says which turn that was and what the code should be."""

    name = "edit_hint"
    cannot_protect = "It reads the transcript and gives no points."

    async def grade(self, episode: Episode) -> Reward:
        edits = [turn for turn, message in enumerate(transcript.answers(episode)) if _edits(message)]
        wrong = wrong_edits(episode)
        if not wrong or wrong[-1][0] != edits[-1]:
            return Reward(0.0, grader=self.name)
        return Reward(0.0, evidence={"hints": [{"turn": wrong[-1][0], "text": wrong[-1][1]}]}, grader=self.name)


class EditProcess:
    """A process reward: -1 for each wrong edit, for the turn that made it."""

    name = "edit_process"
    cannot_protect = "It reads the transcript: who never edits loses nothing here."

    async def grade(self, episode: Episode) -> Reward:
        wrong = Counter(turn for turn, _ in wrong_edits(episode))
        parts = {f"{TURN}{turn}": -float(count) for turn, count in wrong.items()}
        return Reward(-float(wrong.total()), parts, grader=self.name)


def _edits(message: Mapping[str, Any]) -> bool:
    return any(name == "edit" and arguments is not None for name, arguments in transcript.calls_of(message))


def make_run(root: Path, name: str, seed: int, settings: tuple[str, ...], base: Path | None) -> RunDirectory:
    overrides = [
        f"name={name}",
        f"seed={seed}",
        'engines=[{region="home"}]',
        f"modules='{Path(__file__).parents[1]}'",
        f"stages.midtrain.steps={MIDTRAIN}",
        f"rewards=[{REWARDS}]",
        "evals.greedy=false",
        "evals.fresh_tasks=0",
        "evals.family_tasks=0",
        *settings,
    ]
    run = RunDirectory.create(root, load_config(RunConfig, DEMO, overrides))
    if base is not None:
        shutil.copytree(base / "store", run.path / "store")
    return run


def play(run: RunDirectory) -> tuple[Rates, Rates, int, int]:
    """Solved attempts by held-out task before and after RL, how many rollouts were played, and how many tokens a
    teacher with hints saw."""
    drive(run)
    found: dict[str, Rates] = {}
    hinted = 0
    for event in telemetry.read_events(run.events):
        hinted += event.get("hinted_tokens", 0)
        if event["kind"] == "eval" and event["mode"] == "sampled":
            found[event["label"]] = event["by_task"]
    store = TrajectoryStore(open_database(run.database_url), Objects.open(run.home_store))
    return found["before"], found["after"], len(store.find(TrajectoryQuery(run=f"{run.id}/rl"))), hinted


def rate(by_task: Rates) -> float:
    attempts = [solved for each in by_task.values() for solved in each]
    return sum(attempts) / len(attempts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=12, help="RL steps of every arm")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="plain is always among them")
    parser.add_argument("--base", type=Path, help="a mid-trained run, for every seed")
    parser.add_argument("--quick", action="store_true", help="one seed, two steps: shows that it runs")
    given = parser.parse_args()
    seeds, steps = (given.seeds[:1], 2) if given.quick else (given.seeds, given.steps)
    small = ("stages.rl.groups_per_step=2", "stages.rl.group_size=4", "evals.tasks=8", "evals.attempts=1")
    settings = (f"stages.rl.steps={steps}", *(small if given.quick else ("evals.tasks=96", "evals.attempts=2")))
    began, figures = time.monotonic(), {"load_before": os.getloadavg()[0]}
    arms = {name: setting for name, setting in ARMS.items() if name == "plain" or name in given.arms}
    gains: dict[str, list[float]] = {name: [] for name in arms}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            root, base = Path(folder), given.base
            if base is None:
                base = make_run(root, "base", seed, (), None).path
                command = [sys.executable, "-m", "rollmill.launch.role", "trainer", str(base), "midtrain"]
                subprocess.run(command, check=True)
            after: dict[str, Rates] = {}
            for name, setting in arms.items():
                before, after[name], rollouts, hinted = play(make_run(root, name, seed, (*settings, *setting), base))
                change = clustered_difference(after["plain"], after[name])
                gains[name].append(change.value)
                print(
                    f"seed {seed}, {name}: {rate(before):.3f} → {rate(after[name]):.3f} "
                    f"in {rollouts} rollouts, {hinted} hinted tokens; against plain "
                    f"{change.value:+.3f} ({change.low:+.3f} to {change.high:+.3f})",
                    flush=True,
                )
                figures |= {f"{name}_{seed}_before": rate(before), f"{name}_{seed}_after": rate(after[name])}
                figures |= {f"{name}_{seed}_rollouts": rollouts, f"{name}_{seed}_over_plain_low": change.low}
    figures |= {f"{name}_over_plain": statistics.mean(each) for name, each in gains.items()}
    figures["seconds"] = time.monotonic() - began
    bars = {f"{name}_over_plain": at_least(figures[f"{name}_over_plain"], 0.0) for name in gains if name != "plain"}
    finish("credit", figures, bars)


if __name__ == "__main__":
    main()
