"""What the evaluations of a run measured: before against after, with intervals, and by family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollmill.runs.report.charts import interval_chart
from rollmill.runs.report.figures import Event, RunEvents, find_eval, finite, gain_of, rate_of
from rollmill.runs.report.markup import Markup, tag
from rollmill.runs.report.scales import GAP, number, percent
from rollmill.runs.report.sections import FULL, figure, section

FAMILY = "heldout_family"
SPLITS = {
    "heldout": "Held-out tasks",
    "fresh": "Fresh held-out tasks",
    FAMILY: "Held-out family",
    "train": "Training tasks",
}


def solving(run: RunEvents) -> Markup:
    """Before against after, per split and mode, with intervals."""
    places = dict.fromkeys((str(one.get("split")), str(one.get("mode"))) for one in run.evals)
    rows = []
    for split, mode in places:
        results = [one for one in run.evals if (one.get("split"), one.get("mode")) == (split, mode)]
        bars = [_rate_bar(one) for one in results]
        before, after = find_eval(run, "before", split, mode), find_eval(run, "after", split, mode)
        gained = f", {100 * gain_of(before, after).value:+.1f} points" if before and after else ""
        rows.append((SPLITS.get(split, split), f"{mode}{gained}".replace("-", "−"), bars))
    if not rows:
        return Markup("")
    attempts = sum(int(finite(one.get("attempts"), 0)) for one in run.evals)
    chart = figure(
        "Solve rate before and after reinforcement",
        f"{number(attempts)} attempts in all. Whiskers are 95{GAP}% intervals; attempts at one task count together.",
        interval_chart(rows, "Bars of held-out solve rates before and after training, with intervals"),
        {"before": "before", "ember": "after"},
        FULL,
    )
    families = " Families of the held-out family never occur in training." if (FAMILY, "sampled") in places else ""
    return section(
        "Does it solve tasks it has never seen?",
        f"The rewards of the tasks decide. Held-out tasks are not trained on.{families}",
        tag("div", chart, class_="grid"),
        _table(("Evaluation", "Attempts", "pass@1", "pass@k", "Mean reward"), list(map(_result, run.evals))),
        _table(("Family", "Evaluation", "Tasks", "Attempts", "pass@1", "Mean reward"), _families(run)),
    )


def _rate_bar(result: Event) -> tuple[str, str, float, float, float]:
    label = str(result.get("label"))
    colour = {"before": "before", "after": "ember"}.get(label, "steel")
    rate = rate_of(result)
    return label, colour, rate.value, rate.low, rate.high


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


def _families(run: RunEvents) -> list[list[str]]:
    """The sampled attempts of each evaluation by family of their tasks, where there are several."""
    found: dict[tuple[str, str], list[list[Mapping[str, Any]]]] = {}
    for result in run.evals:
        families, conduct = result.get("families"), result.get("conduct")
        if result.get("mode") != "sampled" or not isinstance(families, Mapping) or not isinstance(conduct, Mapping):
            continue
        for task, made in conduct.items():
            known = [each for each in made if not each.get("lost")]
            found.setdefault((str(families.get(task, "–")), str(result.get("label"))), []).append(known)
    if len({family for family, _ in found}) < 2:
        return []
    return [
        [*place, number(len(tasks)), *_means(tasks)]
        for place, tasks in sorted(found.items(), key=lambda each: each[0][0])
    ]


def _means(tasks: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    made = [each for of in tasks for each in of]
    if not made:
        return ["0", "–", "–"]
    solved = [float(bool(each.get("solved"))) for each in made]
    earned = [finite(each.get("reward"), one) for each, one in zip(made, solved, strict=True)]
    return [number(len(made)), percent(sum(solved) / len(made), 1), number(sum(earned) / len(made))]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    if not rows:
        return Markup("")
    header = tag("thead", tag("tr", [tag("th", head, scope="col") for head in heads]))
    body = tag("tbody", [tag("tr", [tag("td", cell) for cell in row]) for row in rows])
    return tag("div", tag("table", header, body), class_="scroll")
