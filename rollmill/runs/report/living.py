"""What users taught a run: the cycles of real-time RL, for the page and for `report.json`."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from rollmill.evals.statistics import Interval, clustered_difference, clustered_interval
from rollmill.runs.report.charts import interval_chart
from rollmill.runs.report.figures import finite, without_nan
from rollmill.runs.report.markup import Markup, join, tag
from rollmill.runs.report.scales import GAP, duration, number, percent
from rollmill.runs.report.sections import FULL, figure, section

ANCHOR = "users"
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
    the work was truly accepted, before and after; None if nobody measured it."""
    tree: dict[str, Any] = {**traffic, "cycles": [_cycle(each) for each in cycles]}
    tree |= dict.fromkeys(("users", "population", "before", "after", "gain", "measured"))
    if acceptance is not None:
        before, after = acceptance["before"], acceptance["after"]
        tree |= {"users": acceptance["users"], "population": acceptance["population"]}
        tree["measured"] = sum(map(len, after.values()))
        tree["before"], tree["after"] = (_interval(clustered_interval(list(each.values()))) for each in (before, after))
        tree["gain"] = _interval(clustered_difference(before, after))
    cleaned: dict[str, Any] = without_nan(tree)
    return cleaned


def _interval(interval: Interval) -> dict[str, float]:
    return dict(interval._asdict())


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


def living(tree: Mapping[str, Any] | None, reading: Markup) -> Markup:
    """`reading`: one of the conversations, to read."""
    if tree is None:
        return Markup("")
    simulated = tree["users"] == "simulated"
    about = "Real-time RL: what users did with the answers of the live version becomes the reward of the next one. "
    if tree["second_act"]:
        about += "This second act has a model of its own, mid-trained on tasks that are longer than its window. "
    if simulated:
        about += (
            f"These users are simulated (population {tree['population']}). Gateway, engines, machines, trainer, gate "
            "and canary are real. "
        )
    if tree["contexts"] is not None:
        about += (
            f"{number(tree['conversations'])} conversations, {tree['contexts']:.1f} contexts each on average, in a "
            f"window of {tree['window']} tokens."
        )
    shown = section("What users taught it", about, _acceptance(tree), *map(_cycle_markup, tree["cycles"]), reading)
    return tag("div", shown, id=ANCHOR)


def living_lead(tree: Mapping[str, Any] | None) -> Markup:
    """The same in one sentence, for the head of the page; empty if true acceptance was not measured."""
    if tree is None or tree["gain"] is None or tree["gain"]["value"] is None:
        return Markup("")
    before, after = (percent(finite(tree[name]["value"], 0.0), 1) for name in ("before", "after"))
    ended = [str(cycle["ended"]).replace("_", " ") for cycle in tree["cycles"]]
    cycles = f"one cycle of real-time RL ({ended[0]})" if len(ended) == 1 else f"{len(ended)} cycles of real-time RL"
    return tag(
        "p",
        f"{'In the second act, ' if tree['second_act'] else 'Its '}{tree['users']} users accept ",
        tag("b", before),
        f" of the work before {cycles} and ",
        tag("b", after),
        f" after it: {_gain(tree)}. ",
        tag("a", "What users taught it", href=f"#{ANCHOR}"),
        class_="lead second",
    )


def _gain(tree: Mapping[str, Any]) -> str:
    value, low, high = (f"{100 * tree['gain'][key]:+.1f}".replace("-", "−") for key in ("value", "low", "high"))
    return f"{value} points, 95{GAP}% interval {low} to {high}"


def _acceptance(tree: Mapping[str, Any]) -> Markup:
    if tree["gain"] is None or tree["gain"]["value"] is None:
        return Markup("")
    bars: list[tuple[str, str, float, float, float]] = []
    for name, colour in (("before", "before"), ("after", "ember")):
        value, low, high = (finite(tree[name][key], 0.0) for key in ("value", "low", "high"))
        bars.append((name, colour, value, low, high))
    about = (
        f"Share of {tree['measured']} conversations whose work its user would truly accept. The rule that makes "
        f"rewards never sees it. The same tasks and draws before and after the cycle: {_gain(tree)}."
    )
    rows = [("True acceptance", f"{tree['users'] or 'of'} users", bars)]
    chart = interval_chart(rows, "True acceptance before and after the cycle, with intervals")
    keys = {"before": "before", "ember": "after"}
    return tag("div", figure("True acceptance", about, chart, keys, FULL), class_="grid")


def _cycle_markup(cycle: Mapping[str, Any]) -> Markup:
    ended = str(cycle["ended"]).replace("_", " ")
    title = tag("h3", f"Cycle {cycle['number']}: {ended} after {duration(cycle['seconds'])}")
    moves = [_move(move, later) for move, later in zip(cycle["moves"], [*cycle["moves"][1:], None], strict=True)]
    states = _table(("State", "At", "For", "Why"), moves, words=True)
    gate = _table(
        ("What the gate compared", "Live", "Candidate", "Change", "Interval", "Bound", ""),
        [_metric(metric) for metric in cycle["gate"] or ()],
    )
    return tag("div", title, states, gate, class_="cycle")


def _move(move: Mapping[str, Any], later: Mapping[str, Any] | None) -> list[str]:
    at = datetime.datetime.fromtimestamp(move["at"]).astimezone().strftime("%H:%M:%S")
    lasted = duration(later["at"] - move["at"]) if later else "–"
    return [str(move["state"]).replace("_", " "), at, lasted, str(move["reason"])]


def _metric(metric: Mapping[str, Any]) -> list[str]:
    change = [_figure(value) for value in metric["change"]]
    bound = f"{'≥' if metric['at_least'] else '≤'} {_figure(metric['bound'])}"
    words_of = {True: tag("b", "holds", class_="good"), False: tag("b", "fails", class_="bad"), None: "not measured"}
    word = words_of[metric["holds"]]
    words, compared = METRICS.get(str(metric["name"]), (str(metric["name"]), ""))
    name = join(words, tag("small", f" {compared}") if compared else "")
    sides = [_figure(metric[side]) for side in ("live", "candidate")]
    return [name, *sides, change[0], f"{change[1]} to {change[2]}", bound, word]


def _figure(value: float | None) -> str:
    if value is None:
        return "–"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 3
    return f"{value:.{digits}f}".replace("-", "−")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, words: bool = False) -> Markup:
    if not rows:
        return Markup("")
    header = tag("thead", tag("tr", [tag("th", head, scope="col") for head in heads]))
    body = [tag("tr", [tag("td", cell) for cell in row]) for row in rows]
    return tag("div", tag("table", header, tag("tbody", body), class_="words" if words else None), class_="scroll")
