"""Charts as inline SVG: no library, no script, colours from the page's style sheet so that light and dark both work.

A chart is a function of its width, drawn once for wide pages and once for narrow ones: scaling one drawing down would
make its text unreadable on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollmill.runs.report.markup import Markup, tag
from rollmill.runs.report.scales import GAP, Format, Scale, linear, logarithmic, number, percent

Draw = Callable[[float], Markup]
Point = tuple[float, float]
WIDE, NARROW = 540.0, 340.0
CHARACTER, BOLD = 6.4, 7.4  # estimated width of a character of chart text, to avoid overlaps
MAX_COLUMNS = 160  # of hover columns; nobody can point at more
FEW_MARKS = 60  # dots that may be large
MAX_MARKS = 500  # of dots or bars; more would not be visible


@dataclass(frozen=True)
class Series:
    """One line or cloud of points. `colour` names a class of the style sheet."""

    name: str
    points: Sequence[Point]
    colour: str
    smooth: bool = False  # draw a smoothed line, with the raw points faint behind it
    dots: bool = False  # points only, no line


@dataclass(frozen=True)
class Axes:
    """The words around a chart, and how its numbers are written."""

    x: str
    y: str
    format: Format = number
    log: bool = False
    floor: float | None = None
    references: Mapping[str, float] = field(default_factory=dict)  # label -> level, drawn as dashed lines
    height: float = 220.0


@dataclass(frozen=True)
class Frame:
    """Where the data goes: scales of both axes inside the margins."""

    width: float
    height: float
    x: Scale
    y: Scale


def svg(width: float, height: float, label: str, *children: str | Iterable[str]) -> Markup:
    """One drawing. `label` is what a screen reader says; the figures behind it are in the page's tables."""
    return tag(
        "svg",
        *children,
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        class_="wide" if width > NARROW else "narrow",
        role="img",
        aria_label=label,
    )


def line_chart(series: Sequence[Series], axes: Axes, label: str) -> Draw:
    """Lines over steps. The name of each stands at its end."""

    def draw(width: float) -> Markup:
        frame = _frame(series, axes, width)
        return svg(
            width,
            axes.height,
            label,
            _grid(frame, axes),
            _references(frame, axes),
            [_line(frame, one) for one in series],
            _end_labels(frame, axes, series),
            _hover(frame, axes, series),
        )

    return draw


def stacked_chart(columns: Sequence[tuple[float, Mapping[int, float]]], axes: Axes, label: str) -> Draw:
    """A share of 100 % by whole-number level (0, 1, 2 …) at each step. Levels above 4 share the darkest colour."""

    def draw(width: float) -> Markup:
        merged = _merge_columns(columns)
        frame = _frame([Series("", [(at, 1.0) for at, _ in merged], "")], axes, width, bars=len(merged))
        pitch = (frame.x.end - frame.x.start) / max(len(merged), 1)
        bars = []
        for index, (_, shares) in enumerate(merged):
            bars.append(_stack(frame, frame.x.start + index * pitch, pitch, shares))
        return svg(width, axes.height, label, _grid(frame, axes), bars, _column_hover(frame, merged, pitch))

    return draw


def column_chart(columns: Sequence[tuple[float, float, str]], axes: Axes, label: str) -> Draw:
    """One bar per version: (position, value, colour), with dashed levels to compare it to."""

    def draw(width: float) -> Markup:
        series = [Series("", [(position, value) for position, value, _ in columns], "")]
        span = max(position for position, _, _ in columns) - min(position for position, _, _ in columns)
        frame = _frame(series, axes, width, bars=int(span) + 1)
        pitch = (frame.x.end - frame.x.start) / (span + 1)
        bars = []
        for position, value, colour in columns[:: math.ceil(len(columns) / MAX_MARKS)]:
            left = frame.x(position) - pitch / 2
            top = frame.y(value)
            bars.append(
                tag(
                    "rect",
                    class_=f"bar fill-{colour}",
                    x=left + 0.1 * pitch,
                    y=top,
                    width=max(0.8 * pitch, 0.6),
                    height=max(frame.y.start - top, 0.5),
                    data_tip=f"{axes.x} {number(position)}\n{axes.y} {axes.format(value)}",
                )
            )
        return svg(width, axes.height, label, _grid(frame, axes), bars, _references(frame, axes))

    return draw


def interval_chart(rows: Sequence[tuple[str, str, Sequence[tuple[str, str, float, float, float]]]], label: str) -> Draw:
    """Rows of bars with whiskers, (title, note, [(name, colour, value, low, high)]), on one axis from 0 to 100 %."""

    def draw(width: float) -> Markup:
        labels = 176.0 if width > NARROW else 0.0
        bar, gap, head = 18.0, 26.0, 0.0 if labels else 20.0
        scale = Scale(0.0, 1.0, labels + 4, width - (120.0 if labels else 14.0))
        heights = [len(bars) * (bar + 4) + head + gap for _, _, bars in rows]
        height = sum(heights) + 26
        children = [
            tag(
                "g",
                _rule(scale(tick), 4, height - 22),
                _text(scale(tick), height - 6, percent(tick), "tick middle"),
            )
            for tick in (0.0, 0.25, 0.5, 0.75, 1.0)
        ]
        top = 8.0
        for (title, note, bars), row_height in zip(rows, heights, strict=True):
            middle = top + head + len(bars) * (bar + 4) / 2
            if labels:
                children.append(_text(labels - 8, middle - 3, title, "label end strong"))
                children.append(_text(labels - 8, middle + 12, note, "label end"))
            else:
                children.append(_text(4, top + 12, f"{title} · {note}", "label strong"))
            for index, one in enumerate(bars):
                children.append(_interval(scale, width, top + head + index * (bar + 4), bar, *one))
            top += row_height
        return svg(width, height, label, children)

    return draw


def smooth(points: Sequence[Point]) -> list[Point]:
    """A straight line fitted around each point, over about a tenth of all; unlike a mean it has no lag at the ends. It
    never leaves the range of the points around: a rate below zero would be nonsense."""
    reach = max(2, round(len(points) / 20))
    smoothed = []
    for index, (position, _) in enumerate(points):
        window = points[max(0, index - reach) : index + reach + 1]
        centre = sum(at for at, _ in window) / len(window)
        level = sum(value for _, value in window) / len(window)
        spread = sum((at - centre) ** 2 for at, _ in window)
        slope = sum((at - centre) * (value - level) for at, value in window) / spread if spread else 0.0
        fitted, around = level + slope * (position - centre), [value for _, value in window]
        smoothed.append((position, max(min(around), min(max(around), fitted))))
    return smoothed


def _frame(series: Sequence[Series], axes: Axes, width: float, bars: int = 0) -> Frame:
    """`bars` columns are as wide as the space between two of them, so the axis begins and ends half a bar outside."""
    values = [value for one in series for _, value in one.points]
    levels = [*values, *axes.references.values()]
    top, bottom = 26.0, axes.height - 34.0
    y = logarithmic(levels, bottom, top) if axes.log else linear(levels, bottom, top, floor=axes.floor)
    left = 12.0 + CHARACTER * max((len(axes.format(tick)) for tick in y.ticks()), default=4)
    margin = 16.0 + BOLD * max((len(one.name) for one in series), default=0)
    positions = [position for one in series for position, _ in one.points]
    low, high = min(positions, default=0.0), max(positions, default=1.0)
    half = ((high - low) / (bars - 1) if bars > 1 else 1.0) / 2 if bars else 0.0
    x = Scale(low - half, high + half, left, width - margin)
    return Frame(width, axes.height, x, y)


def _grid(frame: Frame, axes: Axes) -> Markup:
    lines = []
    for tick in frame.y.ticks():
        at = frame.y(tick)
        lines.append(tag("line", class_="grid", x1=frame.x.start, x2=frame.x.end, y1=at, y2=at))
        lines.append(_text(frame.x.start - 6, at + 4, axes.format(tick), "tick end"))
    for tick in _whole(frame.x.ticks(max(2, int((frame.x.end - frame.x.start) // 70)))):
        lines.append(_text(frame.x(tick), frame.y.start + 17, number(tick), "tick middle"))
    lines.append(tag("line", class_="axis", x1=frame.x.start, x2=frame.x.end, y1=frame.y.start, y2=frame.y.start))
    lines.append(_text(0, 12, axes.y + (" (log scale)" if axes.log else ""), "label"))
    lines.append(_text(frame.x.end, frame.height - 3, axes.x, "label end"))
    return tag("g", lines)


def _whole(ticks: Iterable[float]) -> list[float]:
    return [tick for tick in ticks if abs(tick - round(tick)) < 1e-9]


def _references(frame: Frame, axes: Axes) -> Markup:
    """Dashed levels, the lowest first. The name of each stands above it, and above the names below."""
    children, highest = [], math.inf
    for name, level in sorted(axes.references.items(), key=lambda reference: reference[1]):
        at = frame.y(level)
        highest = min(at - 5, highest - 14)
        children.append(tag("line", class_="reference", x1=frame.x.start, x2=frame.x.end, y1=at, y2=at))
        children.append(_text(frame.x.end - 2, highest, name, "note end"))
    return tag("g", children)


def _line(frame: Frame, series: Series) -> Markup:
    raw = _placed(frame, series)
    radius = 2.2 if series.dots or len(raw) <= FEW_MARKS else 1.5
    dots = [tag("circle", class_=f"dot fill-{series.colour}", cx=x, cy=y, r=radius) for x, y in raw]
    if series.dots:
        return tag("g", dots)
    if not series.smooth:
        return _path(raw, f"line stroke-{series.colour}")
    return tag("g", tag("g", dots, class_="raw"), _path(smooth(raw), f"line stroke-{series.colour}"))


def _placed(frame: Frame, series: Series) -> list[Point]:
    """Where the points stand on the page. Smoothing comes after, so that on a log scale it smooths the logarithms."""
    return [(frame.x(position), frame.y(value)) for position, value in _thin(series.points) if math.isfinite(value)]


def _thin(points: Sequence[Point]) -> Sequence[Point]:
    return points[:: math.ceil(len(points) / MAX_MARKS) or 1]


def _path(points: Sequence[Point], style: str) -> Markup:
    if not points:
        return Markup("")
    steps = " ".join(f"{'M' if index == 0 else 'L'}{x:.1f} {y:.1f}" for index, (x, y) in enumerate(points))
    return tag("path", d=steps, class_=style)


def _end_labels(frame: Frame, axes: Axes, series: Sequence[Series]) -> Markup:
    """Each line's name beside its last value, pushed apart where they would overlap."""
    ends = []
    for one in series:
        placed = _placed(frame, one)
        heights = [y for _, y in (smooth(placed) if one.smooth else placed)]
        if heights and one.name:
            ends.append((_median(heights) if one.dots else heights[-1], one))
    ends.sort(key=lambda end: end[0])
    children, lowest = [], 0.0
    for left, (at, one) in zip(range(len(ends) - 1, -1, -1), ends, strict=True):
        highest = frame.y.start + 4 - 14 * left  # the last one stands at the axis, not among its numbers
        lowest = max(min(at + 4, highest), lowest + 14)
        children.append(_text(frame.x.end + 7, lowest, one.name, f"label strong ink-{one.colour}"))
    return tag("g", children)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _hover(frame: Frame, axes: Axes, series: Sequence[Series]) -> Markup:
    """Invisible columns: each shows a hairline and the values at its place when hovered."""
    said: dict[float, list[str]] = {}
    for one in series:
        for position, value in one.points:
            name = f"{one.name} " if one.name else ""
            said.setdefault(position, []).append(f"{name}{axes.format(value) if math.isfinite(value) else '–'}")
    positions = sorted(said)
    positions = positions[:: math.ceil(len(positions) / MAX_COLUMNS) or 1] if positions else []
    pitch = (frame.x.end - frame.x.start) / max(len(positions), 1)
    return tag(
        "g",
        [_hit(frame, frame.x(at), pitch, f"{axes.x} {number(at)}\n" + "\n".join(said[at])) for at in positions],
    )


def _hit(frame: Frame, centre: float, pitch: float, tip: str) -> Markup:
    top, bottom = frame.y.end, frame.y.start
    return tag(
        "g",
        tag("line", class_="hair", x1=centre, x2=centre, y1=top, y2=bottom),
        tag("rect", x=centre - pitch / 2, y=top, width=pitch, height=bottom - top, data_tip=tip),
        class_="hit",
    )


def _merge_columns(columns: Sequence[tuple[float, Mapping[int, float]]]) -> list[tuple[float, dict[int, float]]]:
    """Neighbouring steps added up until there are at most MAX_COLUMNS, as shares of one."""
    stride = max(1, math.ceil(len(columns) / MAX_COLUMNS))
    merged = []
    for start in range(0, len(columns), stride):
        total: dict[int, float] = {}
        for _, counts in columns[start : start + stride]:
            for level, count in counts.items():
                total[level] = total.get(level, 0.0) + count
        everything = sum(total.values())
        if everything:
            merged.append((columns[start][0], {level: count / everything for level, count in sorted(total.items())}))
    return merged


def _stack(frame: Frame, left: float, pitch: float, shares: Mapping[int, float]) -> Markup:
    rects, below = [], 0.0
    for level, share in shares.items():
        top, bottom = frame.y(below + share), frame.y(below)
        rects.append(
            tag(
                "rect",
                class_=f"fill-level{min(level, 4)}",
                x=left,
                y=top,
                width=max(pitch - (1.0 if pitch > 3 else 0.0), 0.5),
                height=bottom - top,
            )
        )
        below += share
    return tag("g", rects)


def _column_hover(frame: Frame, columns: Sequence[tuple[float, Mapping[int, float]]], pitch: float) -> Markup:
    hits = []
    for index, (position, shares) in enumerate(columns):
        lines = [f"step {number(position)}", *(f"{level} behind: {percent(share)}" for level, share in shares.items())]
        hits.append(_hit(frame, frame.x.start + (index + 0.5) * pitch, pitch, "\n".join(lines)))
    return tag("g", hits)


def _interval(
    scale: Scale, room: float, top: float, height: float, name: str, colour: str, value: float, low: float, high: float
) -> Markup:
    """A bar with its whisker and its words: right of the whisker where there is `room`, else inside the bar."""
    middle, end, left, right = top + height / 2, scale(value), scale(low), scale(high)
    whisker = f"M{left:.1f} {middle:.1f}H{right:.1f}" + "".join(f"M{x:.1f} {middle - 4:.1f}v8" for x in (left, right))
    words = f"{name} {percent(value, 1)}"
    outside = right + 8 + BOLD * len(words) < room
    text_at, anchor = (right + 8, "") if outside else (min(left, end) - 8, "end on-bar")
    return tag(
        "g",
        tag(
            "rect",
            class_=f"bar fill-{colour}",
            x=scale.start,
            y=top,
            width=max(end - scale.start, 1),
            height=height,
            rx=2,
        ),
        tag("path", class_="whisker", d=whisker),
        _text(text_at, middle + 4, words, f"label strong {anchor}"),
        data_tip=f"{name}: {percent(value, 1)}\n95{GAP}% interval {percent(low, 1)} – {percent(high, 1)}",
    )


def _rule(x: float, top: float, bottom: float) -> Markup:
    return tag("line", class_="grid", x1=x, x2=x, y1=top, y2=bottom)


def _text(x: float, y: float, words: str, style: str) -> Markup:
    return tag("text", words, x=x, y=y, class_=style)
