"""Who was busy when: one lane per process, with a mark at each weight switch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rollmill.dashboard.charts import BOLD, CHARACTER, NARROW, Axes, Draw, Frame, Rect, Text
from rollmill.dashboard.figures import RunEvents, finite
from rollmill.dashboard.render import render
from rollmill.dashboard.scales import Scale, clock, clock_ticks, duration, percent

# The colour of each kind of work, in the order of painting: later ones lie on top.
COLOURS = {
    "wait": "idle",
    "rollouts": "sage",
    "decode": "steel",
    "step": "ember",
    "grade": "plum",
    "checkpoint": "sand",
    "measure": "sand",
    "publish": "ink",
    "apply": "ink",
}
LANE, BAR, TOP = 34.0, 18.0, 46.0


@dataclass(frozen=True)
class Stretch:
    """A time in which a process did one kind of work."""

    what: str
    start: float
    end: float


def lanes(run: RunEvents) -> dict[str, list[Stretch]]:
    """The busy stretches of each process: trainers first, then the dispatcher, the engines, anyone else."""
    found: dict[str, list[Stretch]] = {}
    for event in run.busy:
        start, end = finite(event.get("start")), finite(event.get("end"))
        if end > start:
            found.setdefault(str(event["process"]), []).append(Stretch(str(event.get("what")), start, end))
    order = ("midtrain", "trainer", "dispatcher", "engine")

    def rank(process: str) -> tuple[int, str]:
        return next((index for index, name in enumerate(order) if process.startswith(name)), len(order)), process

    return {process: found[process] for process in sorted(found, key=rank)}


def busy_share(stretches: Iterable[Stretch], start: float, end: float) -> float:
    """How much of [start, end] was spent on anything but waiting, overlaps counted once."""
    covered, reached = 0.0, start
    for stretch in sorted(stretches, key=lambda stretch: stretch.start):
        left, right = max(stretch.start, reached), min(stretch.end, end)
        if stretch.what != "wait" and right > left:
            covered, reached = covered + right - left, right
    return covered / (end - start) if end > start else 0.0


def timeline(run: RunEvents, start: float, end: float) -> Draw:
    """Draws the run between two moments, in seconds from the first event."""
    everything = lanes(run)
    origin = run.span[0]

    def draw(width: float, label: str) -> Markup:
        narrow = width <= NARROW
        left = 0.0 if narrow else 14 + BOLD * max(map(len, everything), default=0)
        scale = Scale(start, end, left, width - (0.0 if narrow else 84.0))
        above = 22.0 if narrow else 0.0  # room for the lane's name, over its switches
        height = TOP + (LANE + above) * len(everything) + 30
        drawn = []
        for index, (process, stretches) in enumerate(everything.items()):
            top = TOP + index * (LANE + above) + above
            drawn.append(
                {
                    "top": top,
                    "height": BAR,
                    "words": _names(process, stretches, scale, top, narrow),
                    "bars": _bars(stretches, scale, top),
                    "switches": _switches(run, process, scale, top),
                }
            )
        frame = Frame(width, height, scale, scale, Axes("", ""))
        return render("charts", "timeline", frame, label, *_phases(run, scale, height), _ticks(scale, origin), drawn)

    return draw


def _phases(run: RunEvents, scale: Scale, height: float) -> tuple[list[Rect], list[Text]]:
    """Bands behind the lanes, named above them on two alternating rows, where there is room for the name."""
    bands: list[Rect] = []
    names: list[Text] = []
    free = [scale.start, scale.start]
    for index, (name, begin, finish) in enumerate(run.phase_spans()):
        left, right = max(scale(begin), scale.start), min(scale(finish), scale.end)
        if right <= left:
            continue
        row, words = index % 2, f"{name} {duration(finish - begin)}"
        bands.append((f"phase phase{row}", left, 28.0, right - left, height - 52))
        length = CHARACTER * len(words)
        at = min(left + 3, scale.end - length)
        if at >= free[row]:
            names.append((at, 9.0 + 13 * row, words, "tick"))
            free[row] = at + length + 8
    return bands, names


def _ticks(scale: Scale, origin: float) -> list[tuple[float, str]]:
    since = Scale(scale.low - origin, scale.high - origin, scale.start, scale.end)
    count = max(2, int((scale.end - scale.start) // 80))
    return [(since(tick), clock(tick)) for tick in clock_ticks(since.low, since.high, count)]


def _names(process: str, stretches: Sequence[Stretch], scale: Scale, top: float, narrow: bool) -> list[Text]:
    """What is written at a lane: its process, and how much of the time it was busy."""
    share = percent(busy_share(stretches, scale.low, scale.high))
    if narrow:
        return [(0, top - 11, f"{process} · {share} busy", "label strong")]
    name = (scale.start - 10, top + 13, process, "label strong end")
    return [name, (scale.end + 8, top + 13, f"{share} busy", "tick")]


def _bars(stretches: Sequence[Stretch], scale: Scale, top: float) -> list[Rect]:
    order = {what: place for place, what in enumerate(COLOURS)}
    bars: list[Rect] = []
    for what in sorted({stretch.what for stretch in stretches}, key=lambda what: order.get(what, -1)):
        style = f"fill-{COLOURS.get(what, 'sand')}"
        for begin, finish in _merge((stretch for stretch in stretches if stretch.what == what), scale):
            wide = max(scale(finish) - scale(begin), 0.7)
            bars.append((style, scale(begin), top, wide, BAR, f"{what}\n{duration(finish - begin)}"))
    return bars


def _merge(stretches: Iterable[Stretch], scale: Scale) -> list[tuple[float, float]]:
    """Stretches closer than half a pixel become one: thousands of them would weigh much and show nothing more."""
    hair = 0.5 * (scale.high - scale.low) / max(scale.end - scale.start, 1.0)
    merged: list[tuple[float, float]] = []
    for stretch in sorted(stretches, key=lambda stretch: stretch.start):
        begin, finish = max(stretch.start, scale.low), min(stretch.end, scale.high)
        if finish <= begin:
            continue
        if merged and begin - merged[-1][1] < hair:
            merged[-1] = (merged[-1][0], max(merged[-1][1], finish))
        else:
            merged.append((begin, finish))
    return merged


def _switches(run: RunEvents, process: str, scale: Scale, top: float) -> list[tuple[str, str]]:
    """The path and the tip of a triangle at each switch to new weights."""
    marks = []
    free = scale.start
    for event in run.applies:
        at = scale(event["at"])
        if event["process"] != process or not scale.low <= event["at"] <= scale.high or at < free:
            continue
        free = at + 5  # closer marks would run together
        tip = f"switched to v{event.get('version')}\n{int(finite(event.get('running'), 0))} answers in flight"
        pause = finite(event.get("pause_seconds"))
        path = f"M{at:.1f} {top + BAR:.1f}V{top - 2:.1f}l-3.5 -5h7l-3.5 5"
        marks.append((path, tip if pause != pause else f"{tip}\npaused {duration(pause)}"))
    return marks
