"""What the evaluations of a run measured: before against after, with intervals, and by environment and family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from rollmill.dashboard.charts import Bar, interval_chart
from rollmill.dashboard.figures import Event, RunEvents, find_eval, finite, gain_of, rate_of
from rollmill.dashboard.render import render
from rollmill.dashboard.scales import number, percent, signed

FAMILY = "heldout_family"
SPLITS = {
    "heldout": "Held-out tasks",
    "fresh": "Fresh held-out tasks",
    FAMILY: "Held-out family",
    "train": "Training tasks",
}


def solving(run: RunEvents) -> Markup:
    """Before against after, per split and mode, with intervals; empty without evaluations."""
    if not run.evals:
        return Markup("")
    places = dict.fromkeys((str(one.get("split")), str(one.get("mode"))) for one in run.evals)
    rows = []
    for split, mode in places:
        bars = [_bar(one) for one in run.evals if (one.get("split"), one.get("mode")) == (split, mode)]
        before, after = find_eval(run, "before", split, mode), find_eval(run, "after", split, mode)
        gained = f", {signed(gain_of(before, after).value)} points" if before and after else ""
        rows.append((SPLITS.get(split, split), f"{mode}{gained}", bars))
    attempts = sum(int(finite(one.get("attempts"), 0)) for one in run.evals)
    results = [_result(one) for one in run.evals]
    unseen, apart = (FAMILY, "sampled") in places, (_apart(run, "environments"), _apart(run, "families"))
    return render("chapters", "solving", attempts, interval_chart(rows), unseen, results, *apart)


def _bar(result: Event) -> Bar:
    label = str(result.get("label"))
    rate = rate_of(result)
    return label, {"before": "before", "after": "ember"}.get(label, "steel"), rate.value, rate.low, rate.high


def _result(result: Event) -> list[str]:
    rate, k = rate_of(result), result.get("k")
    once = f"{percent(finite(result.get('solved_once')), 1)} (k = {k})" if isinstance(k, int) and k > 1 else "–"
    reward, low, high = (finite(result.get(key)) for key in ("reward", "reward_low", "reward_high"))
    return [
        f"{SPLITS.get(str(result.get('split')), result.get('split'))}, {result.get('mode')}, {result.get('label')}",
        number(finite(result.get("attempts"), 0)),
        f"{percent(rate.value, 1)} ({percent(rate.low, 1)} to {percent(rate.high, 1)})",
        once,
        "–" if reward != reward else number(reward) + (f" ({number(low)} to {number(high)})" if low < high else ""),
    ]


def _apart(run: RunEvents, by: str) -> list[list[str]]:
    """The sampled attempts of each evaluation by environment or family of their tasks, where there are several."""
    found: dict[tuple[str, str], list[list[Mapping[str, Any]]]] = {}
    for result in run.evals:
        names, conduct = result.get(by), result.get("conduct")
        if result.get("mode") != "sampled" or not isinstance(names, Mapping) or not isinstance(conduct, Mapping):
            continue
        for task, made in conduct.items():
            known = [each for each in made if not each.get("lost")]
            found.setdefault((str(names.get(task, "–")), str(result.get("label"))), []).append(known)
    if len({name for name, _ in found}) < 2:
        return []
    ordered = sorted(found.items(), key=lambda each: each[0][0])
    return [[*place, number(len(tasks)), *_means(tasks)] for place, tasks in ordered]


def _means(tasks: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    made = [each for of in tasks for each in of]
    if not made:
        return ["0", "–", "–"]
    solved = [float(bool(each.get("solved"))) for each in made]
    earned = [finite(each.get("reward"), one) for each, one in zip(made, solved, strict=True)]
    return [number(len(made)), percent(sum(solved) / len(made), 1), number(sum(earned) / len(made))]
