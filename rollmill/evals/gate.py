"""The gate: may a candidate become live? Candidate and live make the same attempts at the same tasks; this compares.

    metric              a rate                                     compared as    bound
    quality             attempts that solved their task            difference     at least −max_quality_loss
    tokens_per_solved   tokens of all attempts per solved one      ratio          at most 1 + max_more_tokens
    engine_seconds      seconds of engines per solved attempt      ratio          at most 1 + max_more_engine_seconds
    latency             seconds per attempt, of the agent's own    ratio          at most 1 + max_more_seconds
    malformed           tool calls that could not be run           difference     at most max_more_malformed
    questions           attempts that ended with a question        difference     at most max_more_questions
    bar                 the candidate's solve rate itself          value          at least offline_bar

A metric fails if its estimate is beyond its bound. With `strict`, it fails if its 95 % interval reaches beyond it: then
the attempts must prove that nothing got worse. One metric that fails holds the candidate. The interval resamples whole
tasks, and a task's own difficulty cancels out, because both versions meet it with the same draws.

Seconds of engines are those in which they computed: on GPUs, GPU-seconds. A version's attempts share them by tokens.
Seconds depend on what else a host does. So both kinds are compared only if both versions were measured at the same
time; otherwise they are left out, and the verdict says so. An attempt that the infrastructure lost counts as unsolved
for the candidate and not at all for the live version: a candidate cannot pass by losing the attempts that it would
fail.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from rollmill.config import Config
from rollmill.errors import RollmillError
from rollmill.evals.statistics import Interval, clustered_change, clustered_interval

if TYPE_CHECKING:
    from rollmill.evals.run import Conduct

Attempts = Mapping[str, Sequence["Conduct"]]  # task id → its attempts


class GateConfig(Config):
    """How much worse than the live version a candidate may be. A run that has this section refuses every version as
    `live` that has not passed."""

    offline_bar: float = Field(
        0.0, ge=0, le=1, description="Least solve rate of a live version, whatever the one before it reaches."
    )
    max_quality_loss: float = Field(
        0.03, ge=0, le=1, description="Most that the solve rate may fall, as an absolute difference."
    )
    max_more_tokens: float = Field(
        0.15, ge=0, description="Most that the tokens per solved task may rise, as a fraction."
    )
    max_more_engine_seconds: float = Field(
        0.5,
        ge=0,
        description="Most that the seconds in which engines compute, per solved task, may rise, as a fraction. On GPUs "
        "these are GPU-seconds.",
    )
    max_more_seconds: float = Field(0.5, ge=0, description="Most that the seconds per attempt may rise, as a fraction.")
    max_more_malformed: float = Field(
        0.02, ge=0, le=1, description="Most that the share of malformed tool calls may rise, as an absolute difference."
    )
    max_more_questions: float = Field(
        0.02, ge=0, le=1, description="Most that the share of attempts that end with a question may rise."
    )
    beside: bool = Field(
        True,
        description="Measure the live version again beside each candidate, on engines of its own, so that their "
        "seconds can be compared. Off: earlier attempts of the live version are used. That costs half, and then "
        "latency and seconds of engines decide nothing.",
    )
    strict: bool = Field(
        False,
        description="A bound holds only if the whole 95 % interval is within it. Safer, and needs far more attempts.",
    )


@dataclass(frozen=True)
class Metric:
    name: str
    live: float
    candidate: float
    change: Interval  # of `compared`; of the bar: the candidate's rate
    compared: Literal["difference", "ratio", "value"]
    bound: float
    at_least: bool  # else: at most
    holds: bool


@dataclass(frozen=True)
class GateVerdict:
    verdict: Literal["promote", "hold"]
    candidate: str
    live: str
    tasks: int
    attempts: int  # of the candidate
    metrics: tuple[Metric, ...]
    reasons: tuple[str, ...]  # of a hold: one per metric that fails; of a promotion: one line
    notes: tuple[str, ...] = ()  # what was left out, and what counts as it does not seem to

    @property
    def promotes(self) -> bool:
        return self.verdict == "promote"

    def describe(self) -> dict[str, Any]:
        """As JSON. A number that is not finite is null."""
        text = json.dumps(asdict(self))
        tree: dict[str, Any] = json.loads(text, parse_constant=lambda _: None)
        return tree


def judge(
    live: Attempts, candidate: Attempts, config: GateConfig, names: tuple[str, str], *, beside: bool = True
) -> GateVerdict:
    """Compare the attempts at the tasks that both have. `names`: what live and candidate are called. `beside`: they
    were measured at the same time."""
    known = {task: [each for each in attempts if not each.lost] for task, attempts in live.items()}
    shared = sorted(task for task in known.keys() & candidate.keys() if known[task] and candidate[task])
    if not shared:
        raise RollmillError("the gate has no task that both versions attempted", hint="raise evals.tasks")
    before, tried = [known[task] for task in shared], [candidate[task] for task in shared]
    after = [[each for each in attempts if not each.lost] for attempts in tried]
    told = all(any(each.engine_seconds for attempts in side for each in attempts) for side in (before, after))
    metrics = (
        _change("quality", before, tried, _solved, _count, config, -config.max_quality_loss, at_least=True),
        _change("tokens_per_solved", before, after, _tokens, _solved, config, 1 + config.max_more_tokens, ratio=True),
        *(_seconds_metrics(before, after, config, told) if beside else ()),
        _change("malformed", before, after, _malformed, _calls, config, config.max_more_malformed),
        _change("questions", before, after, _asked, _count, config, config.max_more_questions),
        _bar(before, tried, config),
    )
    failing = tuple(_why(metric, config.strict) for metric in metrics if not metric.holds)
    attempts = sum(map(len, tried))
    passed = f"all {len(metrics)} metrics are within their bounds on {len(shared)} tasks, {attempts} attempts"
    return GateVerdict(
        "hold" if failing else "promote",
        names[1],
        names[0],
        len(shared),
        attempts,
        metrics,
        failing or (passed,),
        (*_left_out(names, beside, told), *_lost(live, tried, names)),
    )


def _seconds_metrics(
    before: Sequence[Sequence[Conduct]], after: Sequence[Sequence[Conduct]], config: GateConfig, told: bool
) -> tuple[Metric, ...]:
    """`told`: both sides know how long their engines computed."""
    most, most_engine = 1 + config.max_more_seconds, 1 + config.max_more_engine_seconds
    latency = _change("latency", before, after, _seconds, _count, config, most, ratio=True)
    if not told:
        return (latency,)
    return _change("engine_seconds", before, after, _engine_seconds, _solved, config, most_engine, ratio=True), latency


def _left_out(names: tuple[str, str], beside: bool, told: bool) -> tuple[str, ...]:
    if not beside:
        same = f"{names[0]} and {names[1]} were not measured at the same time"
        return (f"latency and seconds of engines are left out: {same}",)
    return () if told else ("seconds of engines are left out: not all engines told how long they computed",)


def _lost(live: Attempts, tried: Sequence[Sequence[Conduct]], names: tuple[str, str]) -> tuple[str, ...]:
    notes = []
    lost = sum(each.lost for attempts in tried for each in attempts)
    if lost:
        notes.append(f"{lost} attempts of {names[1]} were lost by the infrastructure and count as unsolved")
    lost = sum(each.lost for attempts in live.values() for each in attempts)
    if lost:
        notes.append(f"{lost} attempts of {names[0]} were lost by the infrastructure and do not count")
    return tuple(notes)


def _solved(attempt: Conduct) -> float:
    return attempt.solved


def _count(attempt: Conduct) -> float:
    return 1.0


def _tokens(attempt: Conduct) -> float:
    return attempt.tokens


def _engine_seconds(attempt: Conduct) -> float:
    return attempt.engine_seconds


def _seconds(attempt: Conduct) -> float:
    return attempt.seconds


def _malformed(attempt: Conduct) -> float:
    return attempt.malformed


def _calls(attempt: Conduct) -> float:
    return attempt.calls


def _asked(attempt: Conduct) -> float:
    return attempt.asked


def _change(
    name: str,
    before: Sequence[Sequence[Conduct]],
    after: Sequence[Sequence[Conduct]],
    over: Callable[[Conduct], float],
    under: Callable[[Conduct], float],
    config: GateConfig,
    bound: float,
    *,
    ratio: bool = False,
    at_least: bool = False,
) -> Metric:
    first_T2, second_T2 = (
        np.array([[sum(map(over, attempts)), sum(map(under, attempts))] for attempts in tasks], np.float64)
        for tasks in (before, after)
    )
    change = clustered_change(first_T2, second_T2, relative=ratio)
    first, second = _rate(first_T2), _rate(second_T2)
    if math.isnan(change.value):  # 0 / 0: neither called a tool, or neither cost anything
        first, second = (0.0 if math.isnan(rate) else rate for rate in (first, second))
        neutral = 1.0 if ratio else second - first
        change = Interval(neutral, neutral, neutral)
    compared: Literal["ratio", "difference"] = "ratio" if ratio else "difference"
    holds = _holds(change, bound, at_least, config.strict)
    return Metric(name, first, second, change, compared, bound, at_least, holds)


def _bar(before: Sequence[Sequence[Conduct]], after: Sequence[Sequence[Conduct]], config: GateConfig) -> Metric:
    live, candidate = (
        clustered_interval([[attempt.solved for attempt in attempts] for attempts in tasks])
        for tasks in (before, after)
    )
    holds = _holds(candidate, config.offline_bar, True, config.strict)
    return Metric("bar", live.value, candidate.value, candidate, "value", config.offline_bar, True, holds)


def _rate(sums_T2: np.ndarray) -> float:
    over, under = sums_T2.sum(axis=0).tolist()
    return over / under if under else (math.inf if over else math.nan)


def _holds(change: Interval, bound: float, at_least: bool, strict: bool) -> bool:
    if at_least:
        return (change.low if strict else change.value) >= bound
    return (change.high if strict else change.value) <= bound


def _why(metric: Metric, strict: bool) -> str:
    limit = f"{'at least' if metric.at_least else 'at most'} {metric.bound:.3g}"
    interval = f"95 % interval {metric.change.low:.3g} to {metric.change.high:.3g}"
    was = f"{metric.live:.3g} live, {metric.candidate:.3g} candidate"
    what = "solve rate" if metric.compared == "value" else metric.compared
    need = f"{what} {metric.change.value:.3g}, must be {limit}{' over the whole interval' if strict else ''}"
    return f"{metric.name}: {need} ({was}; {interval})"
