"""What users taught a run: the cycles of real-time RL, for the page and for `report.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from rollmill.dashboard.charts import Bar, Draw, interval_chart
from rollmill.dashboard.figures import finite, without_nan
from rollmill.dashboard.render import render
from rollmill.dashboard.scales import GAP, minus, signed
from rollmill.evals.statistics import clustered_difference, clustered_interval

METRICS = {  # of the gate: in words, and how the two sides are compared
    "quality": ("Quality", "difference"),
    "yardstick": ("Quality, against the best version before", "difference"),
    "tokens_per_solved": ("Tokens per solved task", "ratio"),
    "tokens_per_attempt": ("Tokens per attempt", "ratio"),
    "engine_seconds": ("Engine seconds", "ratio"),
    "latency": ("Seconds per attempt", "ratio"),
    "malformed": ("Malformed tool calls", "difference of shares"),
    "questions": ("Ends with a question", "difference of shares"),
    "bar": ("Quality, least of any live version", ""),
}


def living_figures(
    cycles: Sequence[Mapping[str, Any]], acceptance: Mapping[str, Any] | None, traffic: Mapping[str, Any]
) -> dict[str, Any]:
    """What `report.json` says about cycles. `cycles`: number, facts and moves of each. `acceptance`: by task, whether
    the work was truly accepted, before and after; None if it was not measured."""
    tree: dict[str, Any] = {**traffic, "cycles": [_cycle(each) for each in cycles]}
    tree |= dict.fromkeys(("users", "population", "before", "after", "gain", "measured"))
    if acceptance is not None:
        before, after = acceptance["before"], acceptance["after"]
        tree |= {"users": acceptance["users"], "population": acceptance["population"]}
        tree["measured"] = sum(map(len, after.values()))
        tree["before"], tree["after"] = (clustered_interval(list(each.values()))._asdict() for each in (before, after))
        tree["gain"] = clustered_difference(before, after)._asdict()
    cleaned: dict[str, Any] = without_nan(tree)
    return cleaned


def _cycle(cycle: Mapping[str, Any]) -> dict[str, Any]:
    facts, moves = cycle["facts"], cycle["moves"]
    return {
        "number": cycle["number"],
        "ended": moves[-1]["state"],
        "seconds": moves[-1]["at"] - moves[0]["at"],
        "moves": [dict(move) for move in moves],
        "counts": facts.get("counts"),
        "gate": facts.get("gate", {}).get("metrics"),
        "canary": facts.get("canary"),
    }


def living_chapter(tree: Mapping[str, Any] | None, reading: str) -> Markup:
    """The cycles of a run; empty if there was none. `reading` is one of the conversations, as markup."""
    if tree is None:
        return Markup("")
    cycles = []
    for cycle in tree["cycles"]:
        ends = [*(move["at"] for move in cycle["moves"][1:]), None]
        moves = [(move, end and end - move["at"]) for move, end in zip(cycle["moves"], ends, strict=True)]
        cycles.append((cycle, moves, [_metric(metric) for metric in cycle["gate"] or ()]))
    return render("living", "chapter", tree, _acceptance(tree), _gain(tree) if _measured(tree) else "", cycles, reading)


def living_lead(tree: Mapping[str, Any] | None) -> Markup:
    """The same in one sentence, for the head of the page; empty if true acceptance was not measured."""
    return render("living", "lead", tree, _gain(tree)) if tree is not None and _measured(tree) else Markup("")


def _measured(tree: Mapping[str, Any]) -> bool:
    return tree["gain"] is not None and tree["gain"]["value"] is not None


def _gain(tree: Mapping[str, Any]) -> str:
    value, low, high = (signed(tree["gain"][key]) for key in ("value", "low", "high"))
    return f"{value} points, 95{GAP}% interval {low} to {high}"


def _acceptance(tree: Mapping[str, Any]) -> Draw | None:
    if not _measured(tree):
        return None
    bars: list[Bar] = []
    for name, colour in (("before", "before"), ("after", "ember")):
        value, low, high = (finite(tree[name][key], 0.0) for key in ("value", "low", "high"))
        bars.append((name, colour, value, low, high))
    return interval_chart([("True acceptance", f"{tree['users'] or 'of'} users", bars)])


def _metric(metric: Mapping[str, Any]) -> tuple[str, str, list[str], bool | None]:
    """What the gate compared, how, its figures, and whether the bound holds."""
    suite, of, plain = str(metric["name"]).rpartition(": ")
    name, compared = METRICS.get(plain, (plain, ""))
    change, low, high = map(_figure, metric["change"])
    bound = f"{'≥' if metric['at_least'] else '≤'} {_figure(metric['bound'])}"
    figures = [_figure(metric["live"]), _figure(metric["candidate"]), change, f"{low} to {high}", bound]
    return f"{suite}{of}{name}", compared, figures, metric["holds"]


def _figure(value: float | None) -> str:
    if value is None:
        return "–"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 3
    return minus(f"{value:.{digits}f}")
