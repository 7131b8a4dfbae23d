"""Real-time RL with simulated users (called so everywhere): `python -m benchmarks.living cycle`.

    learn       cycles with users who want solved tasks: true acceptance before and after. The rule never sees the truth
    poison      users whose reports reward broken tool calls: the gate holds the candidate
    regression  a gate with wide bounds, and users whose reports are inverted until the canary begins: the canary rolls
                the candidate back, and production gets no more of it than its share

Everything but the users is real: gateway, engines, machines, trainer, database, `rollmill cycle run` as a process of
its own. The model is the demo's, mid-trained and not reinforced. `--base RUN` takes a mid-trained run instead of making
one. `--population FILE` brings other users to `learn`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.output import at_least, at_most, finish
from benchmarks.simulated_users import PopulationFile, Visit, load_population, visit
from rollmill.cluster.launchers.local import LocalLauncher
from rollmill.cluster.prepare import restore_tokenizer
from rollmill.cluster.run import RunConfig, RunDirectory
from rollmill.cluster.service import Target, serving, wait_until_ready, while_watching
from rollmill.config import load_config
from rollmill.demo import CONFIG as DEMO
from rollmill.environments.environment import build_tasks, open_environment
from rollmill.evals.statistics import clustered_difference, clustered_interval, wilson
from rollmill.realtime.journal import Journal
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.query import TrajectoryQuery
from rollmill.trajectories.store import TrajectoryStore
from rollmill.types import Version
from rollmill.weights.reading.channels import Channels
from rollmill.weights.reading.store import WeightStore

RUN = "from rollmill.cli.main import main; main()"
MEASURE = 7  # seed of the tasks and draws of a measurement: every version meets the same ones
MIDTRAIN = 140  # steps: enough to solve some tasks and fail others
SETTINGS = (
    'engines=[{region="home"}]',
    f"stages.midtrain.steps={MIDTRAIN}",
    "gateway.seal_idle_s=3.0",
    "cycle.settle_s=2.0",
    "cycle.share=0.25",
    "evals.attempts=2",
    "evals.fresh_tasks=0",
    "evals.family_tasks=0",
)
WIDE = tuple(
    f"gate.{name}"
    for name in (
        "max_quality_loss=1.0",
        "max_more_tokens=1000.0",
        "max_more_seconds=1000.0",
        "max_more_malformed=1.0",
        "max_more_questions=1.0",
    )
)


@dataclass
class Production:
    """A served run with users who visit while a cycle is driven."""

    run: RunDirectory
    batch: int
    visits: list[Visit] = field(default_factory=list)
    seed: int = 1

    @property
    def journal(self) -> Journal:
        return Journal(open_database(self.run.database_url), self.run.id)

    def drive(self, cycles: int, population: Callable[[str], PopulationFile]) -> list[str]:
        """Drive cycles to their end. `population`: who visits while a cycle is in a state. Returns how each ended."""
        command = [sys.executable, "-c", RUN, "cycle", "run", str(self.run.path), "--cycles", str(cycles)]
        with serving(self.run, _live(self.run), canary=True) as (service, cluster):
            wait_until_ready(service, cluster)
            driver = subprocess.Popen(command)
            try:
                while driver.poll() is None:
                    cycle = self.journal.current()
                    state = cycle.state if cycle is not None else "collecting"
                    # nothing is learnt from users who come while a candidate is trained and examined
                    count = self.batch if state in ("collecting", "canary") else 4
                    self.seed += 1
                    self.visits += self.receive(service, cluster, population(state), count, 1000 + self.seed)
            finally:
                driver.terminate()
                code = driver.wait()
        assert code == 0, f"`rollmill cycle run` ended with {code}"
        return [move.state for move in self.journal.history() if move.state in ("promoted", "held", "rolled_back")]

    def receive(
        self, service: RunDirectory, cluster: LocalLauncher, population: PopulationFile, count: int, seed: int
    ) -> list[Visit]:
        async def users() -> list[Visit]:
            tasks = list(itertools.islice(build_tasks(self.run.config).train(seed), count))
            url, key = service.url("gateway"), service.secrets["production_key"]
            tokens = self.run.config.rollouts.max_answer_tokens
            async with open_environment(self.run.config) as environment:
                return await visit(environment, url, key, tasks, population, seed=seed, max_tokens=tokens)

        return asyncio.run(while_watching(cluster, users(), lambda: None))

    def measure(self, population: PopulationFile, count: int) -> dict[str, list[bool]]:
        """By task: whether the work of the version that is live now is truly accepted."""
        with serving(self.run, _live(self.run)) as (service, cluster):
            wait_until_ready(service, cluster)
            found = self.receive(service, cluster, population, count, MEASURE)
        truth: dict[str, list[bool]] = {each.task: [] for each in found}
        for each in found:
            truth[each.task].append(each.truth)
        return truth

    def share_of(self, line: str, since: float, until: float) -> tuple[int, int]:
        """Production sessions of a line, and of all, that began in a time."""
        store = TrajectoryStore(open_database(self.run.database_url), Objects.open(self.run.home_store))
        rows = [row for row in store.find(TrajectoryQuery(run="production")) if since <= row.created_at <= until]
        return sum(row.line == line for row in rows), len(rows)


def _live(run: RunDirectory) -> Target:
    version = Channels(Objects.open(run.home_store)).get("live")
    assert version is not None
    return Target("channel", "live", version, "bf16")


def make_run(root: Path, name: str, base: Path | None, settings: Sequence[str]) -> RunDirectory:
    """A run whose `live` is the demo's model after mid-training."""
    run = RunDirectory.create(root, load_config(RunConfig, DEMO, [f"name={name}", *SETTINGS, *settings]))
    home = root / "base" if base is None else base
    if not (home / "store").is_dir():
        made = RunDirectory.create(root, load_config(RunConfig, DEMO, ["name=base", *SETTINGS]))
        command = [sys.executable, "-m", "rollmill.cluster.role", "trainer", str(made.path), "midtrain"]
        subprocess.run(command, check=True)
    for folder in ("weights", "companions"):
        shutil.copytree(home / "store" / folder / "midtrain", run.path / "store" / folder / "midtrain")
    restore_tokenizer(run)
    objects = Objects.open(run.home_store)
    head = WeightStore(objects).head("midtrain", "bf16")
    assert head is not None
    Channels(objects).move("live", Version("midtrain", head))
    return run


def learn(root: Path, base: Path | None, quick: bool, population: PopulationFile) -> tuple[dict, dict]:  # type: ignore[type-arg]
    cycles, enough, measured = (1, 64, 64) if quick else (3, 224, 256)
    settings = (f"cycle.enough={enough}", "cycle.steps=4", "cycle.lr=2.5e-4")
    settings = (*settings, "cycle.canary_sessions=24", "cycle.max_loss=0.15")
    run = make_run(root, "learn", base, (*settings, "evals.tasks=32", "gate.max_quality_loss=0.06"))
    production = Production(run, batch=48)
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
    run = make_run(root, name, base, (*settings, *bounds))
    population = load_population(name)
    ended = Production(run, batch=48).drive(1, lambda state: population)
    cycle = Journal(open_database(run.database_url), run.id).current()
    assert cycle is not None
    metrics = {metric["name"]: metric for metric in cycle.facts.get("gate", {}).get("metrics", [])}
    figures = {f"{key}_{of}": metrics[key][of] for key in ("malformed", "questions") for of in ("live", "candidate")}
    figures["held"] = float(ended == ["held"] and bool(metrics))
    return figures, {"held": at_least(figures["held"], 1.0)}


def regression(root: Path, base: Path | None, quick: bool) -> tuple[dict, dict]:  # type: ignore[type-arg]
    settings = (f"cycle.enough={64 if quick else 192}", "cycle.steps=8", "cycle.lr=1e-3", "cycle.canary_sessions=200")
    run = make_run(root, "regression", base, (*settings, *WIDE, "evals.tasks=8"))
    production, inverted, steady = Production(run, batch=48), load_population("inverted"), load_population("steady")
    ended = production.drive(1, lambda state: inverted if state == "collecting" else steady)
    moves = {move.state: move for move in production.journal.history(1)}
    end = moves.get("rolled_back", production.journal.history(1)[-1])
    got, all_ = production.share_of("cycle-1", moves["canary"].at if "canary" in moves else 0.0, end.at)
    later = production.share_of("cycle-1", end.at + 2.0, end.at + 1e9)[0]
    figures = {"rolled_back": float(ended == ["rolled_back"]), "candidate_sessions": got, "canary_sessions": all_}
    share = got / all_ if all_ else 1.0
    low = wilson(got, all_).low if all_ else 1.0
    figures |= {"candidate_share": share, "candidate_sessions_later": later}
    bars = {"rolled_back": at_least(figures["rolled_back"], 1.0), "share_low": at_most(low, 0.25)}
    return figures, {**bars, "later": at_most(later, 0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["cycle"])
    parser.add_argument("--scenario", action="append", choices=["learn", "poison", "regression"])
    parser.add_argument("--population", default="steady", help="of `learn`")
    parser.add_argument("--poison", default="poisoned-calls", help="the population of `poison`")
    parser.add_argument("--base", type=Path, help="a mid-trained run")
    parser.add_argument("--root", type=Path, help="where the runs are made; default: a temporary directory")
    parser.add_argument("--quick", action="store_true", help="fewer users")
    given = parser.parse_args()
    figures: dict[str, float] = {}
    bars: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        root = given.root or Path(scratch)
        for scenario in given.scenario or ["learn", "poison", "regression"]:
            if scenario == "learn":
                found = learn(root, given.base, given.quick, load_population(given.population))
            elif scenario == "poison":
                found = poison(root, given.base, given.quick, given.poison)
            else:
                found = regression(root, given.base, given.quick)
            print(scenario, found)
            figures |= {f"{scenario}_{key}": value for key, value in found[0].items()}
            bars |= {f"{scenario}_{key}": value for key, value in found[1].items()}
    finish("living_cycle", figures, bars)


if __name__ == "__main__":
    main()
