"""What the report and the live page show of a run, chapter by chapter. A chapter without data is empty."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from rollmill.dashboard.charts import Axes, Figure, Point, Series, column_chart, line_chart, stacked_chart
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
from rollmill.dashboard.scales import duration, percent, power, size
from rollmill.dashboard.solving import solving
from rollmill.dashboard.timeline import COLOURS, timeline
from rollmill.weights.regions.arrivals import Arrivals

CLOSE_UP = 20.0  # seconds: long enough for several weight switches, short enough to see each
ENGINE_COLOURS = ("steel", "ember", "sage", "plum", "sand")


def chapters(run: RunEvents, summary: Mapping[str, Any]) -> dict[str, Markup]:
    """The figures of a run by chapter, empty where there is nothing to show yet."""
    return {
        "solving": solving(run),
        "learning": learning(run),
        "asynchrony": asynchrony(run),
        "timelines": timelines(run),
        "numerics": numerics(run),
        "weights": weights(run, summary["engines"]),
    }


def chapter(title: str, about: str, figures: Sequence[Figure], tail: str = "") -> Markup:
    """A title, charts, and what follows them; empty if there is neither."""
    return render("pieces", "chapter", title, about, figures, tail)


def learning(run: RunEvents) -> Markup:
    found = {name: find_eval(run, name) for name in ("before", "after")}
    rates = {name: rate_of(result).value for name, result in found.items() if result}
    references = {f"held out, {name}: {percent(rate, 1)}": rate for name, rate in rates.items()}
    figures = [
        *_by_step(
            run,
            "Reward",
            "Mean reward of the groups in each step: dots are steps, the line is smoothed.",
            {"reward_mean": ("", "ember")},
            Axes("step", "mean reward", floor=0.0),
        ),
        *_by_step(
            run,
            "Solve rate in training",
            "Share of each step's attempts that solved their task.",
            {"solve_rate": ("", "steel")},
            Axes("step", "solved", percent, floor=0.0, references=references),
        ),
        *_losses(run),
        *_by_step(
            run,
            "Entropy",
            "How open the policy's choices are; a fall to zero would mean it has stopped exploring.",
            {"entropy": ("", "plum")},
            Axes("step", "nats per token", floor=0.0),
        ),
    ]
    return chapter("How it learned", "One point per optimizer step.", figures)


def _losses(run: RunEvents) -> list[Figure]:
    """One chart per stage that trained on documents; held-out losses by source beside the training loss."""
    figures = []
    for stage, steps in by_field(run.midtrain, "stage").items():
        if len(steps) < 2:
            continue
        held = by_field([event for event in run.heldout if str(event.get("stage") or "") == stage], "source")
        series = [Series("training" if held else "", _points(steps, "loss"), "sage", smooth=True)]
        for (source, losses), colour in zip(held.items(), itertools.cycle(("plum", "steel", "sand"))):
            series.append(Series(source, _points(losses, "loss"), colour))
        title = f"Loss of {stage}" if stage else "Mid-training loss"
        text = "Next-token loss on the documents of each step" + (", and on held-out documents." if held else ".")
        axes = Axes("step", "loss (nats per token)", floor=0.0)
        figures.append(Figure(title, text, line_chart(series, axes, title)))
    return figures


def asynchrony(run: RunEvents) -> Markup:
    columns = [(finite(step.get("step"), 0.0), staleness_counts(step)) for step in run.steps if staleness_counts(step)]
    figures = []
    if columns:
        levels = sorted({min(level, 4) for _, counts in columns for level, count in counts.items() if count})
        keys = {f"level{level}": f"{level} behind" if level < 4 else "4 or more behind" for level in levels}
        axes = Axes("step", "share of trained tokens", percent, floor=0.0)
        figures.append(
            Figure(
                "Staleness of what was trained on",
                "How many versions behind the trainer the weights were that sampled each token.",
                stacked_chart(columns, axes, "Staleness by step, stacked"),
                keys,
            )
        )
    figures += _by_step(
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
    return chapter(
        "What asynchrony cost",
        "Rollouts and training run at the same time, so some tokens were sampled by weights older than the ones being "
        "trained. How much older is bounded when a group starts, and measured here.",
        figures,
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
    figures = [
        Figure(
            "The whole run",
            "One lane per process. Triangles are engines switching to new weights.",
            timeline(run, start, end, "Timeline of the run: busy stretches of each process"),
            keys,
            full=True,
        )
    ]
    if len(run.steps) > 4:
        middle = run.steps[len(run.steps) // 2]["at"]
        low, high = max(start, middle - CLOSE_UP / 2), min(end, middle + CLOSE_UP / 2)
        figures.append(
            Figure(
                f"{duration(high - low)} from the middle",
                "Engines keep decoding while the trainer steps; a switch pauses them between two tokens.",
                timeline(run, low, high, "Timeline of a short stretch in the middle of the run"),
                full=True,
            )
        )
    return chapter("Who was busy when", "Measured by the processes themselves.", figures)


def numerics(run: RunEvents) -> Markup:
    figures = [
        *_by_step(
            run,
            "Log-prob mismatch, trainer against engine",
            "A sample of the step, computed again while the trainer waits, under the very weights that sampled it; at "
            "least one step in ten is measured. k3 estimates the KL divergence (nats), p99 is the 99th percentile of "
            "the absolute difference. Drift is k3 under the newer weights trained from: how far the policy had moved.",
            {"mismatch_p99": ("p99", "steel"), "mismatch_k3": ("k3", "ember"), "drift_k3": ("drift k3", "sand")},
            Axes("step", "difference", power, log=True),
        ),
        *_by_step(
            run,
            "Kept by the loss",
            "Effective sample size of the importance weights, and the share of tokens the probability mask removed.",
            {"ess": ("ess", "sage"), "mask_fraction": ("masked", "plum")},
            Axes("step", "share", percent, floor=0.0),
        ),
    ]
    about = "Importance weights are only as good as the log-probs they are made of."
    tokens, largest = int(sum(column(run.steps, "mismatch_tokens"))), column(run.steps, "mismatch_max")
    if tokens and max(largest, default=1.0) <= 0:
        about += (
            f" Here they agree bit for bit: {tokens:,} sampled tokens were computed again, and no log-prob differs."
        )
    return chapter("Do trainer and engine agree?", about, figures)


def weights(run: RunEvents, engines: Mapping[str, Any]) -> Markup:
    line = trained_line(run)
    applies = [event for event in run.applies if event.get("line") == line]
    figures = [
        *_delta_charts([publish for publish in run.publishes if publish.get("line") == line]),
        *_by_engine(
            applies,
            "since_publish_seconds",
            "From publish to engine",
            "Time from the commit of a version until an engine serves it. Names stand at the median.",
        ),
        *_by_engine(
            applies,
            "pause_seconds",
            "Pause of a switch",
            "How long decoding stood still for new weights. No request is dropped or started over.",
        ),
    ]
    versions = [row for row in Arrivals().fold(run.all) if row["line"] == line]
    regions = sorted({name for row in versions for name in row["regions"]})
    return chapter(
        "How weights travelled",
        "Each step publishes the lossless difference to its parent; engines fetch it, check its digest, and switch "
        "between two tokens.",
        figures,
        render("chapters", "travels", engines, [_version(row, regions) for row in versions], regions),
    )


def _delta_charts(publishes: Sequence[Event]) -> list[Figure]:
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
        Figure(
            "What was sent",
            "Size of each version's delta, and of the snapshots now and then, beside the size of all weights.",
            column_chart(columns, axes, "Bytes published per version"),
            {"ember": "delta", "before": "snapshot"},
        ),
        Figure(
            "What had changed",
            "Share of the served values whose bits differ from the version before.",
            line_chart(
                [Series("", _points(deltas, "density", "version"), "sand", smooth=True)],
                Axes("version", "changed values", percent, floor=0.0),
                "Density of each delta",
            ),
        ),
    ]


def _by_engine(applies: Sequence[Event], key: str, title: str, about: str) -> list[Figure]:
    series = []
    for index, (name, mine) in enumerate(sorted(by_field(applies, "engine").items())):
        if points := _points(mine, key, "version"):
            series.append(Series(name, points, ENGINE_COLOURS[index % len(ENGINE_COLOURS)], dots=True))
    if not series:
        return []
    values = sorted(value for one in series for _, value in one.points)
    # an engine that was away for a while arrives late once; that must not flatten everything else
    axes = Axes("version", "time", duration, floor=0.0, log=values[-1] > 20 * values[len(values) // 2] > 0)
    return [Figure(title, about, line_chart(series, axes, f"{title}, by version"))]


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


def _by_step(run: RunEvents, title: str, about: str, keys: Mapping[str, tuple[str, str]], axes: Axes) -> list[Figure]:
    """One chart of step events, {field: (name, colour)}, or none if no step has such a field. A logarithmic axis has no
    place for zero."""
    series = []
    for key, (name, colour) in keys.items():
        points = [(at, value) for at, value in _points(run.steps, key) if value > 0 or not axes.log]
        if points:
            series.append(Series(name, points, colour, smooth=True))
    return [Figure(title, about, line_chart(series, axes, f"{title}, by {axes.x}"))] if series else []


def _points(events: Sequence[Event], key: str, position: str = "step") -> list[Point]:
    pairs = ((finite(event.get(position)), finite(event.get(key))) for event in events)
    return [(at, value) for at, value in pairs if at == at and value == value]
