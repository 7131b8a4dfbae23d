"""A run's events, summed up: what `report.json` says.

Keys are stable; a figure that a run did not produce is null. Rates are shares of one, times are seconds, sizes bytes.

    format                     2; raised when a key changes its meaning
    name, seed, seconds        of the run; seconds is wall time without the time it was stopped
    solve_rate_before, _after  held-out tasks, sampled, mid-trained model and trained one; `*_interval` is [low, high]
    gain, gain_interval        after minus before: paired by task where the evaluation recorded outcomes by task
    evals                      one entry per label, split and mode: solved, attempts, rate, low, high, version, seconds;
                               reward (mean), reward_low, reward_high; solved_once (in k attempts, share of tasks), k;
                               stage; oldest, newest (version that sampled a token): while training, engines move on
    gains                      one entry per split and mode that has both before and after: gain, low, high
    phases                     seconds by phase
    training                   steps, version, groups, trajectories, tokens, trained_tokens, masked_stale, seconds,
                               wait_seconds, due_seconds, tokens_per_s; reward_first, reward_last, solve_rate_first,
                               solve_rate_last are means of the first and last tenth of steps
    midtraining                of mid-training and SFT: steps, tokens, loss_first, loss_last
    heldout_losses             one entry per stage and source: first, last loss on documents that are never trained on
    rollouts                   total, graded, failed, by split; turns, tool_calls, bad_tool_calls, seconds (means)
    environments               of a run with several, by name, of its training rollouts: groups, share (of all groups),
                               total, graded, solve_rate, reward, turns, tokens, seconds (means of graded ones)
    staleness                  mean, max, counts (trained tokens by versions behind)
    mismatch                   k1, k3, p99, max of the trainer's log-probs against the engine's on the same weights:
                               mean and worst step; tokens measured, left_out (those that could not be, by reason);
                               by_form: the same for engines of other forms, against the version in the trainer's
    drift                      the same figures for the weights trained from, which are newer than those that sampled:
                               how far the policy had moved; mask_fraction, ess, router_flip_rate (means)
    weights                    of the trained line: versions, snapshots, deltas (a snapshot may have one too); means of
                               full_bytes, delta_bytes, delta_ratio, density (share of changed values), publish_seconds
    engines                    by name: region, switches, switches_in_flight, pause_seconds (mean, max), time_to_engine
                               (mean, max), bytes, tokens_per_s
    pauses, restarts           count and total seconds of weight switches; processes that had to be started again
    living                     what users taught it (living.py); null without a cycle of real-time RL: cycles,
                               moves, gate and canary; conversations, contexts (mean per conversation), window;
                               second_act (a model of its own); if true acceptance was measured: users ("simulated"),
                               population, measured, before, after, gain
    loans                      engines that production lent to training since its service started; null without any:
                               loans, open (lent now), lent_seconds (of those that are over), returns (that were
                               asked for), return_seconds (mean, max), limit_seconds (declared), late
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rollmill.evals.statistics import Interval, clustered_difference, combine, wilson

Event = Mapping[str, Any]
Outcomes = tuple[tuple[str, tuple[bool, ...]], ...]  # by task: whether each attempt solved it
FORMAT = 2
_OF_EVAL = (
    *("label", "split", "mode", "solved", "attempts", "version", "seconds"),
    *("reward", "reward_low", "reward_high", "k", "solved_once", "stage", "oldest", "newest"),
)


@dataclass(frozen=True)
class RunEvents:
    """The events of a run by kind, in time order. A step that ran again after a crash is here once."""

    all: Sequence[Event]
    steps: Sequence[Event]
    midtrain: Sequence[Event]
    heldout: Sequence[Event]
    publishes: Sequence[Event]
    applies: Sequence[Event]
    engines: Sequence[Event]
    rollouts: Sequence[Event]
    evals: Sequence[Event]
    phases: Sequence[Event]
    busy: Sequence[Event]
    restarts: Sequence[Event]

    @staticmethod
    def of(events: Sequence[Event]) -> RunEvents:
        kinds: dict[str, list[Event]] = {}
        for event in events:
            kinds.setdefault(str(event["kind"]), []).append(event)

        def once(kind: str, *keys: str) -> list[Event]:
            latest = {tuple(event.get(key) for key in keys): event for event in kinds.get(kind, [])}
            return list(latest.values())

        return RunEvents(
            all=events,
            steps=_numbered_through(once("step", "stage", "step")),
            midtrain=once("document_step", "stage", "step"),
            heldout=once("heldout_loss", "stage", "source", "step"),
            publishes=once("publish", "line", "version"),
            applies=kinds.get("apply", []),
            engines=kinds.get("engine", []),
            rollouts=once("rollout", "trajectory"),
            evals=once("eval", "label", "split", "mode"),
            phases=kinds.get("phase", []),
            busy=kinds.get("busy", []),
            restarts=kinds.get("restart", []),
        )

    @property
    def span(self) -> tuple[float, float]:
        return (self.all[0]["at"], self.all[-1]["at"]) if self.all else (0.0, 0.0)

    def phase_spans(self) -> list[tuple[str, float, float]]:
        """(phase, start, end); a phase without an end lasts until the last event."""
        spans: list[tuple[str, float, float]] = []
        started: dict[str, float] = {}
        for event in self.phases:
            name = str(event.get("phase"))
            if event.get("state") == "start":
                started[name] = event["at"]
            elif name in started:
                spans.append((name, started.pop(name), event["at"]))
        spans.extend((name, start, self.span[1]) for name, start in started.items())
        return sorted(spans, key=lambda span: span[1])

    @property
    def paused(self) -> float:
        """Seconds in which the run was stopped: the largest gap without events before a phase that starts once more,
        or that starts while none is open."""
        paused, ended, started = 0.0, math.inf, dict[str, float]()
        for event in self.phases:
            name, at = str(event.get("phase")), event["at"]
            if event.get("state") != "start":
                started.pop(name, None)
                ended = at
                continue
            since = started.get(name, math.inf if started else ended)
            times = [one["at"] for one in self.all if since <= one["at"] <= at]
            paused += max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)
            started[name] = at
        return paused


def _numbered_through(steps: Sequence[Event]) -> list[Event]:
    """The steps of all stages in order. The numbers of a second stage continue those of the first."""
    found: list[Event] = []
    for stage in dict.fromkeys(step.get("stage") for step in sorted(steps, key=lambda step: step["at"])):
        before = finite(found[-1].get("step"), 0.0) if found else 0
        own = ({**step, "step": before + finite(step.get("step"), 0.0)} for step in steps if step.get("stage") == stage)
        found += sorted(own, key=lambda step: step["step"])
    return found


def finite(value: Any, otherwise: float = math.nan) -> float:
    """`value` as a number, or `otherwise`. Events come from files, so `value` may be anything."""
    number = float(value) if isinstance(value, int | float) else math.nan
    return number if math.isfinite(number) else otherwise


def column(events: Iterable[Event], key: str) -> list[float]:
    return [number for number in (finite(event.get(key)) for event in events) if not math.isnan(number)]


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def rate_of(result: Event) -> Interval:
    """An evaluation's rate with the interval it came with, or Wilson's if it came without."""
    value, low, high = (finite(result.get(key)) for key in ("rate", "low", "high"))
    if any(map(math.isnan, (value, low, high))):
        return wilson(int(finite(result.get("solved"), 0)), int(finite(result.get("attempts"), 0)))
    return Interval(value, low, high)


def gain_of(before: Event, after: Event) -> Interval:
    """Paired by task where both evaluations say how each task went, else from the two intervals."""
    if isinstance(before.get("by_task"), Mapping) and isinstance(after.get("by_task"), Mapping):
        return _paired(
            *(tuple((task, tuple(each)) for task, each in one["by_task"].items()) for one in (before, after))
        )
    return combine(rate_of(before), rate_of(after))


@lru_cache(64)  # it resamples, and every figure that shows a gain asks for it
def _paired(before: Outcomes, after: Outcomes) -> Interval:
    return clustered_difference(dict(before), dict(after))


def find_eval(run: RunEvents, label: str, split: str = "heldout", mode: str = "sampled") -> Event | None:
    wanted = (label, split, mode)
    return next((one for one in run.evals if (one.get("label"), one.get("split"), one.get("mode")) == wanted), None)


def figures(run: RunEvents, *, name: str, seed: int | None) -> dict[str, Any]:
    start, end = run.span
    before, after = find_eval(run, "before"), find_eval(run, "after")
    gain = gain_of(before, after) if before and after else None
    tree = {
        "format": FORMAT,
        "name": name,
        "seed": seed,
        "seconds": end - start - run.paused,
        **_rate("solve_rate_before", before),
        **_rate("solve_rate_after", after),
        "gain": gain.value if gain else None,
        "gain_interval": [gain.low, gain.high] if gain else None,
        "evals": [_eval(result) for result in run.evals],
        "gains": _gains(run),
        "phases": _phases(run),
        "training": _training(run.steps),
        "midtraining": _midtraining(run.midtrain),
        "heldout_losses": _heldout(run.heldout),
        "rollouts": _rollouts(run.rollouts),
        "environments": _environments(run.rollouts),
        "staleness": _staleness(run.steps),
        "mismatch": _mismatch(run.steps),
        "drift": _drift(run.steps),
        "weights": _weights([one for one in run.publishes if one.get("line") == trained_line(run)]),
        "engines": _engines(run),
        "pauses": {"count": len(run.applies), "seconds": sum(column(run.applies, "pause_seconds"))},
        "restarts": len(run.restarts),
    }
    return without_nan(tree)


def delta_bytes(publish: Event) -> float:
    """The bytes that an engine one version behind has to fetch; NaN if the version has no delta."""
    if publish.get("encoding") == "delta":
        return finite(publish.get("delta_bytes"), finite(publish.get("bytes")))
    return finite(publish.get("delta_bytes"))  # a snapshot may come with a delta beside it


def trained_line(run: RunEvents) -> Any:
    """The line of weights that training wrote last. A run may also have published a base line before it."""
    newest = max(run.publishes, key=lambda publish: publish["at"], default=None)
    return newest.get("line") if newest else None


def _rate(key: str, result: Event | None) -> dict[str, Any]:
    if result is None:
        return {key: None, f"{key}_interval": None}
    rate = rate_of(result)
    return {key: rate.value, f"{key}_interval": [rate.low, rate.high]}


def _eval(result: Event) -> dict[str, Any]:
    rate = rate_of(result)
    kept = {key: result.get(key) for key in _OF_EVAL}
    return {**kept, "rate": rate.value, "low": rate.low, "high": rate.high}


def _gains(run: RunEvents) -> list[dict[str, Any]]:
    gains = []
    for before in run.evals:
        after = find_eval(run, "after", str(before.get("split")), str(before.get("mode")))
        if before.get("label") == "before" and after is not None:
            gain = gain_of(before, after)
            place = {"split": before.get("split"), "mode": before.get("mode")}
            gains.append({**place, "gain": gain.value, "low": gain.low, "high": gain.high})
    return gains


def _phases(run: RunEvents) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for name, start, end in run.phase_spans():
        seconds[name] = seconds.get(name, 0.0) + end - start
    return seconds


def _training(steps: Sequence[Event]) -> dict[str, Any]:
    tenth = max(1, len(steps) // 10)
    first, last = steps[:tenth], steps[-tenth:]
    seconds = sum(column(steps, "seconds"))
    totals = ("groups", "trajectories", "tokens", "trained_tokens", "masked_stale")
    return {
        "steps": len(steps),
        "version": steps[-1].get("version") if steps else None,
        **{key: sum(column(steps, key)) for key in totals},
        "reward_first": mean(column(first, "reward_mean")),
        "reward_last": mean(column(last, "reward_mean")),
        "solve_rate_first": mean(column(first, "solve_rate")),
        "solve_rate_last": mean(column(last, "solve_rate")),
        "seconds": seconds,
        "wait_seconds": sum(column(steps, "wait_seconds")),
        "due_seconds": sum(column(steps, "due_seconds")),
        "tokens_per_s": sum(column(steps, "tokens")) / seconds if seconds else None,
    }


def _midtraining(steps: Sequence[Event]) -> dict[str, Any]:
    losses = column(steps, "loss")
    tenth = max(1, len(losses) // 10)
    return {
        "steps": sum(max(map(int, column(own, "step")), default=0) for own in by_field(steps, "stage").values()),
        "tokens": sum(column(steps, "tokens")),
        "loss_first": mean(losses[:tenth]),
        "loss_last": mean(losses[-tenth:]),
    }


def by_field(events: Sequence[Event], name: str) -> dict[str, list[Event]]:
    """Events by the value of a field; "" for those that lack it."""
    found: dict[str, list[Event]] = {}
    for event in events:
        found.setdefault(str(event.get(name) or ""), []).append(event)
    return found


def _heldout(losses: Sequence[Event]) -> list[dict[str, Any]]:
    return [
        {"stage": stage, "source": source, "first": own[0].get("loss"), "last": own[-1].get("loss")}
        for stage, of_stage in by_field(losses, "stage").items()
        for source, own in by_field(of_stage, "source").items()
    ]


def _rollouts(rollouts: Sequence[Event]) -> dict[str, Any]:
    states = Counter(str(rollout.get("state")) for rollout in rollouts)
    averaged = ("turns", "tool_calls", "bad_tool_calls", "tokens", "seconds")
    return {
        "total": len(rollouts),
        "graded": states["graded"],
        "failed": states["failed"],
        "by_split": dict(Counter(str(rollout.get("split")) for rollout in rollouts)),
        **{key: mean(column(rollouts, key)) for key in averaged},
    }


def _environments(rollouts: Sequence[Event]) -> dict[str, dict[str, Any]]:
    played = [rollout for rollout in rollouts if rollout.get("environment") and rollout.get("split") == "train"]
    all_groups = len({rollout.get("group") for rollout in played})
    found = {}
    for name, own in sorted(by_field(played, "environment").items()):
        groups, graded = (
            len({rollout.get("group") for rollout in own}),
            [one for one in own if one["state"] == "graded"],
        )
        solved = mean([float(bool(one.get("solved"))) for one in graded])
        means = {key: mean(column(graded, key)) for key in ("reward", "turns", "tokens", "seconds")}
        counts = {"groups": groups, "share": groups / all_groups, "total": len(own), "graded": len(graded)}
        found[name] = {**counts, "solve_rate": solved, **means}
    return found


def staleness_counts(step: Event) -> dict[int, float]:
    counts = step.get("staleness_counts")
    if not isinstance(counts, Mapping):
        return {}
    return {int(level): finite(count, 0.0) for level, count in counts.items() if str(level).isdigit()}


def _staleness(steps: Sequence[Event]) -> dict[str, Any]:
    counts: Counter[int] = Counter()
    for step in steps:
        counts.update({level: int(count) for level, count in staleness_counts(step).items()})
    total = sum(counts.values())
    return {
        "mean": sum(level * count for level, count in counts.items()) / total if total else None,
        "max": max(column(steps, "staleness_max"), default=None),
        "counts": {str(level): counts[level] for level in sorted(counts)},
    }


def _mismatch(steps: Sequence[Event]) -> dict[str, Any]:
    left_out: Counter[str] = Counter()
    for step in steps:
        reasons = step.get("mismatch_left_out")
        if isinstance(reasons, Mapping):
            left_out.update({str(reason): int(finite(count, 0.0)) for reason, count in reasons.items()})
    tokens = int(sum(column(steps, "mismatch_tokens")))
    forms = _by_form(steps)
    return {
        **_distance(steps, "mismatch"),
        "tokens": tokens,
        "left_out": dict(left_out),
        **({"by_form": forms} if forms else {}),
    }


def _by_form(steps: Sequence[Event]) -> dict[str, dict[str, Any]]:
    """The same for engines of other forms than the trainer's, against the trainer's form."""
    found: dict[str, list[Event]] = {}
    for step in steps:
        forms = step.get("mismatch_by_form")
        for form, figures in forms.items() if isinstance(forms, Mapping) else ():
            if isinstance(figures, Mapping):
                found.setdefault(str(form), []).append({f"mismatch_{key}": value for key, value in figures.items()})
    return {
        form: {**_distance(each, "mismatch"), "tokens": int(sum(column(each, "mismatch_tokens")))}
        for form, each in sorted(found.items())
    }


def _drift(steps: Sequence[Event]) -> dict[str, Any]:
    means = {key: mean(column(steps, key)) for key in ("mask_fraction", "ess", "router_flip_rate")}
    return {**_distance(steps, "drift"), **means}


def _distance(steps: Sequence[Event], name: str) -> dict[str, Any]:
    tree = {}
    for key in ("k1", "k3", "p99", "max"):
        values = column(steps, f"{name}_{key}")
        tree[key] = {"mean": mean(values), "worst": max(values, key=abs, default=None)}
    return tree


def _weights(publishes: Sequence[Event]) -> dict[str, Any]:
    deltas = [publish for publish in publishes if not math.isnan(delta_bytes(publish))]
    full, delta = mean(column(deltas or publishes, "full_bytes")), mean([delta_bytes(publish) for publish in deltas])
    return {
        "versions": len(publishes),
        "snapshots": sum(publish.get("encoding") == "snapshot" for publish in publishes),
        "deltas": len(deltas),
        "full_bytes": full,
        "delta_bytes": delta,
        "delta_ratio": delta / full if delta is not None and full else None,
        "density": mean(column(deltas, "density")),
        "publish_seconds": mean(column(publishes, "seconds")),
    }


def _engines(run: RunEvents) -> dict[str, Any]:
    names = sorted({str(event["engine"]) for event in (*run.applies, *run.engines) if "engine" in event})
    tree = {}
    for name in names:
        applies = [event for event in run.applies if event.get("engine") == name]
        active = [event for event in run.engines if event.get("engine") == name and finite(event.get("running"), 0) > 0]
        regions = [event["region"] for event in (*applies, *active) if "region" in event]
        tree[name] = {
            "region": regions[-1] if regions else None,
            "switches": len(applies),
            "switches_in_flight": sum(finite(event.get("running"), 0) > 0 for event in applies),
            "pause_seconds": _spread(column(applies, "pause_seconds")),
            "time_to_engine": _spread(column(applies, "since_publish_seconds")),
            "bytes": sum(column(applies, "bytes")),
            "tokens_per_s": mean(column(active, "tokens_per_s")),
        }
    return tree


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    return {"mean": mean(values), "max": max(values, default=None)}


def without_nan(tree: Any) -> Any:
    """JSON has no NaN; a figure that could not be computed is null."""
    if isinstance(tree, dict):
        return {key: without_nan(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [without_nan(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree
