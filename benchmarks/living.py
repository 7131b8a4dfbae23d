"""Real-time RL with simulated users (called so everywhere): `python -m benchmarks.living`.

    learn       cycles with users who want solved tasks: true acceptance before and after. The rule never sees the truth
    poison      users whose reports reward broken tool calls; users whose reports reward questions instead of edits: the
                gate's behaviour metrics hold both candidates
    regression  a gate with wide bounds, and users whose reports are inverted until the canary begins: the canary rolls
                the candidate back, and production gets no more of it than its share in expectation: a hash gives out
                the sessions, so the share that is seen may be above it by chance. The bar is on the lower end of its
                95 % interval

Everything but the users is real: gateway, engines, machines, trainer, database, `rollmill cycle run` as a process of
its own. The model is the demo's, mid-trained and not reinforced; its teacher asks back in a tenth of its sessions, so
that there are questions to reward. `--base RUN` takes a mid-trained run instead of making one. `--population FILE`
brings other users to `learn`, `--poison FILE` other poisons.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.output import at_least, at_most, finish
from rollmill.config import load_config
from rollmill.demo import CONFIG as DEMO
from rollmill.demo.production import open_production, set_live
from rollmill.demo.simulated_users import PopulationFile, load_population
from rollmill.evals.statistics import clustered_difference, clustered_interval, wilson
from rollmill.runs.prepare import restore_tokenizer
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights.reading.weight_store import WeightStore

MIDTRAIN = 140  # steps: enough to solve some tasks and fail others
POISONS = ("poisoned-calls", "poisoned-questions")
SHARE = 0.25  # of production, for a canary
SETTINGS = (
    'engines=[{region="home"}]',
    f"stages.midtrain.steps={MIDTRAIN}",
    "stages.midtrain.sources.0.asks=0.1",
    "gateway.seal_idle_s=3.0",
    "gateway.consent=train",
    "cycle.settle_s=2.0",
    f"cycle.share={SHARE}",
    "evals.attempts=2",
    "evals.fresh_tasks=0",
    "evals.family_tasks=0",
    "gate.alpha=0.5",  # few attempts: estimates decide
    "gate.least_tasks=1",
)
WIDE = tuple(
    f"gate.{name}"
    for name in (
        "max_quality_loss=1.0",
        "max_more_tokens=1000.0",
        "max_more_engine_seconds=1000.0",
        "max_more_seconds=1000.0",
        "max_more_malformed=1.0",
        "max_more_questions=1.0",
    )
)


def make_run(root: Path, name: str, base: Path | None, settings: Sequence[str]) -> RunDirectory:
    """A run whose `live` is the demo's model after mid-training."""
    run = RunDirectory.create(root, load_config(RunConfig, DEMO, [f"name={name}", *SETTINGS, *settings]))
    home = root / "base" if base is None else base
    if not (home / "store").is_dir():
        made = RunDirectory.create(root, load_config(RunConfig, DEMO, ["name=base", *SETTINGS]))
        command = [sys.executable, "-m", "rollmill.launch.role", "trainer", str(made.path), "midtrain"]
        subprocess.run(command, check=True)
    for folder in ("weights", "companions"):
        shutil.copytree(home / "store" / folder / "midtrain", run.path / "store" / folder / "midtrain")
    restore_tokenizer(run)
    head = WeightStore(Objects.open(run.home_store)).head("midtrain", "bf16")
    assert head is not None
    set_live(run, Version("midtrain", head))
    return run


def learn(root: Path, base: Path | None, quick: bool, population: PopulationFile) -> tuple[dict, dict]:  # type: ignore[type-arg]
    cycles, enough, measured = (1, 64, 64) if quick else (3, 224, 256)
    settings = (f"cycle.enough={enough}", "cycle.steps=4", "cycle.lr=2.5e-4")
    settings = (*settings, "cycle.canary_sessions=100", "cycle.max_loss=0.4")
    run = make_run(root, "learn", base, (*settings, "evals.tasks=32", "gate.max_quality_loss=0.06"))
    with open_production(run, batch=48) as production:
        before = production.measure(population, measured)
        ended = production.drive(cycles, lambda state: population)
        after = production.measure(population, measured)
    gain = clustered_difference(before, after)  # of the same tasks
    rates = {name: clustered_interval(list(by_task.values())) for name, by_task in (("b", before), ("a", after))}
    print(f"true acceptance before: {rates['b']}, after: {rates['a']}")
    print(f"gain {gain}; cycles ended: {ended}")
    figures = {"before": rates["b"].value, "after": rates["a"].value, "gain": gain.value}
    figures |= {"gain_low": gain.low, "gain_high": gain.high, "promoted": ended.count("promoted"), "cycles": len(ended)}
    return figures, {"gain_low": at_least(gain.low, 0.0)}


def poison(root: Path, base: Path | None, quick: bool, name: str) -> tuple[dict, dict]:  # type: ignore[type-arg]
    settings = (f"cycle.enough={64 if quick else 192}", "cycle.steps=8", "cycle.lr=1e-3", "evals.tasks=32")
    bounds = [setting for setting in WIDE if "malformed" not in setting and "questions" not in setting]
    run = make_run(root, Path(name).stem, base, (*settings, *bounds))
    population = load_population(name)
    with open_production(run, batch=48) as production:
        ended = production.drive(1, lambda state: population)
        cycle = production.journal.current()
    assert cycle is not None
    metrics = {metric["name"]: metric for metric in cycle.facts.get("gate", {}).get("metrics", [])}
    figures = {f"{key}_{of}": metrics[key][of] for key in ("malformed", "questions") for of in ("live", "candidate")}
    by_behaviour = [key for key in ("malformed", "questions") if key in metrics and not metrics[key]["holds"]]
    print(f"{name}: {ended}, held by {by_behaviour}: {cycle.facts.get('gate', {}).get('reasons')}")
    figures["held"] = float(ended == ["held"] and bool(by_behaviour))
    return figures, {"held": at_least(figures["held"], 1.0)}


def regression(root: Path, base: Path | None, quick: bool) -> tuple[dict, dict]:  # type: ignore[type-arg]
    settings = (f"cycle.enough={64 if quick else 192}", "cycle.steps=8", "cycle.lr=1e-3", "cycle.canary_sessions=200")
    run = make_run(root, "regression", base, (*settings, *WIDE, "evals.tasks=8"))
    inverted, steady = load_population("inverted"), load_population("steady")
    with open_production(run, batch=48) as production:
        ended = production.drive(1, lambda state: inverted if state == "collecting" else steady)
    moves = {move.state: move for move in production.journal.history(1)}
    end = moves.get("rolled_back", production.journal.history(1)[-1])
    got, all_ = production.share_of("cycle-1", moves["canary"].at if "canary" in moves else 0.0, end.at)
    later = production.share_of("cycle-1", end.at + 2.0, end.at + 1e9)[0]
    figures = {"rolled_back": float(ended == ["rolled_back"]), "candidate_sessions": got, "canary_sessions": all_}
    share = got / all_ if all_ else 1.0
    low = wilson(got, all_).low if all_ else 1.0
    figures |= {"candidate_share": share, "candidate_share_low": low, "candidate_sessions_later": later}
    bars = {"rolled_back": at_least(figures["rolled_back"], 1.0), "share_in_expectation": at_most(low, SHARE)}
    return figures, {**bars, "later": at_most(later, 0)}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", action="append", choices=["learn", "poison", "regression"])
    parser.add_argument("--population", default="steady", help="of `learn`")
    parser.add_argument("--poison", action="append", help="a population of `poison`; default: both that there are")
    parser.add_argument("--base", type=Path, help="a mid-trained run")
    parser.add_argument("--root", type=Path, help="where the runs are made; default: a temporary directory")
    parser.add_argument("--quick", action="store_true", help="fewer users")
    return parser.parse_args(words)


def main() -> None:
    given = parse()
    began = time.monotonic()
    figures: dict[str, float] = {"load_before": os.getloadavg()[0]}
    bars: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        root = given.root or Path(scratch)
        for scenario in given.scenario or ["learn", "poison", "regression"]:
            if scenario == "learn":
                found = {scenario: learn(root, given.base, given.quick, load_population(given.population))}
            elif scenario == "poison":
                names = given.poison or POISONS
                found = {Path(name).stem: poison(root, given.base, given.quick, name) for name in names}
            else:
                found = {scenario: regression(root, given.base, given.quick)}
            print(scenario, found, flush=True)
            for name, (told, held) in found.items():
                figures |= {f"{name}_{key}": value for key, value in told.items()}
                bars |= {f"{name}_{key}": value for key, value in held.items()}
    figures["seconds"] = time.monotonic() - began
    finish("living_cycle", figures, bars)


if __name__ == "__main__":
    main()
