"""Who was busy when: one lane per process, with a mark at each weight switch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollmill.runs.report.charts import BOLD, CHARACTER, NARROW, Draw, svg
from rollmill.runs.report.figures import RunEvents, finite
from rollmill.runs.report.markup import Markup, tag
from rollmill.runs.report.scales import Scale, clock, clock_ticks, duration, percent

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


def timeline(run: RunEvents, start: float, end: float, label: str) -> Draw:
    """Draws the run between two moments, in seconds from the first event."""
    everything = lanes(run)
    origin = run.span[0]

    def draw(width: float) -> Markup:
        narrow = width <= NARROW
        left = 0.0 if narrow else 14 + BOLD * max(map(len, everything), default=0)
        scale = Scale(start, end, left, width - (0.0 if narrow else 84.0))
        above = 22.0 if narrow else 0.0  # room for the lane's name, over its switches
        pitch = LANE + above
        height = TOP + pitch * len(everything) + 30
        children: list[str] = [*_phases(run, scale, height), _axis(scale, origin, height)]
        for index, (process, stretches) in enumerate(everything.items()):
            top = TOP + index * pitch + above
            children.append(_lane(process, stretches, scale, top, narrow))
            children.append(_switches(run, process, scale, top))
        return svg(width, height, label, children)

    return draw


def _phases(run: RunEvents, scale: Scale, height: float) -> list[str]:
    """Bands behind the lanes, named above them on two alternating rows, where there is room for the name."""
    children: list[str] = []
    free = [scale.start, scale.start]
    for index, (name, begin, finish) in enumerate(run.phase_spans()):
        left, right = max(scale(begin), scale.start), min(scale(finish), scale.end)
        if right <= left:
            continue
        children.append(
            tag("rect", class_=f"phase phase{index % 2}", x=left, y=28, width=right - left, height=height - 52)
        )
        row, words = index % 2, f"{name} {duration(finish - begin)}"
        length = CHARACTER * len(words)
        at = min(left + 3, scale.end - length)
        if at >= free[row]:
            children.append(tag("text", words, class_="tick", x=at, y=9 + 13 * row))
            free[row] = at + length + 8
    return children


def _axis(scale: Scale, origin: float, height: float) -> Markup:
    since = Scale(scale.low - origin, scale.high - origin, scale.start, scale.end)
    children = []
    for tick in clock_ticks(since.low, since.high, max(2, int((scale.end - scale.start) // 80))):
        at = since(tick)
        children.append(tag("line", class_="grid", x1=at, x2=at, y1=28, y2=height - 24))
        children.append(tag("text", clock(tick), class_="tick middle", x=at, y=height - 9))
    return tag("g", children)


def _lane(process: str, stretches: Sequence[Stretch], scale: Scale, top: float, narrow: bool) -> Markup:
    share = percent(busy_share(stretches, scale.low, scale.high))
    if narrow:
        words = [tag("text", f"{process} · {share} busy", x=0, y=top - 11, class_="label strong")]
    else:
        words = [
            tag("text", process, x=scale.start - 10, y=top + 13, class_="label strong end"),
            tag("text", f"{share} busy", x=scale.end + 8, y=top + 13, class_="tick"),
        ]
    track = tag("rect", class_="track", x=scale.start, y=top, width=scale.end - scale.start, height=BAR, rx=2)
    return tag("g", words, track, _bars(stretches, scale, top))


def _bars(stretches: Sequence[Stretch], scale: Scale, top: float) -> list[Markup]:
    bars = []
    order = list(COLOURS)
    for what in sorted(
        {stretch.what for stretch in stretches}, key=lambda what: order.index(what) if what in order else -1
    ):
        for begin, finish in _merge((stretch for stretch in stretches if stretch.what == what), scale):
            bars.append(
                tag(
                    "rect",
                    class_=f"fill-{COLOURS.get(what, 'sand')}",
                    x=scale(begin),
                    y=top,
                    width=max(scale(finish) - scale(begin), 0.7),
                    height=BAR,
                    data_tip=f"{what}\n{duration(finish - begin)}",
                )
            )
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


def _switches(run: RunEvents, process: str, scale: Scale, top: float) -> Markup:
    marks: list[Markup] = []
    free = scale.start
    for event in run.applies:
        if event["process"] != process or not scale.low <= event["at"] <= scale.high or scale(event["at"]) < free:
            continue
        free = scale(event["at"]) + 5  # closer marks would run together
        at, running = scale(event["at"]), int(finite(event.get("running"), 0))
        tip = f"switched to v{event.get('version')}\n{running} answers in flight"
        pause = finite(event.get("pause_seconds"))
        marks.append(
            tag(
                "path",
                class_="switch",
                d=f"M{at:.1f} {top + BAR:.1f}V{top - 2:.1f}l-3.5 -5h7l-3.5 5",
                data_tip=tip if pause != pause else f"{tip}\npaused {duration(pause)}",
            )
        )
    return tag("g", marks)
