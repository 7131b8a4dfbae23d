"""A real model gets better: SFT, then asynchronous RL on MBPP, measured on problems that were kept out.

    python -m benchmarks.mbpp MBPP.jsonl MODEL [--seconds 540] [--base | --sft | --begin WORK] [--quick] [KEY=VALUE …]

MODEL is a checkpoint directory (`rollmill model get smollm2-135m`). The recipe is examples/mbpp/sft.toml; settings are
laid over it. 128 problems, chosen by a hash of their id, are never trained on. Three measurements on them, each attempt
with the same seed in all three, intervals by a bootstrap over problems:

    base      the checkpoint itself; `--base` makes this measurement and no other
    before    after SFT, before RL
    after     after RL; `gain` is after minus before, paired by problem

`--begin WORK` compares settings: RL alone, from the SFT version of the run in another work directory (MODEL is then not
read). That version is not measured again: its measurement there is `before` here too. `--sft` makes such a directory
without RL.

The run ends in time: RL is stopped early enough to measure its newest version. `--quick` takes one tiny step of each
stage: it shows that the benchmark runs, not what a model learns.
"""

from __future__ import annotations

import argparse
import collections
import functools
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.output import at_least, finish
from rollmill.cli.target import start_settings
from rollmill.config import load_config, validate_config
from rollmill.environments.environment import build_tasks
from rollmill.environments.harnesses.turns import start
from rollmill.environments.tasks.programs import MAIN
from rollmill.errors import WeightsError
from rollmill.evals.statistics import Interval, clustered_difference, clustered_interval
from rollmill.launch.rank_processes import begin_run
from rollmill.launch.supervise import import_weights
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.runs.stages import BEFORE, results_key
from rollmill.storage.objects import Objects
from rollmill.telemetry import EventTail, read_events
from rollmill.weights import WeightStore

RECIPE = Path(__file__).parents[1] / "examples" / "mbpp" / "sft.toml"
HELD_OUT = 128
STOP_S = 30.0  # for the processes of a run that is stopped
START_S = 45.0  # for a run that stops and an engine that starts, to measure a version, beside other runs
BASE = "-base"
WINDOW = 1024  # samples that a point of a reward curve is the mean of
LEVELS = (0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15)
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


def prepare(data: Path, work: Path, settings: list[str], begin: Path | None = None) -> RunConfig:
    """Write what the recipe needs beside a copy of it. Returns the configuration of the run."""
    work.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(data, work / "mbpp.jsonl")
    (work / "run.toml").write_text(RECIPE.read_text() if begin is None else without_sft(RECIPE.read_text()))
    ids = [f"mbpp/{json.loads(line)['task_id']}" for line in data.read_text().splitlines() if line.strip()]
    ids.sort(key=lambda id: hashlib.sha256(f"kept out {id}".encode()).digest())
    (work / "heldout.txt").write_text("".join(f"{id}\n" for id in ids[: min(HELD_OUT, len(ids) // 2)]))
    config = load_config(RunConfig, work / "run.toml", settings)
    with (work / "solutions.jsonl").open("w") as file:
        for messages in solutions(config):
            file.write(json.dumps({"messages": messages}) + "\n")
    return config


def without_sft(recipe: str) -> str:
    """The recipe with its last stage alone, for a run that starts from a version of another one."""
    head, _, rest = recipe.split("[[stages]]", 2)
    return "".join(line for line in head.splitlines(True) if not line.startswith("checkpoint")) + "[[stages]]" + rest


def run_in(work: Path) -> Path:
    """The run in a work directory."""
    (run,) = (path.parent for path in (work / "runs").glob("*/run.json") if not path.parent.name.endswith(BASE))
    return run


def sft_version(work: Path) -> tuple[Path, str]:
    """The run in a work directory, and the last version of its SFT. Versions count what was published, not steps."""
    run = run_in(work)
    store = WeightStore(Objects.open(RunDirectory.open(run).home_store))
    numbers = [number for form in store.forms("sft") for number in store.numbers("sft", form)]
    if not numbers:
        raise WeightsError(f"{run} has no version of its SFT", hint="`--sft` makes one")
    return run, f"sft@{max(numbers)}"


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


class Bench:
    """One run with its time limit, and the measurements of its versions."""

    def __init__(
        self,
        config: RunConfig,
        work: Path,
        settings: list[str],
        seconds: float,
        begin: Path | None = None,
        sft: bool = False,
    ) -> None:
        """`sft`: stop when the version after SFT is measured."""
        self.config, self.work, self.settings, self.begin, self.sft = config, work, settings, begin, sft
        self.end = time.time() + seconds
        self.run, self.base = (work / "runs" / name for name in (config.name, f"{config.name}{BASE}"))
        self.log = work / "log.txt"

    def train(self) -> None:
        if self.begin is not None and not (self.run / "run.json").exists():
            self._begin_elsewhere(self.begin)
        made = (self.run / "run.json").exists()
        source = ["--resume", self.run] if made else [self.work / "run.toml", *self.settings]
        follow(rollmill("train", *source, "--root", self.run.parent), self.run / "events", self.log, self.ends)

    def _begin_elsewhere(self, begin: Path) -> None:
        """Create a run whose weights were measured in the run of `begin`."""
        other = RunDirectory.open(run_in(begin))
        run = begin_run(self.run.parent, self.config)
        measured = Objects.open(other.home_store).get(results_key(other, BEFORE))
        Objects.open(run.home_store).put(results_key(run, BEFORE), measured)

    def before(self, events: list[Event]) -> Event | None:
        return self._measured_elsewhere or last(events, "eval", label="before")

    @functools.cached_property
    def _measured_elsewhere(self) -> Event | None:
        if self.begin is None:
            return None
        return last(read_events(run_in(self.begin) / "events"), "eval", label="before")

    def ends(self, events: list[Event]) -> float:
        """When training must stop: with time left for the last measurement, unless it is at it already."""
        if self.sft:
            return self.end if self.before(events) is None else 0.0
        if any(event["kind"] == "phase" and event["phase"] == "evaluate after" for event in events):
            return self.end
        return self.end - 1.5 * self.measuring_s(events) - START_S

    def measuring_s(self, events: list[Event]) -> float:
        """Seconds of the last measurement; a guess before the first."""
        known = self.before(events) or last(events, "eval")
        return 60.0 if known is None else float(known["seconds"])

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


def evaluate(bench: Bench) -> dict[str, Event | None]:
    """Train, and measure what training had no time for. Returns the measurements, also an earlier one of the base."""
    bench.train()
    events = read_events(bench.run / "events")
    found = {"before": bench.before(events), "after": last(events, "eval", label="after")}
    if found["before"] is not None and found["after"] is None and last(events, "step") is not None and not bench.sft:
        bench.measure(bench.run)
        found["after"] = last(read_events(evaluated(bench.run)), "eval")
    return found | {"base": last(read_events(evaluated(bench.base)), "eval")}


Event = dict[str, Any]
# --- what is printed and counted: events as lines, measurements, pace, curves


def tell(event: Event) -> None:
    kind, at = event["kind"], time.strftime("%H:%M:%S", time.gmtime(event["at"]))
    if kind == "phase":
        print(f"{at} {event['phase']}: {event['state']}", flush=True)
    elif kind == "document_step":
        print(f"{at} sft {event['step']}: loss {event['loss']:.3f}", flush=True)
    elif kind == "eval":
        print(f"{at} {measured(event)}, {event['seconds']:.1f} s", flush=True)
    elif kind == "restart" or (
        kind == "warning" and not event["text"].startswith("groups_missing")
    ):  # the step says it
        print(f"{at} {kind}: {event.get('text') or event.get('target')}"[:300], flush=True)
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


def last(events: Sequence[Event], kind: str, **fields: Any) -> Event | None:
    fitting = (event for event in reversed(events) if event["kind"] == kind)
    return next((event for event in fitting if all(event.get(name) == value for name, value in fields.items())), None)


def figures_of(found: Mapping[str, Event | None]) -> dict[str, float]:
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
    published = [event["seconds"] for event in events if event["kind"] == "publish" and event["at"] > warm_at]
    few = max(1, len(steps) // 6)
    figures = {
        "steps": len(steps),
        "seconds": seconds,
        "samples": len(rollouts),
        "samples_per_s": sum(event["at"] > warm_at for event in rollouts) / (steps[-1]["at"] - warm_at),
        "tokens_per_s": sum(event["tokens"] or 0 for event in rollouts) / seconds,
        "trained_per_s": sum(event["trajectories"] for event in steps) / seconds,
        "step_s": statistics.median(event["seconds"] for event in warm),
        "step_tokens": statistics.median(event["trained_tokens"] for event in warm),
        "wait_s": statistics.median(event["wait_seconds"] for event in warm),
        "publish_s": statistics.median(published) if published else math.nan,
        "step_and_wait_s": (warm[-1]["at"] - warm[0]["at"]) / max(1, len(warm) - 1),
        "solved_first": statistics.mean(number(event, "solve_rate") for event in steps[:few]),
        "solved_last": statistics.mean(number(event, "solve_rate") for event in steps[-few:]),
        "staleness": mean_of(steps, "staleness_mean"),
        "staleness_most": max(numbers(steps, "staleness_max"), default=math.nan),
        # of steps after which the trainer waited: others have no mismatch
        "mismatch_k3": statistics.median(numbers(steps, "mismatch_k3") or [math.nan]),
        "mismatch_most": max(numbers(steps, "mismatch_max"), default=math.nan),
        **{f"seconds_to_{name}": value for name, value in seconds_to(curve(events)).items()},
    }
    # JSON has no word for what no step has measured
    return {f"rl_{name}": float(value) for name, value in figures.items() if math.isfinite(value)}


def numbers(events: Iterable[Event], name: str) -> list[float]:
    """Of the events that have one."""
    return [value for event in events if math.isfinite(value := number(event, name))]


def mean_of(events: Iterable[Event], name: str) -> float:
    return statistics.mean(numbers(events, name) or [math.nan])


Curve = list[tuple[float, float]]  # seconds since RL began, share solved of the last WINDOW samples


def curve(events: Sequence[Event]) -> Curve:
    """Of the training rollouts of a run, in the order in which they ended."""
    begin, end = last(events, "phase", phase="rl", state="start"), last(events, "step")
    if begin is None or end is None:
        return []
    ended = [e for e in events if e["kind"] == "rollout" and begin["at"] <= e["at"] <= end["at"]]
    ended.sort(key=lambda event: event["at"])
    return smoothed((event["at"] - begin["at"], float(event["reward"] or 0.0), 1) for event in ended)


def smoothed(rows: Iterable[tuple[float, float, int]]) -> Curve:
    """`rows`: seconds, share solved, samples. Points from the first full window on."""
    found: Curve = []
    held: collections.deque[tuple[float, int]] = collections.deque()
    solved, samples = 0.0, 0
    for at, share, count in rows:
        held.append((share * count, count))
        solved, samples = solved + share * count, samples + count
        while samples - held[0][1] >= WINDOW:
            first, of = held.popleft()
            solved, samples = solved - first, samples - of
        if samples >= WINDOW:
            found.append((at, solved / samples))
    return found


def seconds_to(points: Curve) -> dict[str, float]:
    """level in per cent → when the curve first reached it."""
    reached = ((level, next((at for at, value in points if value >= level), None)) for level in LEVELS)
    return {f"{100 * level:g}pct": at for level, at in reached if at is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="MBPP's problems, one JSON object per line")
    parser.add_argument("model", type=Path, help="a checkpoint directory")
    parser.add_argument("settings", nargs="*", help="settings laid over the recipe: key.path=value")
    parser.add_argument(
        "--work", type=Path, default=Path("build/mbpp"), help="where the run is; continued if it is there"
    )
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--begin", type=Path, help="start from the SFT version in this work directory")
    only.add_argument("--base", action="store_true", help="only measure the checkpoint")
    only.add_argument("--sft", action="store_true", help="no RL: a work directory for --begin")
    parser.add_argument("--quick", action="store_true", help="one tiny step of each stage")
    arguments = parser.parse_intermixed_args()
    # a job that a shell started in the background ignores it, its children would too, and no run would be stopped
    signal.signal(signal.SIGINT, signal.default_int_handler)
    begin = arguments.begin
    source = [f"checkpoint={json.dumps(str(arguments.model.absolute()))}"]
    if begin is not None:
        source = start_settings(*sft_version(begin))
    settings = [*source, *(QUICK if arguments.quick else []), *arguments.settings]
    if begin is not None:
        settings = [each for each in settings if not each.startswith("stages.sft.")]
    config = prepare(arguments.data, arguments.work, settings, begin)
    bench = Bench(config, arguments.work, settings, arguments.seconds, begin, arguments.sft)
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
