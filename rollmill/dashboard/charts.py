"""Charts as inline SVG: no library, no script, colours from the page's style sheet so that light and dark both work.

A chart is a function of its width, drawn once for wide pages and once for narrow ones: scaling one drawing down would
make its text unreadable on a phone. Places are computed here; `templates/charts.html` draws them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from rollmill.dashboard.render import render
from rollmill.dashboard.scales import GAP, Format, Scale, linear, logarithmic, number, percent

Draw = Callable[[float, str], Markup]  # by its width, and what a screen reader says
Point = tuple[float, float]
Rect = tuple[str, float, float, float, float] | tuple[str, float, float, float, float, str]  # style, place, size, tip
Text = tuple[float, float, str, str]  # place, words, style
Bar = tuple[str, str, float, float, float]  # name, colour, value, low, high
WIDE, NARROW = 540.0, 340.0
CHARACTER, BOLD = 6.4, 7.4  # estimated width of a character of chart text, to avoid overlaps
MAX_COLUMNS = 160  # of hover columns; more cannot be pointed at
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


@dataclass(frozen=True)
class Frame:
    """Where the data goes: scales of both axes inside the margins."""

    width: float
    height: float
    x: Scale
    y: Scale
    axes: Axes

    @property
    def style(self) -> str:
        return "wide" if self.width > NARROW else "narrow"

    def x_ticks(self) -> list[float]:
        """Whole numbers: steps and versions have no halves."""
        ticks = self.x.ticks(max(2, int((self.x.end - self.x.start) // 70)))
        return [tick for tick in ticks if abs(tick - round(tick)) < 1e-9]

    def references(self) -> list[tuple[str, float, float]]:
        """Dashed levels, the lowest first. The name of each stands above it, and above the names below."""
        found, highest = [], math.inf
        for name, level in sorted(self.axes.references.items(), key=lambda reference: reference[1]):
            highest = min(self.y(level) - 5, highest - 14)
            found.append((name, self.y(level), highest))
        return found


@dataclass(frozen=True)
class _PlacedSeries:
    """A series in places of the drawing."""

    series: Series
    dots: Sequence[Point]
    line: Sequence[Point]

    @property
    def colour(self) -> str:
        return self.series.colour

    @property
    def radius(self) -> float:
        return 2.2 if self.series.dots or len(self.dots) <= FEW_MARKS else 1.5

    @property
    def path(self) -> str:
        return " ".join(f"{'L' if index else 'M'}{x:.1f} {y:.1f}" for index, (x, y) in enumerate(self.line))

    @property
    def end(self) -> float | None:
        """The height at which its name stands: that of its last point, or of the median of a cloud."""
        heights = [y for _, y in self.line or self.dots]
        if not heights or not self.series.name:
            return None
        return sorted(heights)[len(heights) // 2] if self.series.dots else heights[-1]


def line_chart(series: Sequence[Series], axes: Axes) -> Draw:
    """Lines over steps. The name of each stands at its end."""

    def draw(width: float, label: str) -> Markup:
        frame = _frame(series, axes, width)
        drawn = [_place(frame, one) for one in series]
        columns, pitch = _hover(frame, axes, series)
        return render("charts", "lines", frame, label, drawn, _end_labels(frame, drawn), columns, pitch)

    return draw


def stacked_chart(columns: Sequence[tuple[float, Mapping[int, float]]], axes: Axes) -> Draw:
    """A share of 100 % by whole-number level (0, 1, 2 …) at each step. Levels above 4 share the darkest colour."""

    def draw(width: float, label: str) -> Markup:
        merged = _merge_columns(columns)
        frame = _frame([Series("", [(at, 1.0) for at, _ in merged], "")], axes, width, bars=len(merged))
        pitch = (frame.x.end - frame.x.start) / max(len(merged), 1)
        bars: list[Rect] = []
        hits = []
        for index, (position, shares) in enumerate(merged):
            left, below, tip = frame.x.start + index * pitch, 0.0, [f"step {number(position)}"]
            for level, share in shares.items():
                top, bottom = frame.y(below + share), frame.y(below)
                wide = max(pitch - (1.0 if pitch > 3 else 0.0), 0.5)
                bars.append((f"fill-level{min(level, 4)}", left, top, wide, bottom - top))
                tip.append(f"{level} behind: {percent(share)}")
                below += share
            hits.append((left + pitch / 2, "\n".join(tip)))
        return render("charts", "bars", frame, label, bars, hits, pitch)

    return draw


def column_chart(columns: Sequence[tuple[float, float, str]], axes: Axes) -> Draw:
    """One bar per version: (position, value, colour), with dashed levels to compare it to."""

    def draw(width: float, label: str) -> Markup:
        positions = [position for position, _, _ in columns]
        span = max(positions) - min(positions)
        series = [Series("", [(position, value) for position, value, _ in columns], "")]
        frame = _frame(series, axes, width, bars=int(span) + 1)
        pitch = (frame.x.end - frame.x.start) / (span + 1)
        bars: list[Rect] = []
        for position, value, colour in columns[:: math.ceil(len(columns) / MAX_MARKS)]:
            left, top = frame.x(position) - 0.4 * pitch, frame.y(value)
            tip = f"{axes.x} {number(position)}\n{axes.y} {axes.format(value)}"
            size = max(0.8 * pitch, 0.6), max(frame.y.start - top, 0.5)
            bars.append((f"bar fill-{colour}", left, top, *size, tip))
        return render("charts", "bars", frame, label, bars)

    return draw


def interval_chart(rows: Sequence[tuple[str, str, Sequence[Bar]]]) -> Draw:
    """Rows of bars with whiskers, (title, note, bars), on one axis from 0 to 100 %."""

    def draw(width: float, label: str) -> Markup:
        labels = 176.0 if width > NARROW else 0.0
        height, gap, head = 18.0, 26.0, 0.0 if labels else 20.0
        scale = Scale(0.0, 1.0, labels + 4, width - (120.0 if labels else 14.0))
        titles: list[Text] = []
        drawn = []
        top = 8.0
        for title, note, bars in rows:
            middle = top + head + len(bars) * (height + 4) / 2
            if labels:
                titles.append((labels - 8, middle - 3, title, "label end strong"))
                titles.append((labels - 8, middle + 12, note, "label end"))
            else:
                titles.append((4, top + 12, f"{title} · {note}", "label strong"))
            for index, bar in enumerate(bars):
                drawn.append(_interval(scale, width, top + head + index * (height + 4), height, bar))
            top += len(bars) * (height + 4) + head + gap
        frame = Frame(width, top + 18, scale, scale, Axes("", ""))
        return render("charts", "intervals", frame, label, titles, drawn)

    return draw


def _interval(scale: Scale, width: float, top: float, height: float, bar: Bar) -> dict[str, float | str]:
    """A bar with its whisker and its words: right of the whisker where there is room, else inside the bar."""
    name, colour, value, low, high = bar
    middle, end, left, right = top + height / 2, scale(value), scale(low), scale(high)
    words = f"{name} {percent(value, 1)}"
    outside = right + 8 + BOLD * len(words) < width
    return {
        "colour": colour,
        "top": top,
        "height": height,
        "width": max(end - scale.start, 1.0),
        "whisker": f"M{left:.1f} {middle:.1f}H{right:.1f}M{left:.1f} {middle - 4:.1f}v8M{right:.1f} {middle - 4:.1f}v8",
        "words": words,
        "text_at": right + 8 if outside else min(left, end) - 8,
        "anchor": "" if outside else "end on-bar",
        "tip": f"{name}: {percent(value, 1)}\n95{GAP}% interval {percent(low, 1)} – {percent(high, 1)}",
    }


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
    levels = [*(value for one in series for _, value in one.points), *axes.references.values()]
    height, top = 220.0, 26.0
    bottom = height - 34.0
    y = logarithmic(levels, bottom, top) if axes.log else linear(levels, bottom, top, floor=axes.floor)
    left = 12.0 + CHARACTER * max((len(axes.format(tick)) for tick in y.ticks()), default=4)
    margin = 16.0 + BOLD * max((len(one.name) for one in series), default=0)
    positions = [position for one in series for position, _ in one.points]
    low, high = min(positions, default=0.0), max(positions, default=1.0)
    half = ((high - low) / (bars - 1) if bars > 1 else 1.0) / 2 if bars else 0.0
    return Frame(width, height, Scale(low - half, high + half, left, width - margin), y, axes)


def _place(frame: Frame, series: Series) -> _PlacedSeries:
    """Smoothing comes after placing, so that on a log scale it smooths the logarithms."""
    points = series.points[:: math.ceil(len(series.points) / MAX_MARKS) or 1]
    placed = [(frame.x(position), frame.y(value)) for position, value in points if math.isfinite(value)]
    if series.dots:
        return _PlacedSeries(series, placed, ())
    return _PlacedSeries(series, placed, smooth(placed)) if series.smooth else _PlacedSeries(series, (), placed)


def _end_labels(frame: Frame, drawn: Sequence[_PlacedSeries]) -> list[tuple[float, str, str]]:
    """The name of each line beside its last value, pushed apart where they would overlap."""
    ends = sorted((one.end, one.series.name, one.colour) for one in drawn if one.end is not None)
    labels, lowest = [], 0.0
    for left, (at, name, colour) in zip(range(len(ends) - 1, -1, -1), ends, strict=True):
        highest = frame.y.start + 4 - 14 * left  # the last one stands at the axis, not among its numbers
        lowest = max(min(at + 4, highest), lowest + 14)
        labels.append((lowest, name, colour))
    return labels


def _hover(frame: Frame, axes: Axes, series: Sequence[Series]) -> tuple[list[tuple[float, str]], float]:
    """The values at each place, and how wide a place is."""
    said: dict[float, list[str]] = {}
    for one in series:
        for position, value in one.points:
            name = f"{one.name} " if one.name else ""
            said.setdefault(position, []).append(f"{name}{axes.format(value) if math.isfinite(value) else '–'}")
    positions = sorted(said)
    positions = positions[:: math.ceil(len(positions) / MAX_COLUMNS) or 1]
    columns = [(frame.x(at), "\n".join([f"{axes.x} {number(at)}", *said[at]])) for at in positions]
    return columns, (frame.x.end - frame.x.start) / max(len(positions), 1)


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
