"""What the report and the live page show of a run, chapter by chapter. A chapter without data is empty.

The words are in `templates/chapters.html`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from rollmill.dashboard.charts import Axes, Draw, Point, Series, column_chart, line_chart, stacked_chart
from rollmill.dashboard.figures import (
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
from rollmill.dashboard.render import render
from rollmill.dashboard.scales import duration, number, percent, power, size
from rollmill.dashboard.solving import solving
from rollmill.dashboard.timeline import COLOURS, timeline
from rollmill.weights.regions.arrivals import Arrivals

CLOSE_UP = 20.0  # seconds: long enough for several weight switches, short enough to see each
ENGINE_COLOURS = ("steel", "ember", "sage", "plum", "sand")


def chapters(run: RunEvents, summary: Mapping[str, Any]) -> dict[str, Markup]:
    """The figures of a run by chapter, empty where there is nothing to show yet."""
    return {
        "solving": solving(run),
        "learning": learning(run, summary["environments"]),
        "asynchrony": asynchrony(run),
        "timelines": timelines(run),
        "numerics": numerics(run),
        "weights": weights(run, summary["engines"]),
    }


def learning(run: RunEvents, environments: Mapping[str, Mapping[str, Any]]) -> Markup:
    found = {name: find_eval(run, name) for name in ("before", "after")}
    rates = {name: rate_of(result).value for name, result in found.items() if result}
    references = {f"held out, {name}: {percent(rate, 1)}": rate for name, rate in rates.items()}
    reward = _by_step(run, {"reward_mean": ("", "ember")}, Axes("step", "mean reward", floor=0.0))
    axes = Axes("step", "solved", percent, floor=0.0, references=references)
    solved = _by_step(run, {"solve_rate": ("", "steel")}, axes)
    entropy = _by_step(run, {"entropy": ("", "plum")}, Axes("step", "nats per token", floor=0.0))
    return render(
        "chapters", "learning", reward, solved, _losses(run), entropy, [*map(_environment, environments.items())]
    )


def _environment(named: tuple[str, Mapping[str, Any]]) -> list[str]:
    """What the training rollouts of one environment came to; their means are of one attempt."""
    name, own = named
    means = [number(finite(own[key])) for key in ("reward", "turns", "tokens")]
    shares = percent(own["share"]), number(own["graded"]), percent(finite(own["solve_rate"], 0.0), 1)
    return [name, number(own["groups"]), *shares, *means, duration(finite(own["seconds"], 0.0))]


def _losses(run: RunEvents) -> list[tuple[str, bool, Draw]]:
    """One chart per stage that trained on documents; held-out losses by source beside the training loss."""
    charts = []
    for stage, steps in by_field(run.midtrain, "stage").items():
        if len(steps) < 2:
            continue
        held = by_field([event for event in run.heldout if str(event.get("stage") or "") == stage], "source")
        series = [Series("training" if held else "", _points(steps, "loss"), "sage", smooth=True)]
        for (source, losses), colour in zip(held.items(), itertools.cycle(("plum", "steel", "sand"))):
            series.append(Series(source, _points(losses, "loss"), colour))
        charts.append((stage, bool(held), line_chart(series, Axes("step", "loss (nats per token)", floor=0.0))))
    return charts


def asynchrony(run: RunEvents) -> Markup:
    columns = [(finite(step.get("step"), 0.0), staleness_counts(step)) for step in run.steps if staleness_counts(step)]
    levels = sorted({min(level, 4) for _, counts in columns for level, count in counts.items() if count})
    keys = {f"level{level}": f"{level} behind" if level < 4 else "4 or more behind" for level in levels}
    axes = Axes("step", "share of trained tokens", percent, floor=0.0)
    staleness = stacked_chart(columns, axes) if columns else None
    fields = {
        "seconds": ("work", "ember"),
        "wait_seconds": ("wait", "steel"),
        "due_seconds": ("of it for due groups", "plum"),
    }
    work = _by_step(run, fields, Axes("step", "seconds per step", floor=0.0))
    return render("chapters", "asynchrony", staleness, keys, work)


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
    close, seconds = None, 0.0
    if len(run.steps) > 4:
        middle = run.steps[len(run.steps) // 2]["at"]
        low, high = max(start, middle - CLOSE_UP / 2), min(end, middle + CLOSE_UP / 2)
        close, seconds = timeline(run, low, high), high - low
    return render("chapters", "timelines", timeline(run, start, end), keys, close, seconds)


def numerics(run: RunEvents) -> Markup:
    distances = {
        "mismatch_p99": ("p99", "steel"),
        "mismatch_k3": ("k3", "ember"),
        "drift_k3": ("drift k3", "sand"),
    }
    mismatch = _by_step(run, distances, Axes("step", "difference", power, log=True))
    shares = {"ess": ("ess", "sage"), "mask_fraction": ("masked", "plum")}
    kept = _by_step(run, shares, Axes("step", "share", percent, floor=0.0))
    tokens, largest = int(sum(column(run.steps, "mismatch_tokens"))), column(run.steps, "mismatch_max")
    equal = tokens if max(largest, default=1.0) <= 0 else 0
    return render("chapters", "numerics", mismatch, kept, f"{equal:,}" if equal else "")


def weights(run: RunEvents, engines: Mapping[str, Any]) -> Markup:
    line = trained_line(run)
    applies = [event for event in run.applies if event.get("line") == line]
    versions = [row for row in Arrivals().fold(run.all) if row["line"] == line]
    regions = sorted({name for row in versions for name in row["regions"]})
    return render(
        "chapters",
        "weights",
        *_delta_charts([publish for publish in run.publishes if publish.get("line") == line]),
        _by_engine(applies, "since_publish_seconds"),
        _by_engine(applies, "pause_seconds"),
        engines,
        [_version(row, regions) for row in versions],
        regions,
    )


def _delta_charts(publishes: Sequence[Event]) -> tuple[Draw | None, Draw | None]:
    """What was sent, and what had changed."""
    deltas = [publish for publish in publishes if delta_bytes(publish) > 0]
    if not deltas:
        return None, None
    full = max(finite(publish.get("full_bytes"), 0.0) for publish in deltas)
    snapshots = [publish for publish in publishes if publish.get("encoding") == "snapshot"]
    columns = [(finite(one.get("version"), 0.0), finite(one.get("bytes"), 0.0), "before") for one in snapshots]
    columns += [(finite(one.get("version"), 0.0), delta_bytes(one), "ember") for one in deltas]
    small = max(map(delta_bytes, deltas)) < full / 25
    sent = Axes("version", "bytes", size, log=small, floor=0.0, references={f"full: {size(full)}": full})
    density = Series("", _points(deltas, "density", "version"), "sand", smooth=True)
    changed = Axes("version", "changed values", percent, floor=0.0)
    return column_chart(columns, sent), line_chart([density], changed)


def _by_engine(applies: Sequence[Event], key: str) -> Draw | None:
    series = []
    for index, (name, mine) in enumerate(sorted(by_field(applies, "engine").items())):
        if points := _points(mine, key, "version"):
            series.append(Series(name, points, ENGINE_COLOURS[index % len(ENGINE_COLOURS)], dots=True))
    if not series:
        return None
    values = sorted(value for one in series for _, value in one.points)
    # an engine that was away for a while arrives late once; that must not flatten everything else
    log = values[-1] > 20 * values[len(values) // 2] > 0
    return line_chart(series, Axes("version", "time", duration, floor=0.0, log=log))


def _version(row: Mapping[str, Any], regions: Sequence[str]) -> list[str]:
    """How small a version was, how soon each region served it, and the pause. The same as `weights events`."""
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


def _by_step(run: RunEvents, keys: Mapping[str, tuple[str, str]], axes: Axes) -> Draw | None:
    """A chart of step events, {field: (name, colour)}; None if no step has such a field. A logarithmic axis has no
    place for zero."""
    series = []
    for key, (name, colour) in keys.items():
        points = [(at, value) for at, value in _points(run.steps, key) if value > 0 or not axes.log]
        if points:
            series.append(Series(name, points, colour, smooth=True))
    return line_chart(series, axes) if series else None


def _points(events: Sequence[Event], key: str, position: str = "step") -> list[Point]:
    pairs = ((finite(event.get(position)), finite(event.get(key))) for event in events)
    return [(at, value) for at, value in pairs if at == at and value == value]
