"""What `benchmarks.mbpp` and `benchmarks.mbpp_trl` print and count: events as lines, measurements, pace, curves."""

from __future__ import annotations

import collections
import itertools
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollmill.evals.statistics import Interval, clustered_difference, clustered_interval

Event = dict[str, Any]
WINDOW = 1024  # samples that a point of a reward curve is the mean of
LEVELS = (0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15)
_TICKS = 100.0  # of /proc/PID/stat, per second


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


class RoleTimes:
    """Processor time of a run's roles. Linux only; elsewhere there are no figures."""

    def __init__(self, run: Path) -> None:
        self._run = run.absolute()
        self._first: dict[str, tuple[float, float]] = {}  # role → time, processor seconds
        self._last: dict[str, tuple[float, float]] = {}

    def look(self) -> None:
        for role, seconds in self._seconds().items():
            self._last[role] = time.time(), seconds
            self._first.setdefault(role, self._last[role])

    def figures(self) -> dict[str, float]:
        """The cores that each role kept busy."""
        found = {}
        for role, (end, seconds) in self._last.items():
            begin, before = self._first[role]
            if end > begin:
                found[f"cores_{role.replace('-', '_')}"] = (seconds - before) / (end - begin)
        return found

    def _seconds(self) -> dict[str, float]:
        found: dict[str, float] = {}
        parents: dict[int, str] = {}
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                title = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").split()
                fields = (directory / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            if title[:1] == ["rollmill"] and len(title) > 2 and Path(title[2]).absolute() == self._run:
                found[title[1]] = found.get(title[1], 0.0) + sum(map(int, fields[11:13])) / _TICKS
                parents[int(directory.name)] = title[1]
        return found | self._machines(parents)

    def _machines(self, parents: Mapping[int, str]) -> dict[str, float]:
        """Machine hosts are children of dispatchers. Their own time counts, and that of machines that have ended."""
        total = 0.0
        for pid, role in parents.items():
            if not role.startswith("dispatcher"):
                continue
            try:
                children = itertools.chain.from_iterable(
                    file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children")
                )
                for child in children:
                    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                    total += sum(map(int, fields[11:15])) / _TICKS
            except OSError:
                continue
        return {"machines": total} if total else {}
