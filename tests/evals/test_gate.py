"""The gate compares the attempts of two versions: what is worse than its bound holds the candidate, with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rollmill.errors import RollmillError
from rollmill.evals.gate import GateConfig, GateVerdict, Metric, judge
from rollmill.evals.run import Conduct
from rollmill.evals.statistics import clustered_change

NAMES = ("rl@1", "rl@2")
SOLVES = Conduct(solved=True, tokens=100, seconds=2.0, calls=4, malformed=0, asked=False, engine_seconds=0.4)


def attempts(
    rate: float, change: Callable[[Conduct], Conduct] = lambda one: one, seed: int = 3
) -> dict[str, list[Conduct]]:
    """50 tasks with 4 attempts each; a share of them is solved."""
    random = np.random.default_rng(seed)
    return {
        f"task-{task}": [change(replace(SOLVES, solved=bool(random.random() < rate))) for _ in range(4)]
        for task in range(50)
    }


def compare(candidate: dict[str, list[Conduct]], config: GateConfig | None = None) -> GateVerdict:
    return judge(attempts(0.6), candidate, config or GateConfig(), NAMES)


def named(verdict: GateVerdict, name: str) -> Metric:
    return next(metric for metric in verdict.metrics if metric.name == name)


def failing(verdict: GateVerdict) -> list[str]:
    return [metric.name for metric in verdict.metrics if not metric.holds]


def test_the_same_attempts_pass() -> None:
    verdict = compare(attempts(0.6))
    assert verdict.promotes and failing(verdict) == [] and (verdict.tasks, verdict.attempts) == (50, 200)
    quality = verdict.metrics[0]
    assert quality.change == (0.0, 0.0, 0.0) and quality.live == quality.candidate
    assert "all 7 metrics are within their bounds on 50 tasks" in verdict.reasons[0]


@pytest.mark.parametrize(
    ("change", "metric"),
    [
        (lambda one: replace(one, malformed=1), "malformed"),
        (lambda one: replace(one, asked=not one.solved), "questions"),
        (lambda one: replace(one, tokens=130), "tokens_per_solved"),
        (lambda one: replace(one, engine_seconds=0.7), "engine_seconds"),
        (lambda one: replace(one, seconds=3.2), "latency"),
    ],
)
def test_behaviour_alone_holds_a_candidate_that_solves_as_much(
    change: Callable[[Conduct], Conduct], metric: str
) -> None:
    verdict = compare(attempts(0.6, change))
    assert (verdict.verdict, failing(verdict)) == ("hold", [metric])
    assert verdict.reasons[0].startswith(f"{metric}: ") and "live" in verdict.reasons[0]


def test_a_lower_solve_rate_holds() -> None:
    assert "quality" in failing(compare(attempts(0.4)))
    verdict = compare(attempts(0.0))
    assert "quality" in failing(verdict) and "tokens_per_solved" in failing(verdict)
    assert math.isinf(verdict.metrics[1].candidate)


def test_below_the_bar_nothing_passes_however_bad_live_is() -> None:
    live, config = attempts(0.1), GateConfig(offline_bar=0.5)
    verdict = judge(live, attempts(0.3), config, NAMES)
    assert failing(verdict) == ["bar"] and "solve rate" in verdict.reasons[0]
    assert judge(live, attempts(0.7), config, NAMES).promotes


def test_a_strict_gate_wants_proof() -> None:
    """A candidate that seems a little better is within the bound; its interval is not."""
    slightly = attempts(0.65, seed=4)
    assert "quality" not in failing(compare(slightly))
    assert "quality" in failing(compare(slightly, GateConfig(strict=True, max_quality_loss=0.0)))
    better = compare(attempts(0.95, seed=4), GateConfig(strict=True, max_quality_loss=0.0))
    assert "quality" not in failing(better) and better.metrics[0].change.low > 0


def test_seconds_count_only_if_both_were_measured_at_the_same_time() -> None:
    slow = attempts(0.6, lambda one: replace(one, seconds=10.0, engine_seconds=2.0))
    assert failing(compare(slow)) == ["engine_seconds", "latency"]
    verdict = judge(attempts(0.6), slow, GateConfig(), NAMES, beside=False)
    assert verdict.promotes and "latency" not in [metric.name for metric in verdict.metrics]
    assert "all 5 metrics" in verdict.reasons[0]
    why = "latency and seconds of engines are left out: rl@1 and rl@2 were not measured at the same time"
    assert verdict.notes == (why,) and verdict.describe()["notes"] == [why]


def test_engine_seconds_are_per_solved_task() -> None:
    """Half the seconds per attempt at a third of the solve rate is more per solved task."""
    wide = GateConfig(max_quality_loss=1.0, max_more_tokens=10.0)
    live = {f"task-{task}": [replace(SOLVES, solved=task % 10 < 6)] for task in range(50)}
    candidate = {task: [replace(SOLVES, solved=int(task[5:]) % 10 < 2, engine_seconds=0.2)] for task in live}
    verdict = judge(live, candidate, wide, NAMES)
    metric = named(verdict, "engine_seconds")
    assert (metric.live, metric.candidate) == (pytest.approx(0.4 / 0.6), pytest.approx(0.2 / 0.2))
    assert metric.change.value == pytest.approx(1.5)
    assert "engine_seconds" in failing(judge(live, candidate, GateConfig(max_more_engine_seconds=0.4), NAMES))


@pytest.mark.parametrize("side", [0, 1])
def test_engines_that_do_not_tell_their_seconds_hold_nobody(side: int) -> None:
    """For example attempts that an older release has measured."""
    sides = [attempts(0.6), attempts(0.6)]
    sides[side] = attempts(0.6, lambda one: replace(one, engine_seconds=0.0))
    verdict = judge(sides[0], sides[1], GateConfig(), NAMES)
    assert verdict.promotes and "all 6 metrics" in verdict.reasons[0]
    assert verdict.notes == ("seconds of engines are left out: not all engines told how long they computed",)


def test_attempts_that_the_candidate_lost_are_unsolved() -> None:
    """It solves what it does not lose: without the lost ones, it would seem better than the live version."""
    lost = Conduct(False, 0, 0.0, 0, 0, False, lost=True)
    losing = attempts(0.6, lambda one: one if one.solved else lost)
    verdict = compare(losing)
    quality = verdict.metrics[0]
    assert quality.candidate == quality.live and verdict.attempts == 200
    count = sum(each.lost for all_ in losing.values() for each in all_)
    assert verdict.notes == (f"{count} attempts of rl@2 were lost by the infrastructure and count as unsolved",)
    assert named(verdict, "latency").candidate == 2.0, "seconds of lost attempts are not known"
    verdict = judge(losing, attempts(0.6), GateConfig(), NAMES)
    assert verdict.metrics[0].live == 1.0 and "quality" in failing(verdict), "those of the live version do not count"


def test_tasks_that_only_one_of_them_attempted_do_not_count() -> None:
    more = {**attempts(0.6), "other": [replace(SOLVES, solved=False)] * 100}
    assert compare(more).metrics[0].change.value == 0.0
    with pytest.raises(RollmillError, match="no task that both"):
        judge({"a": [SOLVES]}, {"b": [SOLVES]}, GateConfig(), NAMES)


def test_nobody_calls_a_tool() -> None:
    silent = {"a": [replace(SOLVES, calls=0, solved=False, tokens=0)]}
    verdict = judge(silent, silent, GateConfig(), NAMES)
    assert verdict.promotes and named(verdict, "malformed").candidate == 0.0


def test_the_interval_of_a_change_covers_the_truth() -> None:
    """200 simulated comparisons of 40 tasks with a true difference of 0.1: about 95 % of the intervals contain it."""
    random, covered = np.random.default_rng(0), 0
    for seed in range(200):
        easy_T = random.uniform(0.2, 0.7, 40)
        before, after = (np.stack([random.binomial(8, easy_T + gain), np.full(40, 8)], 1) for gain in (0.0, 0.1))
        found = clustered_change(before, after, resamples=400, seed=seed)
        covered += found.low <= 0.1 <= found.high
    assert 180 <= covered <= 199


def test_a_resample_in_which_nothing_is_solved_is_the_worst_case() -> None:
    """One of ten tasks is solved: a third of the resamples have no solved task, and no cost per solved task."""
    before_T2, after_T2 = np.tile([100.0, 1.0], (10, 1)), np.tile([100.0, 0.0], (10, 1))
    after_T2[0, 1] = 1.0
    change = clustered_change(before_T2, after_T2, relative=True)
    assert change.value == 10.0 and math.isfinite(change.low) and change.high == math.inf
    assert math.isfinite(clustered_change(after_T2, before_T2, relative=True).high)
