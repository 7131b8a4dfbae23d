"""What the page shows of a run, section by section. A section without data is left out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollmill.runs.report.charts import (
    NARROW,
    WIDE,
    Axes,
    Draw,
    Point,
    Series,
    column_chart,
    line_chart,
    stacked_chart,
)
from rollmill.runs.report.figures import (
    Event,
    RunEvents,
    by_field,
    column,
    delta_bytes,
    find_eval,
    finite,
    rate_of,
    staleness_counts,
    trained_line,
)
from rollmill.runs.report.markup import Markup, join, tag
from rollmill.runs.report.scales import duration, number, percent, power, size
from rollmill.runs.report.timeline import COLOURS, timeline
from rollmill.weights.regions.arrivals import Arrivals

FULL = 1100.0
CLOSE_UP = 20.0  # seconds: long enough for several weight switches, short enough to see each
ENGINE_COLOURS = ("steel", "ember", "sage", "plum", "sand")


def section(title: str, about: str, *content: str) -> Markup:
    shown = [part for part in content if part]
    return tag("section", tag("h2", title), tag("p", about, class_="about"), *shown) if shown else Markup("")


def figure(title: str, about: str, draw: Draw, keys: Mapping[str, str] | None = None, wide: float = WIDE) -> Markup:
    """A titled chart in both its widths; `keys` maps colours to what they stand for."""
    legend = (
        tag("ul", [tag("li", tag("i", class_=f"fill-{c}"), words) for c, words in keys.items()], class_="keys")
        if keys
        else ""
    )
    caption = tag("figcaption", tag("b", title), tag("span", about))
    return tag("figure", caption, legend, draw(wide), draw(NARROW), class_="full" if wide > WIDE else None)


def learning(run: RunEvents) -> Markup:
    before, after = find_eval(run, "before"), find_eval(run, "after")
    references = {
        f"held out, {name}: {percent(rate_of(result).value, 1)}": rate_of(result).value
        for name, result in (("before", before), ("after", after))
        if result
    }
    charts = [
        _by_step(
            run,
            "Reward",
            "Mean reward of the groups in each step: dots are steps, the line is smoothed.",
            {"reward_mean": ("", "ember")},
            Axes("step", "mean reward", floor=0.0),
        ),
        _by_step(
            run,
            "Solve rate in training",
            "Share of each step's attempts that solved their task.",
            {"solve_rate": ("", "steel")},
            Axes("step", "solved", percent, floor=0.0, references=references),
        ),
    ]
    charts += _losses(run)
    charts.append(
        _by_step(
            run,
            "Entropy",
            "How open the policy's choices are; a fall to zero would mean it has stopped exploring.",
            {"entropy": ("", "plum")},
            Axes("step", "nats per token", floor=0.0),
        )
    )
    return section("How it learned", "One point per optimizer step.", _grid(charts))


def _losses(run: RunEvents) -> list[Markup]:
    """One chart per stage that trained on documents; held-out losses by source beside the training loss."""
    charts = []
    for stage, steps in by_field(run.midtrain, "stage").items():
        if len(steps) < 2:
            continue
        series = [Series("training", _points(steps, "loss"), "sage", smooth=True)]
        held = by_field([event for event in run.heldout if str(event.get("stage") or "") == stage], "source")
        for (source, losses), colour in zip(held.items(), itertools.cycle(("plum", "steel", "sand"))):
            series.append(Series(source, _points(losses, "loss"), colour))
        title = f"Loss of {stage}" if stage else "Mid-training loss"
        text = "Next-token loss on the documents of each step" + (", and on held-out documents." if held else ".")
        axes = Axes("step", "loss (nats per token)", floor=0.0)
        charts.append(figure(title, text, line_chart(series if held else [replace(series[0], name="")], axes, title)))
    return charts


def asynchrony(run: RunEvents) -> Markup:
    columns = [(finite(step.get("step"), 0.0), staleness_counts(step)) for step in run.steps if staleness_counts(step)]
    charts: list[Markup] = []
    if columns:
        levels = sorted({level for _, counts in columns for level, count in counts.items() if count})
        keys = {
            f"level{level}": f"{level} behind" if level < 4 else "4 or more behind" for level in levels if level <= 4
        }
        charts.append(
            figure(
                "Staleness of what was trained on",
                "How many versions behind the trainer the weights were that sampled each token.",
                stacked_chart(
                    columns, Axes("step", "share of trained tokens", percent, floor=0.0), "Staleness by step, stacked"
                ),
                keys,
            )
        )
    charts.append(
        _by_step(
            run,
            "Waiting and working",
            "Seconds each step spent computing, and waiting for finished groups. It waits for a due group if others "
            "are ready but must not overtake it.",
            {
                "seconds": ("work", "ember"),
                "wait_seconds": ("wait", "steel"),
                "due_seconds": ("of it for due groups", "plum"),
            },
            Axes("step", "seconds per step", floor=0.0),
        )
    )
    return section(
        "What asynchrony cost",
        "Rollouts and training run at the same time, so some tokens were sampled by weights older than the ones being "
        "trained. How much older is bounded when a group starts, and measured here.",
        _grid(charts),
    )


def timelines(run: RunEvents) -> Markup:
    """The whole run, and a close look at the middle of the reinforcement phase."""
    if not run.busy:
        return Markup("")
    start, end = run.span
    present = {str(event.get("what")) for event in run.busy}
    keys: dict[str, str] = {}
    for what, colour in COLOURS.items():
        if what in present:
            keys[colour] = f"{keys[colour]}, {what}" if colour in keys else what
    charts = [
        figure(
            "The whole run",
            "One lane per process. Triangles are engines switching to new weights.",
            timeline(run, start, end, "Timeline of the run: busy stretches of each process"),
            keys,
            FULL,
        )
    ]
    if len(run.steps) > 4:
        middle = run.steps[len(run.steps) // 2]["at"]
        low, high = max(start, middle - CLOSE_UP / 2), min(end, middle + CLOSE_UP / 2)
        charts.append(
            figure(
                f"{duration(high - low)} from the middle",
                "Engines keep decoding while the trainer steps; a switch pauses them between two tokens.",
                timeline(run, low, high, "Timeline of a short stretch in the middle of the run"),
                wide=FULL,
            )
        )
    return section("Who was busy when", "Measured by the processes themselves.", _grid(charts))


def numerics(run: RunEvents) -> Markup:
    distances = {
        "mismatch_p99": ("p99", "steel"),
        "mismatch_k3": ("k3", "ember"),
        "drift_k3": ("drift k3", "sand"),
    }
    charts = [
        _by_step(
            run,
            "Log-prob mismatch, trainer against engine",
            "A sample of the step, computed again while the trainer waits, under the very weights that sampled it; at "
            "least one step in ten is measured. k3 estimates the KL divergence (nats), p99 is the 99th percentile of "
            "the absolute difference. Drift is k3 under the newer weights trained from: how far the policy had moved.",
            distances,
            Axes("step", "difference", power, log=True),
            positive=True,
        ),
        _by_step(
            run,
            "Kept by the loss",
            "Effective sample size of the importance weights, and the share of tokens the probability mask removed.",
            {"ess": ("ess", "sage"), "mask_fraction": ("masked", "plum")},
            Axes("step", "share", percent, floor=0.0),
        ),
    ]
    return section("Do trainer and engine agree?", _agreement(run), _grid(charts))


def _agreement(run: RunEvents) -> str:
    about = "Importance weights are only as good as the log-probs they are made of."
    tokens, largest = int(sum(column(run.steps, "mismatch_tokens"))), column(run.steps, "mismatch_max")
    if tokens == 0 or max(largest, default=1.0) > 0:
        return about
    return (
        f"{about} Here they agree bit for bit: {tokens:,} sampled tokens were computed again, and no log-prob differs."
    )


def weights(run: RunEvents, engines: Mapping[str, Any]) -> Markup:
    line = trained_line(run)
    applies = [event for event in run.applies if event.get("line") == line]
    charts = [
        *_delta_charts([publish for publish in run.publishes if publish.get("line") == line]),
        _by_engine(
            applies,
            "since_publish_seconds",
            "From publish to engine",
            "Time from the commit of a version until an engine serves it. Names stand at the median.",
        ),
        _by_engine(
            applies,
            "pause_seconds",
            "Pause of a switch",
            "How long decoding stood still for new weights. No request is dropped or started over.",
        ),
    ]
    return section(
        "How weights travelled",
        "Each step publishes the lossless difference to its parent; engines fetch it, check its digest, and switch "
        "between two tokens.",
        _grid(charts),
        _engine_table(engines),
        _version_table([row for row in Arrivals().fold(run.all) if row["line"] == line]),
    )


def _delta_charts(publishes: Sequence[Event]) -> list[Markup]:
    deltas = [publish for publish in publishes if delta_bytes(publish) > 0]
    if not deltas:
        return []
    full = max(finite(publish.get("full_bytes"), 0.0) for publish in deltas)
    snapshots = [publish for publish in publishes if publish.get("encoding") == "snapshot"]
    columns = [(finite(one.get("version"), 0.0), finite(one.get("bytes"), 0.0), "before") for one in snapshots]
    columns += [(finite(one.get("version"), 0.0), delta_bytes(one), "ember") for one in deltas]
    small = max(map(delta_bytes, deltas)) < full / 25
    axes = Axes("version", "bytes", size, log=small, floor=0.0, references={f"full: {size(full)}": full})
    return [
        figure(
            "What was sent",
            "Size of each version's delta, and of the snapshots now and then, beside the size of all weights.",
            column_chart(columns, axes, "Bytes published per version"),
            {"ember": "delta", "before": "snapshot"},
        ),
        figure(
            "What had changed",
            "Share of the served values whose bits differ from the version before.",
            line_chart(
                [Series("", _points(deltas, "density", "version"), "sand", smooth=True)],
                Axes("version", "changed values", percent, floor=0.0),
                "Density of each delta",
            ),
        ),
    ]


def _by_engine(applies: Sequence[Event], key: str, title: str, about: str) -> Markup:
    names = sorted({str(event.get("engine")) for event in applies})
    series = []
    for index, name in enumerate(names):
        mine = [event for event in applies if str(event.get("engine")) == name]
        points = _points(mine, key, "version")
        if points:
            series.append(Series(name, points, ENGINE_COLOURS[index % len(ENGINE_COLOURS)], dots=True))
    if not series:
        return Markup("")
    values = sorted(value for one in series for _, value in one.points)
    # an engine that was away for a while arrives late once; that must not flatten everything else
    axes = Axes("version", "time", duration, floor=0.0, log=values[-1] > 20 * values[len(values) // 2] > 0)
    return figure(title, about, line_chart(series, axes, f"{title}, by version"))


def _engine_table(engines: Mapping[str, Any]) -> Markup:
    if not engines:
        return Markup("")
    heads = ("Engine", "Region", "Switches", "In flight", "Time to engine", "Pause", "Received", "Tokens/s")
    rows = [tag("tr", [tag("td", cell) for cell in _engine_row(name, facts)]) for name, facts in engines.items()]
    header = tag("thead", tag("tr", [tag("th", head, scope="col") for head in heads]))
    return tag("div", tag("table", header, tag("tbody", rows)), class_="scroll")


def _version_table(versions: Sequence[Mapping[str, Any]]) -> Markup:
    """Every version: how small it was, how soon each region served it, and the pause. The same as `weights events`."""
    regions = sorted({name for row in versions for name in row["regions"]})
    if not regions:
        return Markup("")
    heads = ("Version", "Sent", "Of full size", "Changed", *(f"To {name}" for name in regions), "Longest pause")
    rows = [tag("tr", [tag("td", cell) for cell in _version_row(row, regions)]) for row in versions]
    header = tag("thead", tag("tr", [tag("th", head, scope="col") for head in heads]))
    table = tag("div", tag("table", header, tag("tbody", rows)), class_="scroll")
    return tag("details", tag("summary", f"Every version ({len(rows)})"), table)


def _version_row(row: Mapping[str, Any], regions: Sequence[str]) -> list[str]:
    there = [row["regions"].get(name, {}) for name in regions]
    times = [one.get("serving_seconds") for one in there]
    pauses = [one["pause_ms_max"] / 1000 for one in there if one.get("pause_ms_max") is not None]
    sent = row["bytes"] if row["delta_bytes"] is None else row["delta_bytes"]
    return [
        str(row["version"]),
        "–" if sent is None else size(sent),
        percent(1 / row["ratio"], 1) if row["ratio"] else "–",
        "–" if row["density"] is None else percent(row["density"], 1),
        *("–" if time is None else duration(time) for time in times),
        duration(max(pauses)) if pauses else "–",
    ]


def _engine_row(name: str, facts: Mapping[str, Any]) -> list[str]:
    def spread(values: Mapping[str, float | None]) -> Markup:
        middle, worst = values["mean"], values["max"]
        if middle is None or worst is None:
            return Markup("–")
        return join(duration(middle), tag("small", f"  max {duration(worst)}"))

    return [
        name,
        str(facts["region"] or "–"),
        number(facts["switches"]),
        number(facts["switches_in_flight"]),
        spread(facts["time_to_engine"]),
        spread(facts["pause_seconds"]),
        size(facts["bytes"]),
        number(round(facts["tokens_per_s"])) if facts["tokens_per_s"] is not None else "–",
    ]


def _by_step(
    run: RunEvents,
    title: str,
    about: str,
    keys: Mapping[str, tuple[str, str]],
    axes: Axes,
    positive: bool = False,
) -> Markup:
    """A chart of step events: {field: (name, colour)}. Fields that no step has are left out."""
    keep: Callable[[float], bool] = (lambda value: value > 0) if positive else (lambda value: True)
    series = []
    for key, (name, colour) in keys.items():
        points = [(at, value) for at, value in _points(run.steps, key) if keep(value)]
        if points:
            series.append(Series(name, points, colour, smooth=True))
    return figure(title, about, line_chart(series, axes, f"{title}, by {axes.x}")) if series else Markup("")


def _points(events: Sequence[Event], key: str, position: str = "step") -> list[Point]:
    pairs = ((finite(event.get(position)), finite(event.get(key))) for event in events)
    return [(at, value) for at, value in pairs if at == at and value == value]


def _grid(charts: Sequence[Markup]) -> Markup:
    shown = [chart for chart in charts if chart]
    return tag("div", shown, class_="grid") if shown else Markup("")
