"""The gate compares the attempts of two versions: what is worse than its bound holds the candidate, with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from rollmill.errors import RollmillError
from rollmill.evals.evaluation import Conduct
from rollmill.evals.gate import GateVerdict, Metric, judge
from rollmill.evals.gate_config import GateConfig
from rollmill.evals.statistics import clustered_ratio, seen

NAMES = ("rl@1", "rl@2")
ESTIMATES = GateConfig(alpha=0.5, least_tasks=1)
ONCE = GateConfig(looks=1, max_quality_loss=0.05)
SOLVES = Conduct(solved=True, tokens=100, seconds=2.0, calls=4, malformed=0, asked=False, engine_seconds=0.4)
FAILS = replace(SOLVES, solved=False)


def attempts(
    rate: float, change: Callable[[Conduct], Conduct] = lambda one: one, seed: int = 3
) -> dict[str, list[Conduct]]:
    """100 tasks with 4 attempts each; a share of them is solved."""
    random = np.random.default_rng(seed)
    return {
        f"task-{task}": [change(replace(SOLVES, solved=bool(random.random() < rate))) for _ in range(4)]
        for task in range(100)
    }


def compare(candidate: dict[str, list[Conduct]], config: GateConfig | None = None) -> GateVerdict:
    return judge(attempts(0.6), candidate, config or ONCE, NAMES)


def named(verdict: GateVerdict, name: str) -> Metric:
    return next(metric for metric in verdict.metrics if metric.name == name)


def failing(verdict: GateVerdict) -> list[str]:
    return [metric.name for metric in verdict.metrics if metric.holds is False]


def test_the_same_attempts_pass() -> None:
    verdict = compare(attempts(0.6))
    assert verdict.promotes and failing(verdict) == [] and (verdict.tasks, verdict.attempts) == (100, 400)
    quality = verdict.metrics[0]
    assert quality.change.value == 0.0 and quality.live == quality.candidate
    assert -0.05 <= quality.change.low < 0 < quality.change.high, "attempts that agree leave something open"
    assert "all 8 measured metrics are within their bounds on 100 tasks" in verdict.reasons[0]
    assert "this suite can see a loss of quality of 0.0" in verdict.notes[0]


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
    assert math.isinf(named(verdict, "tokens_per_solved").candidate)


def test_below_the_bar_nothing_passes_however_bad_live_is() -> None:
    live, config = attempts(0.1), GateConfig(offline_bar=0.5)
    verdict = judge(live, attempts(0.4), config, NAMES)
    assert failing(verdict) == ["bar"] and "solve rate" in verdict.reasons[0]
    assert judge(live, attempts(0.7), config, NAMES).promotes


def test_a_bound_has_to_be_proved_unless_alpha_says_otherwise() -> None:
    """A candidate that seems a little better is within the bound; its interval is not."""
    slightly, estimate = attempts(0.65, seed=4), GateConfig(max_quality_loss=0.0, alpha=0.5)
    verdict = compare(slightly, estimate)
    assert (
        "quality" not in failing(verdict) and "alpha is 0.5: estimates decide, and nothing is proved" in verdict.notes
    )
    verdict = compare(slightly, GateConfig(max_quality_loss=0.0))
    assert "quality" in failing(verdict) and "over the whole interval" in verdict.reasons[0]
    better = compare(attempts(0.95, seed=4), GateConfig(max_quality_loss=0.0))
    assert "quality" not in failing(better) and better.metrics[0].change.low > 0


@pytest.mark.parametrize("alpha", [0.05, 0.5])
def test_a_lower_mean_reward_holds_where_nothing_counts_as_solved(alpha: float) -> None:
    """A judge's scores: no attempt reaches 1, so no attempt is solved."""
    live, candidate = (attempts(0.0, partial(replace, reward=score)) for score in (0.9, 0.2))
    config = ONCE.model_copy(update={"alpha": alpha})
    verdict = judge(live, candidate, config, NAMES)
    assert failing(verdict) == ["quality"] and verdict.quality == "mean reward"
    quality = verdict.metrics[0]
    assert (quality.live, quality.candidate) == (pytest.approx(0.9), pytest.approx(0.2))
    for name in ("pass@1", "pass@4"):
        assert named(verdict, name).holds is None and f"{name} is not measured: 0 / 0 for both" in verdict.notes
    assert judge(candidate, live, config, NAMES).promotes
    dear = {task: [replace(each, tokens=200) for each in made] for task, made in live.items()}
    assert failing(judge(live, dear, config, NAMES)) == ["tokens_per_attempt"], "costs are bounded here too"


@pytest.mark.parametrize("names", [NAMES, ("rl@2", "rl@2")])
def test_without_a_measured_quality_nothing_is_promoted(names: tuple[str, str]) -> None:
    nothing = attempts(0.0)
    verdict = judge(nothing, nothing, GateConfig(alpha=0.5, max_quality_loss=1.0), names)
    assert not verdict.promotes and verdict.reasons[0].startswith("quality was not measured")


def test_the_first_live_version_has_only_a_bar() -> None:
    same = attempts(0.6)
    verdict = judge(same, same, GateConfig(offline_bar=0.4), ("rl@1", "rl@1"))
    assert verdict.promotes and [metric.name for metric in verdict.metrics] == ["bar"]
    assert judge(same, same, ONCE, ("rl@1", "rl@1")).promotes
    assert failing(judge(same, same, GateConfig(offline_bar=0.7), ("rl@1", "rl@1"))) == ["bar"]


@pytest.mark.parametrize("tasks", [1, 2, 8, 19])
def test_few_tasks_never_promote(tasks: int) -> None:
    few = {f"task-{task}": [SOLVES] for task in range(tasks)}
    for config in (ONCE, GateConfig(alpha=0.5)):
        verdict = judge(few, few, config, NAMES)
        assert verdict.reasons[-1] == f"{tasks} tasks are too few to decide: gate.least_tasks is 20"
    assert "quality" in failing(judge(few, few, GateConfig(least_tasks=1), NAMES)), "and prove nothing"


def test_small_losses_do_not_add_up() -> None:
    """Ten candidates in a row solve each 2 points less. Against live alone nearly all would pass."""
    config, rates = GateConfig(alpha=0.5, max_quality_loss=0.05), [0.7 - 0.02 * step for step in range(11)]
    made = [{f"t{task}": [SOLVES if task < 1000 * rate else FAILS] for task in range(1000)} for rate in rates]
    live = 0
    for number in range(1, 11):
        yardstick = None if live == 0 else ("rl@0", made[0])
        names = (f"rl@{live}", f"rl@{number}")
        assert judge(made[number - 1], made[number], config, (names[0], names[1])).promotes
        verdict = judge(made[live], made[number], config, (names[0], names[1]), yardstick=yardstick)
        if verdict.promotes:
            live = number
    assert live == 2, "0.66 is within 5 points of 0.70, and 0.64 is not"
    assert "yardstick" in failing(verdict) and "0.7 yardstick" in "".join(verdict.reasons)


def test_an_equal_candidate_passes_a_suite_that_can_see_the_bound_and_a_worse_one_fails() -> None:
    """60 simulated comparisons each, on 512 tasks with 4 attempts: alpha is the chance of a wrong promotion."""
    random = np.random.default_rng(0)
    passed = {}
    for loss in (0.0, 0.05):
        passed[loss] = 0
        for _ in range(60):
            easy_T = random.uniform(0.05, 1.0, 512)
            live, candidate = (
                {f"t{t}": [SOLVES if random.random() < p else FAILS for _ in range(4)] for t, p in enumerate(p_T)}
                for p_T in (easy_T, easy_T - loss)
            )
            verdict = judge(live, candidate, ONCE.model_copy(update={"max_more_tokens": 1.0}), NAMES)
            passed[loss] += verdict.promotes
    assert passed[0.0] >= 55 and passed[0.05] <= 8


def test_a_suite_says_what_it_can_see() -> None:
    verdict = compare(attempts(0.6, seed=9))
    change = verdict.metrics[0].change
    loss = seen(change.value - change.low, 0.9, 99)
    assert loss > 0.05 and f"can see a loss of quality of {loss:.3f}, 80 times in 100; for 0.05" in verdict.notes[0]


def test_seconds_count_only_if_both_were_measured_at_the_same_time() -> None:
    slow = attempts(0.6, lambda one: replace(one, seconds=10.0, engine_seconds=2.0))
    assert failing(compare(slow)) == ["engine_seconds", "latency"]
    verdict = judge(attempts(0.6), slow, ONCE, NAMES, beside=False)
    assert verdict.promotes and "latency" not in [metric.name for metric in verdict.metrics]
    assert "all 6 measured metrics" in verdict.reasons[0]
    why = "latency and seconds of engines are left out: rl@1 and rl@2 were not measured at the same time"
    assert verdict.notes[1:] == (why,) and verdict.describe()["notes"][1:] == [why]


def test_engine_seconds_are_per_solved_task() -> None:
    """Half the seconds per attempt at a third of the solve rate is more per solved task."""
    wide = GateConfig(max_quality_loss=1.0, max_more_tokens=10.0)
    live = {f"task-{task}": [replace(SOLVES, solved=task % 10 < 6)] for task in range(100)}
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
    verdict = judge(sides[0], sides[1], ONCE, NAMES)
    assert verdict.promotes and "all 7 measured metrics" in verdict.reasons[0]
    assert verdict.notes[1:] == ("seconds of engines are left out: not all engines told how long they computed",)


def test_attempts_that_the_candidate_lost_are_unsolved() -> None:
    """It solves what it does not lose: without the lost ones, it would seem better than the live version."""
    lost = Conduct(False, 0, 0.0, 0, 0, False, lost=True)
    losing = attempts(0.6, lambda one: one if one.solved else lost)
    verdict = compare(losing)
    quality = verdict.metrics[0]
    assert quality.candidate == quality.live and verdict.attempts == 400
    count = sum(each.lost for all_ in losing.values() for each in all_)
    assert verdict.notes[1:] == (f"{count} attempts of rl@2 were lost by the infrastructure and count as unsolved",)
    assert named(verdict, "latency").candidate == 2.0, "seconds of lost attempts are not known"
    verdict = judge(losing, attempts(0.6), ONCE, NAMES)
    assert verdict.metrics[0].live == 1.0 and "quality" in failing(verdict), "those of the live version do not count"


def test_tasks_that_only_one_of_them_attempted_do_not_count() -> None:
    more = {**attempts(0.6), "other": [replace(SOLVES, solved=False)] * 100}
    assert compare(more).metrics[0].change.value == 0.0
    with pytest.raises(RollmillError, match="no task that both"):
        judge({"a": [SOLVES]}, {"b": [SOLVES]}, ONCE, NAMES)


def test_a_lost_attempt_has_the_least_reward() -> None:
    """Rewards may be negative: nothing would be better than a bad one."""
    live = attempts(0.0, lambda one: replace(one, reward=-1.0))
    lost = {task: [Conduct(False, 0, 0.0, 0, 0, False, lost=True)] * 3 + made[:1] for task, made in live.items()}
    assert judge(live, lost, ONCE, NAMES).metrics[0].change.value == 0.0


def test_nobody_calls_a_tool() -> None:
    silent = attempts(0.6, lambda one: replace(one, calls=0))
    verdict = judge(silent, silent, ONCE, NAMES)
    assert verdict.promotes and named(verdict, "malformed").holds is None
    assert "malformed is not measured: 0 / 0 for both" in verdict.notes


def test_the_interval_of_a_ratio_covers_the_truth() -> None:
    """200 simulated comparisons of 40 tasks, of which the candidate's cost is 1.2 times as much."""
    random, covered = np.random.default_rng(0), 0
    for _ in range(200):
        easy_T = random.uniform(0.2, 0.7, 40)
        sides = [np.stack([each * random.lognormal(0, 0.3, 40), random.binomial(8, easy_T)], 1) for each in (1.0, 1.2)]
        found = clustered_ratio(sides[0], sides[1])
        covered += found.low <= 1.2 <= found.high
    assert 180 <= covered <= 199


def test_a_cost_per_solved_task_without_one_is_the_worst_case() -> None:
    some_T2, none_T2 = np.tile([100.0, 1.0], (10, 1)), np.tile([100.0, 0.0], (10, 1))
    assert clustered_ratio(some_T2, none_T2).value == math.inf and clustered_ratio(none_T2, some_T2).value == 0.0
    assert math.isnan(clustered_ratio(none_T2, none_T2).value)
    none_T2[0, 1] = 1.0
    change = clustered_ratio(some_T2, none_T2)
    assert change.value == pytest.approx(10.0) and change.low < 2 and change.high > 50
    assert clustered_ratio(some_T2[:1], some_T2[:1]).high == math.inf, "one task says nothing"
