"""The gate over several suites: the run's own, and those of [[evals.suites]] that have bounds, each judged apart. A
candidate is promoted only if all of them promote it. A bound that a suite names holds the candidate too if its metric
was not measured. The task of an attempt is called `SUITE ID` here, or `SPLIT ID` of the run's own suite."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rollmill.evals.gate import Attempts, GateVerdict, judge
from rollmill.evals.gate_config import BOUNDS, GateConfig
from rollmill.evals.suite import SuiteConfig

Yardstick = tuple[str, Attempts]


def judge_suites(
    live: Attempts,
    candidate: Attempts,
    config: GateConfig,
    names: tuple[str, str],
    suites: Iterable[SuiteConfig],
    *,
    beside: bool = True,
    yardstick: Yardstick | None = None,
) -> GateVerdict:
    """As `judge`. Metrics, reasons and notes of a suite begin with its name."""
    suites = list(suites)

    def one(suite: SuiteConfig | None) -> GateVerdict:
        first, second, pinned = (
            attempts if attempts is None else _of(suite, attempts, suites)
            for attempts in (live, candidate, yardstick and yardstick[1])
        )
        rule = config if suite is None else config.model_copy(update=suite.bounds)
        assert first is not None and second is not None
        best = (yardstick[0], pinned) if yardstick and pinned is not None else None
        return judge(first, second, rule, names, beside=beside, yardstick=best)

    verdict = one(None)
    for suite in suites:
        verdict = _with(verdict, suite, one(suite))
    return verdict


def own(attempts: Attempts, suites: Iterable[SuiteConfig]) -> Attempts:
    """The attempts that are of none of these suites."""
    return _of(None, attempts, suites)


def _of(suite: SuiteConfig | None, attempts: Attempts, suites: Iterable[SuiteConfig]) -> Attempts:
    others = {each.name for each in suites}
    return {
        task: made
        for task, made in attempts.items()
        if (task.partition(" ")[0] == suite.name if suite else task.partition(" ")[0] not in others)
    }


def _with(verdict: GateVerdict, suite: SuiteConfig, more: GateVerdict) -> GateVerdict:
    unmeasured = [] if more.candidate == more.live else _unmeasured(suite, more)  # then only the bar decides
    failing = [*(more.reasons if not more.promotes else ()), *unmeasured]
    reasons = [*(verdict.reasons if not verdict.promotes or not failing else ())]
    said = [f"{suite.name}: {reason}" for reason in (failing if failing else more.reasons if verdict.promotes else ())]
    return replace(
        verdict,
        verdict="promote" if verdict.promotes and not failing else "hold",
        tasks=verdict.tasks + more.tasks,
        attempts=verdict.attempts + more.attempts,
        metrics=(*verdict.metrics, *(replace(each, name=f"{suite.name}: {each.name}") for each in more.metrics)),
        reasons=(*reasons, *said),
        notes=(*verdict.notes, *(f"{suite.name}: {note}" for note in more.notes)),
    )


def _unmeasured(suite: SuiteConfig, found: GateVerdict) -> list[str]:
    measured = {
        "pass@k" if each.name.startswith("pass@") else each.name for each in found.metrics if each.holds is not None
    }
    return [
        f"{bound} is set, and {BOUNDS[bound]} was not measured"
        for bound in suite.bounds or ()
        if not any(name.startswith(BOUNDS[bound]) for name in measured)
    ]
