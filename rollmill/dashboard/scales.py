"""Turns numbers into places on an axis, and into short text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Format = Callable[[float], str]
GAP = "\N{NO-BREAK SPACE}"  # between a number and its unit


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] of the data to [start, end] of the drawing, linearly or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return self.start + (value - low) / ((high - low) or 1.0) * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        if self.logarithmic:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            stride = max(1, math.ceil((last - first + 1) / count))
            return [10.0**power for power in range(first, last + 1, stride)]
        step = nice_step((self.high - self.low) / max(count, 1))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def nice_step(raw: float) -> float:
    """The round step (1, 2, 2.5 or 5 times a power of ten) just above `raw`."""
    if not raw > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= raw * (1 - 1e-9))


def linear(values: Iterable[float], start: float, end: float, *, floor: float | None = None, ticks: int = 5) -> Scale:
    """A linear scale over `values`, widened to round numbers; `floor` is a value it must reach down to."""
    finite = [value for value in values if math.isfinite(value)]
    if floor is not None:
        finite.append(floor)
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if high - low < 1e-12:
        high = low + (abs(low) or 1.0)
    step = nice_step((high - low) / ticks)
    return Scale(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, start, end)


def logarithmic(values: Iterable[float], start: float, end: float) -> Scale:
    """A scale of whole powers of ten over the positive `values`."""
    positive = [value for value in values if math.isfinite(value) and value > 0]
    low = math.floor(math.log10(min(positive, default=1.0)) + 1e-9)
    high = math.ceil(math.log10(max(positive, default=10.0)) - 1e-9)
    return Scale(10.0**low, 10.0 ** max(high, low + 1), start, end, logarithmic=True)


def percent(value: float, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f}{GAP}%"


def number(value: float) -> str:
    """At most three significant digits below a thousand; thin spaces between thousands above."""
    if not math.isfinite(value):
        return "–"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}").replace("-", "−")
    if abs(value) < 1e-3:
        return power(value)
    return f"{value:.3g}".replace("-", "−")


def power(value: float) -> str:
    """Scientific notation as people write it: 4.2·10⁻⁶."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "–"
    exponent = math.floor(math.log10(abs(value)) + 1e-12)
    mantissa = f"{value / 10.0**exponent:.2g}"
    raised = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{raised}" if mantissa == "1" else f"{mantissa}·10{raised}"


def size(value: float) -> str:
    """Bytes in decimal units."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{GAP}{unit}"
    return f"{value:.0f}{GAP}B"


def clock_ticks(low: float, high: float, count: int) -> list[float]:
    """Ticks at usual times: every few seconds, half minutes, minutes, hours."""
    steps = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400)
    step = next((step for step in steps if (high - low) / step <= count), nice_step((high - low) / count))
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def clock(value: float) -> str:
    """Time since the start: 1:05, 1:05.5 or 2:00:30."""
    seconds = round(value, 1)
    whole = f"{int(seconds % 60):02}" if seconds % 1 == 0 else f"{seconds % 60:04.1f}"
    minutes = int(seconds // 60)
    return f"{minutes}:{whole}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{whole}"


def duration(value: float) -> str:
    if not math.isfinite(value):
        return "–"
    whole = round(value)
    if whole >= 3600:
        return f"{whole // 3600}{GAP}h{GAP}{whole % 3600 // 60:02}{GAP}min"
    if whole >= 120:
        return f"{whole // 60}{GAP}min{GAP}{whole % 60:02}{GAP}s"
    if value >= 1 or value == 0:
        return f"{value:.3g}{GAP}s"
    return f"{value * 1000:.3g}{GAP}ms"


def moment(at: float) -> str:
    """Date and time in UTC of seconds since the epoch."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def clock_time(at: float) -> str:
    """The time of day here of seconds since the epoch."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def minus(text: str) -> str:
    """With the sign for minus in the place of the hyphen."""
    return text.replace("-", "−")


def signed(share: float) -> str:
    """A difference of shares in points: +4.2."""
    return minus(f"{100 * share:+.1f}")
