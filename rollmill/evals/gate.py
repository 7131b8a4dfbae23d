"""The gate: may a candidate become live? Candidate and live make the same attempts at the same tasks; this compares.

    metric              what                                       compared as    bound
    quality             solve rate, or the mean reward             difference     at least −max_quality_loss
    yardstick           the same, against the pinned version       difference     at least −max_quality_loss
    pass@1              attempts that solved their task            difference     at least −max_quality_loss
    pass@k              tasks solved at least once in k attempts   difference     at least −max_pass_k_loss
    tokens_per_solved   tokens of all attempts per solved one      ratio          at most 1 + max_more_tokens
    engine_seconds      seconds of engines per solved attempt      ratio          at most 1 + max_more_engine_seconds
    latency             seconds per attempt, of the agent's own    ratio          at most 1 + max_more_seconds
    malformed           tool calls that could not be run           difference     at most max_more_malformed
    questions           attempts that ended with a question        difference     at most max_more_questions
    bar                 the candidate's quality itself             value          at least offline_bar

Quality is the solve rate if every reward is 1 for a solved task and 0 otherwise: then pass@1 is the same and left out.
Else it is the mean reward, and costs are per attempt, because few attempts may solve anything.

A metric holds if its one-sided confidence bound (level 1 − alpha / looks) is within its bound: the attempts must show
that nothing got worse by more than that. Who is within all bounds by estimate and has not shown it gets more attempts,
up to the last look. With alpha = 0.5 the estimate decides alone, and chance decides close cases. One metric that fails
holds the candidate. A metric that is 0 / 0 for both versions is not measured: it never counts as passed, and without a
measured quality nothing is promoted.

Live alone would let many small losses add up. The yardstick is the best version that was ever promoted, or one that you
pin: so max_quality_loss is the budget of all promotions together. Another one is better if the whole interval says so:
by estimates, chance would soon replace the yardstick by a worse one.

Seconds of engines are those in which they computed: on GPUs, GPU-seconds. A version's attempts share them by tokens.
Seconds depend on what else a host does. So both kinds are compared only if both versions were measured at the same
time; otherwise they are left out, and the verdict says so. An attempt that the infrastructure lost counts as unsolved
for the candidate, with the least reward, and not at all for the other versions: a candidate cannot pass by losing the
attempts that it would fail.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rollmill.errors import RollmillError
from rollmill.evals.gate_config import BY_ESTIMATE, USUAL, GateConfig
from rollmill.evals.statistics import (
    POWER,
    Interval,
    clustered_difference,
    clustered_interval,
    clustered_ratio,
    cost,
    pass_at,
    seen,
)

if TYPE_CHECKING:
    from rollmill.evals.evaluation import Conduct

Attempts = Mapping[str, Sequence["Conduct"]]  # task id → its attempts
Measure = Callable[["Conduct"], float]


@dataclass(frozen=True)
class Metric:
    name: str
    live: float  # of the metric `yardstick`: the yardstick's quality
    candidate: float
    change: Interval  # of `compared`; of the bar: the candidate's quality
    compared: Literal["difference", "ratio", "value"]
    bound: float
    at_least: bool  # else: at most
    holds: bool | None  # None: not measured


@dataclass(frozen=True)
class GateVerdict:
    verdict: Literal["promote", "hold"]
    candidate: str
    live: str
    tasks: int
    attempts: int  # of the candidate
    metrics: tuple[Metric, ...]
    reasons: tuple[str, ...]  # of a hold: one per metric that fails; of a promotion: one line
    notes: tuple[str, ...] = ()  # what was left out, what the suite can see, and what counts as it does not seem to
    quality: str = "solve rate"  # or "mean reward"
    confidence: float = 0.9  # of the intervals; their ends are what decides, unless alpha is 0.5

    @property
    def promotes(self) -> bool:
        return self.verdict == "promote"

    def describe(self) -> dict[str, Any]:
        """As JSON. A number that is not finite is null."""
        text = json.dumps(asdict(self))
        tree: dict[str, Any] = json.loads(text, parse_constant=lambda _: None)
        return tree


def judge(
    live: Attempts,
    candidate: Attempts,
    config: GateConfig,
    names: tuple[str, str],
    *,
    beside: bool = True,
    yardstick: tuple[str, Attempts] | None = None,
) -> GateVerdict:
    """Compare the attempts at the tasks that both have. `names`: what live and candidate are called; the first live
    version is compared with itself, and only its bar decides. `beside`: they were measured at the same time.
    `yardstick`: a third version, if it is another one."""
    sides = _Sides.of(live, candidate, config)
    pinned = _Sides.of(yardstick[1], candidate, config) if yardstick else None
    metrics = [sides.bar()]
    if names[0] != names[1]:
        compared = [sides.quality("quality"), *([pinned.quality("yardstick")] if pinned else [])]
        metrics = [*compared, *sides.solving(), *sides.costs(beside), *sides.behaviour(), *metrics]
    failing = [_why(metric, sides) for metric in metrics if metric.holds is False]
    if not sides.earned():
        failing.insert(0, "quality was not measured: no attempt of either version earned a reward")
    if len(sides.tasks) < config.least_tasks:
        failing.append(f"{len(sides.tasks)} tasks are too few to decide: gate.least_tasks is {config.least_tasks}")
    attempts = sum(map(len, sides.tried))
    passed = sum(metric.holds is True for metric in metrics)
    said = f"all {passed} measured metrics are within their bounds on {len(sides.tasks)} tasks, {attempts} attempts"
    return GateVerdict(
        "hold" if failing else "promote",
        names[1],
        names[0],
        len(sides.tasks),
        attempts,
        tuple(metrics),
        tuple(failing) or (said,),
        (*_notes(sides, metrics, names, beside, yardstick), *_lost(live, sides.tried, names)),
        sides.kind,
        sides.confidence,
    )


def surely_better(known: Attempts, other: Attempts) -> bool:
    """Whether `other` has more quality than `known`, over the whole interval."""
    sides = _Sides.of(known, other, GateConfig())
    return clustered_difference(*sides.rewards(), sides.confidence).low > 0


@dataclass(frozen=True)
class _Sides:
    """The attempts of two versions at the tasks that both have."""

    tasks: Sequence[str]
    before: Sequence[Sequence[Conduct]]  # of live; what the infrastructure lost is left out
    tried: Sequence[Sequence[Conduct]]  # of the candidate, lost ones too
    after: Sequence[Sequence[Conduct]]  # of the candidate, without them
    config: GateConfig

    @classmethod
    def of(cls, live: Attempts, candidate: Attempts, config: GateConfig) -> _Sides:
        known = {task: [each for each in attempts if not each.lost] for task, attempts in live.items()}
        tasks = sorted(task for task in known.keys() & candidate.keys() if known[task] and candidate[task])
        if not tasks:
            raise RollmillError("the gate has no task that both versions attempted", hint="raise evals.tasks")
        tried = [candidate[task] for task in tasks]
        after = [[each for each in attempts if not each.lost] for attempts in tried]
        return cls(tasks, [known[task] for task in tasks], tried, after, config)

    @property
    def confidence(self) -> float:
        """Two-sided, so that each end is a one-sided bound of 1 − alpha, which the looks share."""
        return 1 - 2 * (USUAL if self.config.alpha == BY_ESTIMATE else self.config.alpha / self.config.looks)

    @cached_property
    def kind(self) -> Literal["solve rate", "mean reward"]:
        every = (each for side in (self.before, self.after) for attempts in side for each in attempts)
        return "solve rate" if all(each.earned == each.solved for each in every) else "mean reward"

    def rewards(self) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        known = [each.earned for side in (self.before, self.after) for attempts in side for each in attempts]
        least = min(0.0, *known)
        before, after = (
            [[least if each.lost else each.earned for each in attempts] for attempts in side]
            for side in (self.before, self.tried)
        )
        return dict(zip(self.tasks, before, strict=True)), dict(zip(self.tasks, after, strict=True))

    def earned(self) -> bool:
        return any(value for side in self.rewards() for values in side.values() for value in values)

    def quality(self, name: str) -> Metric:
        return self._difference(name, self.rewards(), -self.config.max_quality_loss, at_least=True)

    def solving(self) -> list[Metric]:
        """What is solved in one attempt, and in several."""
        solved = [
            {task: [each.solved for each in attempts] for task, attempts in zip(self.tasks, side, strict=True)}
            for side in (self.before, self.tried)
        ]
        k = min(len(outcomes) for side in solved for outcomes in side.values())
        found = []
        if self.kind == "mean reward":
            found.append(self._difference("pass@1", solved, -self.config.max_quality_loss, at_least=True))
        if k > 1:
            several = [{task: [pass_at(k, outcomes)] for task, outcomes in side.items()} for side in solved]
            found.append(self._difference(f"pass@{k}", several, -self.config.max_pass_k_loss, at_least=True))
        return found

    def costs(self, beside: bool) -> list[Metric]:
        config, graded = self.config, self.kind == "mean reward"
        per: Measure = (lambda each: 1) if graded else (lambda each: each.solved)
        tokens = "tokens_per_attempt" if graded else "tokens_per_solved"
        found = [self._ratio(tokens, lambda each: each.tokens, per, 1 + config.max_more_tokens)]
        if beside and self.told():
            more = 1 + config.max_more_engine_seconds
            found.append(self._ratio("engine_seconds", lambda each: each.engine_seconds, per, more))
        if beside:
            more = 1 + config.max_more_seconds
            found.append(self._ratio("latency", lambda each: each.seconds, lambda each: 1, more))
        return found

    def told(self) -> bool:
        """Whether both sides know how long their engines computed."""
        return all(any(each.engine_seconds for of in side for each in of) for side in (self.before, self.after))

    def behaviour(self) -> list[Metric]:
        """Behaviour is more the version's than the task's: here each attempt counts, not each task."""
        calls, ends = (
            [
                {
                    f"{task} {number}": marks(each)
                    for task, of in zip(self.tasks, side, strict=True)
                    for number, each in enumerate(of)
                }
                for side in (self.before, self.after)
            ]
            for marks in (_calls, _asked)
        )
        return [
            self._difference("malformed", calls, self.config.max_more_malformed, empty=True),
            self._difference("questions", ends, self.config.max_more_questions, empty=True),
        ]

    def bar(self) -> Metric:
        live, candidate = (clustered_interval(list(side.values()), self.confidence) for side in self.rewards())
        bound = -math.inf if self.config.offline_bar is None else self.config.offline_bar
        holds = self._holds(candidate, bound, True)
        return Metric("bar", live.value, candidate.value, candidate, "value", bound, True, holds)

    def _difference(
        self,
        name: str,
        sides: Sequence[Mapping[str, Sequence[float]]],
        bound: float,
        *,
        at_least: bool = False,
        empty: bool = False,
    ) -> Metric:
        """`empty`: none at all is good, and was measured. Otherwise 0 for both versions says nothing."""
        before, after = sides
        first, second = (_mean(side) for side in (before, after))
        change = clustered_difference(before, after, self.confidence)
        measured = any(map(any, (*before.values(), *after.values()))) or (empty and not math.isnan(change.value))
        holds = self._holds(change, bound, at_least) if measured else None
        return Metric(name, first, second, change, "difference", bound, at_least, holds)

    def _ratio(self, name: str, over: Measure, under: Measure, bound: float) -> Metric:
        first_T2, second_T2 = (
            np.array([[sum(map(over, attempts)), sum(map(under, attempts))] for attempts in side], np.float64)
            for side in (self.before, self.after)
        )
        change = clustered_ratio(first_T2, second_T2, self.confidence)
        holds = None if math.isnan(change.value) else self._holds(change, bound, False)
        return Metric(name, cost(first_T2), cost(second_T2), change, "ratio", bound, False, holds)

    def _holds(self, change: Interval, bound: float, at_least: bool) -> bool:
        proof = self.config.alpha < BY_ESTIMATE
        if at_least:
            return bool((change.low if proof else change.value) >= bound)
        return bool((change.high if proof else change.value) <= bound)


def _notes(
    sides: _Sides,
    metrics: Sequence[Metric],
    names: tuple[str, str],
    beside: bool,
    yardstick: tuple[str, Attempts] | None,
) -> list[str]:
    if names[0] == names[1]:
        return [f"{names[1]} is compared with nothing: only the bar decides"]
    notes = ["quality is the mean reward"] if sides.kind == "mean reward" else []
    notes += [f"the yardstick is {yardstick[0]}"] if yardstick else []
    quality = metrics[0]
    if quality.holds is not None:
        wanted, tasks = sides.config.max_quality_loss, len(sides.tasks)
        loss = seen(quality.change.value - quality.change.low, sides.confidence, tasks - 1)
        more = f"; for {wanted:.3g} it takes about {math.ceil(tasks * (loss / wanted) ** 2)} tasks" if wanted else ""
        notes.append(
            f"this suite can see a loss of quality of {loss:.3f}, {100 * POWER:.0f} times in 100"
            f"{more if loss > wanted else ''}"
        )
    notes += [f"{metric.name} is not measured: 0 / 0 for both" for metric in metrics if metric.holds is None]
    if sides.config.alpha == BY_ESTIMATE:
        notes.append("alpha is 0.5: estimates decide, and nothing is proved")
    if not beside:
        same = f"{names[0]} and {names[1]} were not measured at the same time"
        notes.append(f"latency and seconds of engines are left out: {same}")
    elif not sides.told():
        notes.append("seconds of engines are left out: not all engines told how long they computed")
    return notes


def _lost(live: Attempts, tried: Sequence[Sequence[Conduct]], names: tuple[str, str]) -> tuple[str, ...]:
    notes = []
    lost = sum(each.lost for attempts in tried for each in attempts)
    if lost:
        notes.append(f"{lost} attempts of {names[1]} were lost by the infrastructure and count as unsolved")
    lost = sum(each.lost for attempts in live.values() for each in attempts)
    if lost:
        notes.append(f"{lost} attempts of {names[0]} were lost by the infrastructure and do not count")
    return tuple(notes)


def _calls(attempt: Conduct) -> list[float]:
    return [1.0] * attempt.malformed + [0.0] * (attempt.calls - attempt.malformed)


def _asked(attempt: Conduct) -> list[float]:
    return [float(attempt.asked)]


def _mean(tasks: Mapping[str, Sequence[float]]) -> float:
    values = [value for of in tasks.values() for value in of]
    return sum(values) / len(values) if values else math.nan


def _why(metric: Metric, sides: _Sides) -> str:
    limit = f"{'at least' if metric.at_least else 'at most'} {metric.bound:.3g}"
    interval = f"{100 * sides.confidence:.0f} % interval {metric.change.low:.3g} to {metric.change.high:.3g}"
    against = "yardstick" if metric.name == "yardstick" else "live"
    was = f"{metric.live:.3g} {against}, {metric.candidate:.3g} candidate"
    what = sides.kind if metric.compared == "value" else metric.compared
    need = f"{what} {metric.change.value:.3g}, must be {limit}"
    proof = " over the whole interval" if sides.config.alpha < BY_ESTIMATE else ""
    return f"{metric.name}: {need}{proof} ({was}; {interval})"
