"""A real model gets better: SFT, then asynchronous RL on MBPP, measured on problems that were kept out.

    python -m benchmarks.mbpp MBPP.jsonl MODEL [--seconds 540] [--base] [--quick] [SETTING=VALUE …]

MODEL is a checkpoint directory (`rollmill model get smollm2-135m`). The recipe is examples/mbpp/sft.toml; settings are
laid over it. 128 problems, chosen by a hash of their id, are never trained on. Three measurements on them, each attempt
with the same seed in all three, intervals by a bootstrap over problems:

    base      the checkpoint itself; `--base` makes this measurement and no other
    before    after SFT, before RL
    after     after RL; `gain` is after minus before, paired by problem

The run ends in time: RL is stopped early enough to measure its newest version. `--quick` takes one tiny step of each
stage: it shows that the benchmark runs, not what a model learns.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.output import at_least, finish
from rollmill.cluster.drive import import_weights
from rollmill.cluster.run import RunConfig, RunDirectory
from rollmill.config import load_config, validate_config
from rollmill.environments.environment import build_tasks
from rollmill.environments.harnesses.turns import start
from rollmill.environments.tasks.programs import MAIN
from rollmill.evals.statistics import Interval, clustered_difference, clustered_interval
from rollmill.telemetry import EventTail, read_events

RECIPE = Path(__file__).parents[1] / "examples" / "mbpp" / "sft.toml"
HELD_OUT = 128
STOP_S = 30.0  # for the processes of a run that is stopped
START_S = 20.0  # for an engine that starts, to measure a version
QUICK = [
    "stages.sft.steps=1",
    "stages.sft.documents_per_step=2",
    "stages.rl.steps=1",
    "stages.rl.groups_per_step=1",
    "stages.rl.group_size=2",
    "stages.rl.max_staleness=0",
    "rollouts.max_answer_tokens=16",
    "engine.max_batch=8",
    "engine.cache_tokens=8192",
    "evals.tasks=2",
    "evals.attempts=1",
]
Event = dict[str, Any]


def prepare(data: Path, work: Path, settings: list[str]) -> RunConfig:
    """Write what the recipe needs beside a copy of it. Returns the configuration of the run."""
    work.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(data, work / "mbpp.jsonl")
    shutil.copyfile(RECIPE, work / "run.toml")
    ids = [f"mbpp/{json.loads(line)['task_id']}" for line in data.read_text().splitlines() if line.strip()]
    ids.sort(key=lambda id: hashlib.sha256(f"kept out {id}".encode()).digest())
    (work / "heldout.txt").write_text("".join(f"{id}\n" for id in ids[: min(HELD_OUT, len(ids) // 2)]))
    config = load_config(RunConfig, work / "run.toml", settings)
    with (work / "solutions.jsonl").open("w") as file:
        for messages in solutions(config):
            file.write(json.dumps({"messages": messages}) + "\n")
    return config


def solutions(config: RunConfig) -> Iterable[list[dict[str, Any]]]:
    """A conversation per training problem, as the harness asks and as a good answer looks."""
    tasks: Any = build_tasks(config)
    for id in tasks.train_ids():
        task = tasks.get(id)
        code = task.reference[MAIN].decode()
        asked = start(task, config.harness.system_prompt)  # type: ignore[attr-defined]
        yield [*asked, {"role": "assistant", "content": f"```python\n{code}```"}]


def rollmill(*arguments: object) -> list[str]:
    return [sys.executable, "-c", "from rollmill.cli.main import main; main()", *map(str, arguments)]


def follow(command: list[str], events: Path, log: Path, ends: Callable[[list[Event]], float]) -> bool:
    """Run a command and print its events as they come. After the time `ends` it is stopped. True if it ended by itself.

    `ends` gets all events so far and returns a time of `time.time()`."""
    tail, seen = EventTail(events), list[Event]()
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        while process.poll() is None:
            for event in tail.poll():
                seen.append(event)
                tell(event)
            if time.time() > ends(seen):
                return False
            time.sleep(0.5)
        if process.returncode:
            print(f"exit code {process.returncode}: {log.read_text(errors='replace')[-2000:]}", flush=True)
        return process.returncode == 0
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def tell(event: Event) -> None:
    kind, at = event["kind"], time.strftime("%H:%M:%S", time.gmtime(event["at"]))
    if kind == "phase":
        print(f"{at} {event['phase']}: {event['state']}", flush=True)
    elif kind == "document_step":
        print(f"{at} sft {event['step']}: loss {event['loss']:.3f}", flush=True)
    elif kind == "eval":
        print(f"{at} {measured(event)}, {event['seconds']:.1f} s", flush=True)
    elif kind == "step":
        print(
            f"{at} step {event['step']}: solved {number(event, 'solve_rate'):.3f}, {event['groups']} groups and "
            f"{event['groups_closed']} closed, {event['trained_tokens']} tokens, waited {event['wait_seconds']:.2f} s, "
            f"step {event['seconds']:.2f} s, staleness {number(event, 'staleness_mean'):.2f}, mismatch k3 "
            f"{number(event, 'mismatch_k3'):.1e} and most {number(event, 'mismatch_max'):.1e}, entropy "
            f"{number(event, 'entropy'):.3f}, gradient {number(event, 'grad_norm'):.3f}",
            flush=True,
        )


def number(event: Event, name: str) -> float:
    value = event.get(name)
    return float("nan") if value is None else float(value)


def measured(event: Event) -> str:
    rate = clustered_interval(list(event["by_task"].values()))
    return (
        f"{event['label']}: {100 * rate.value:.2f} % ({100 * rate.low:.2f} to {100 * rate.high:.2f}) solved of "
        f"{event['attempts']} attempts, {event['failed']} failed"
    )


class Bench:
    """One run with its time limit, and the measurements of its versions."""

    def __init__(self, config: RunConfig, work: Path, settings: list[str], seconds: float) -> None:
        self.config, self.work, self.settings = config, work, settings
        self.end = time.time() + seconds
        self.run, self.base = (work / "runs" / name for name in (config.name, f"{config.name}-base"))
        self.log = work / "log.txt"

    def train(self) -> None:
        made = (self.run / "run.json").exists()
        source = ["--resume", self.run] if made else [self.work / "run.toml", *self.settings]
        follow(rollmill("train", *source, "--root", self.run.parent), self.run / "events", self.log, self.ends)

    def ends(self, events: list[Event]) -> float:
        """When training must stop: with time left for the last measurement, unless it is at it already."""
        if any(event["kind"] == "phase" and event["phase"] == "evaluate after" for event in events):
            return self.end
        return self.end - 1.5 * self.measuring_s(events) - START_S

    def measuring_s(self, events: list[Event]) -> float:
        """Seconds of the last measurement; a guess before the first."""
        return next((event["seconds"] for event in reversed(events) if event["kind"] == "eval"), 60.0)

    def measure(self, run: Path) -> None:
        """Evaluate the newest version of a run."""
        shutil.rmtree(evaluated(run), ignore_errors=True)
        follow(rollmill("eval", run), evaluated(run), self.log, lambda _: self.end)

    def measure_base(self) -> None:
        """Evaluate the checkpoint, in a run of its own that trains nothing."""
        if not self.base.exists():
            tree = self.config.model_dump(mode="json") | {"name": self.base.name, "stages": []}
            import_weights(RunDirectory.create(self.base.parent, validate_config(RunConfig, tree, "the recipe")))
        self.measure(self.base)


def evaluated(run: Path) -> Path:
    """The events of the last `rollmill eval`."""
    return run / "services" / "eval-1" / "events"


def last(events: list[Event], kind: str, **fields: Any) -> Event | None:
    fitting = (event for event in reversed(events) if event["kind"] == kind)
    return next((event for event in fitting if all(event[name] == value for name, value in fields.items())), None)


def evaluate(bench: Bench) -> dict[str, Event | None]:
    """Train, and measure what training had no time for. Returns the measurements, also an earlier one of the base."""
    bench.train()
    events = read_events(bench.run / "events")
    found = {label: last(events, "eval", label=label) for label in ("before", "after")}
    if found["before"] is not None and found["after"] is None and last(events, "step") is not None:
        bench.measure(bench.run)
        found["after"] = last(read_events(evaluated(bench.run)), "eval")
    return found | {"base": last(read_events(evaluated(bench.base)), "eval")}


def rl_figures(events: list[Event]) -> dict[str, float]:
    """Of the RL stage: pace, rewards, how far engine and trainer are apart."""
    steps = [event for event in events if event["kind"] == "step"]
    begin = last(events, "phase", phase="rl", state="start")
    if not steps or begin is None:
        return {}
    seconds = steps[-1]["at"] - begin["at"]
    rollouts = [e for e in events if e["kind"] == "rollout" and begin["at"] <= e["at"] <= steps[-1]["at"]]
    warm = steps[3:] or steps  # kernels are compiled in the first ones
    warm_at = steps[2]["at"] if len(steps) > 3 else begin["at"]
    few = max(1, len(steps) // 6)
    figures = {
        "steps": len(steps),
        "seconds": seconds,
        "samples": len(rollouts),
        "samples_per_s": sum(event["at"] > warm_at for event in rollouts) / (steps[-1]["at"] - warm_at),
        "tokens_per_s": sum(event["tokens"] or 0 for event in rollouts) / seconds,
        "trained_per_s": sum(event["trajectories"] for event in steps) / seconds,
        "step_s": statistics.median(event["seconds"] for event in warm),
        "step_and_wait_s": (warm[-1]["at"] - warm[0]["at"]) / max(1, len(warm) - 1),
        "solved_first": statistics.mean(number(event, "solve_rate") for event in steps[:few]),
        "solved_last": statistics.mean(number(event, "solve_rate") for event in steps[-few:]),
        "staleness": statistics.mean(number(event, "staleness_mean") for event in steps),
        "mismatch_k3": statistics.median(number(event, "mismatch_k3") for event in steps),
        "mismatch_most": max(number(event, "mismatch_max") for event in steps),
    }
    # a step without groups has no mismatch: JSON has no word for that
    return {f"rl_{name}": float(value) for name, value in figures.items() if math.isfinite(value)}


def figures_of(found: dict[str, Event | None]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for label, event in found.items():
        if event is not None:
            rate = clustered_interval(list(event["by_task"].values()))
            figures |= {label: rate.value, f"{label}_low": rate.low, f"{label}_high": rate.high}
            figures[f"{label}_seconds"] = event["seconds"]
    for name, first, second in (("gain", "before", "after"), ("sft_gain", "base", "before")):
        one, other = found.get(first), found.get(second)
        if one is not None and other is not None:
            gain: Interval = clustered_difference(one["by_task"], other["by_task"])
            figures |= {name: gain.value, f"{name}_low": gain.low, f"{name}_high": gain.high}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="MBPP's problems, one JSON object per line")
    parser.add_argument("model", type=Path, help="a checkpoint directory")
    parser.add_argument("settings", nargs="*", help="settings laid over the recipe: key.path=value")
    parser.add_argument(
        "--work", type=Path, default=Path("build/mbpp"), help="where the run is; continued if it is there"
    )
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything")
    parser.add_argument("--base", action="store_true", help="only measure the checkpoint")
    parser.add_argument("--quick", action="store_true", help="one tiny step of each stage")
    arguments = parser.parse_intermixed_args()
    settings = [f"checkpoint={json.dumps(str(arguments.model.absolute()))}", *(QUICK if arguments.quick else [])]
    settings += arguments.settings
    config = prepare(arguments.data, arguments.work, settings)
    bench = Bench(config, arguments.work, settings, arguments.seconds)
    if arguments.base:
        bench.measure_base()
        figures = figures_of({"base": last(read_events(evaluated(bench.base)), "eval")})
    else:
        figures = figures_of(evaluate(bench)) | rl_figures(read_events(bench.run / "events"))
    for name, value in figures.items():
        print(f"{name:24} {value:12.5g}")
    # beyond the interval: even the lower end of the paired difference is above zero
    bars = {"gain_low": at_least(figures["gain_low"], 1e-9)} if "gain_low" in figures else {}
    finish("mbpp", figures, bars)


if __name__ == "__main__":
    main()
