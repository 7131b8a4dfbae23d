"""What the evaluations of a run measured: before against after, over versions, by environment and by family."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from rollmill.dashboard.charts import Axes, Bar, Draw, Series, interval_chart, line_chart
from rollmill.dashboard.figures import Event, RunEvents, by_field, find_eval, finite, gain_of, rate_of
from rollmill.dashboard.render import render
from rollmill.dashboard.scales import number, percent, signed
from rollmill.runs.stages import DURING

FAMILY = "heldout_family"
_COLOURS = ("ember", "steel", "sage", "plum", "sand")
_CURVES = (("pass@1", "rate", percent), ("pass@k", "solved_once", percent), ("mean reward", "reward", number))
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
    ends = [one for one in run.evals if not _is_during(one)]
    places = dict.fromkeys((str(one.get("split")), str(one.get("mode"))) for one in ends)
    rows = []
    for split, mode in places:
        bars = [_bar(one) for one in ends if (one.get("split"), one.get("mode")) == (split, mode)]
        before, after = find_eval(run, "before", split, mode), find_eval(run, "after", split, mode)
        gained = f", {signed(gain_of(before, after).value)} points" if before and after else ""
        rows.append((SPLITS.get(split, split), f"{mode}{gained}", bars))
    attempts = sum(int(finite(one.get("attempts"), 0)) for one in run.evals)
    unseen, apart = (FAMILY, "sampled") in places, (_apart(ends, "environments"), _apart(ends, "families"))
    chart, results = interval_chart(rows) if rows else None, [_result(one) for one in ends]
    return render("chapters", "solving", attempts, chart, unseen, results, *apart, *_curves(run.evals))


def _is_during(result: Event) -> bool:
    return str(result.get("label")).startswith(DURING)


def _curves(evals: Sequence[Event]) -> tuple[list[tuple[str, str, Draw]], list[list[str]]]:
    """Per stage that was evaluated while it trained: (stage, figure, chart over versions), with the evaluations at both
    of its ends; and a row per evaluation."""
    charts, rows = [], []
    for stage in dict.fromkeys(str(one.get("stage")) for one in evals if _is_during(one)):
        own = [one for one in evals if str(one.get("stage")) == stage and one.get("mode") == "sampled"]
        own.sort(key=_version)
        for title, key, format in _CURVES:
            series = []
            for (split, of_split), colour in zip(by_field(own, "split").items(), itertools.cycle(_COLOURS)):
                points = [(_version(one), finite(one.get(key))) for one in of_split]
                points = [(at, value) for at, value in points if at == at and value == value]
                if len(points) > 1:
                    series.append(Series(SPLITS.get(split, split), points, colour))
            if series:
                charts.append((stage, title, line_chart(series, Axes("version", title, format, floor=0.0))))
        rows += [_result(one) for one in own if _is_during(one)]
    return charts, rows


def _version(result: Event) -> float:
    """Where a result stands on the axis of versions: in the middle of those that sampled it."""
    asked = finite(result.get("version"))
    return (finite(result.get("oldest"), asked) + finite(result.get("newest"), asked)) / 2


def _versions(result: Event) -> str:
    asked = finite(result.get("version"), 0.0)
    oldest, newest = finite(result.get("oldest"), asked), finite(result.get("newest"), asked)
    return number(oldest) if oldest == newest else f"{number(oldest)} to {number(newest)}"


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
        _versions(result),
        number(finite(result.get("attempts"), 0)),
        f"{percent(rate.value, 1)} ({percent(rate.low, 1)} to {percent(rate.high, 1)})",
        once,
        "–" if reward != reward else number(reward) + (f" ({number(low)} to {number(high)})" if low < high else ""),
    ]


def _apart(evals: Sequence[Event], by: str) -> list[list[str]]:
    """The sampled attempts of each evaluation by environment or family of their tasks, where there are several."""
    found: dict[tuple[str, str], list[list[Mapping[str, Any]]]] = {}
    for result in evals:
        names, conduct = result.get(by), result.get("conduct")
        if result.get("mode") != "sampled" or result.get("split") not in SPLITS:  # suites stand apart already
            continue
        if not isinstance(names, Mapping) or not isinstance(conduct, Mapping):
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
