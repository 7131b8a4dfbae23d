"""Arrivals: how versions reached their regions, computed from events, for a dashboard. Pure; reads nothing itself.

One row per version, as a JSON object:

    line, version, step, digest      what it is
    encoding                         snapshot or delta, as it was published
    bytes, delta_bytes, full_bytes   published in all; of the delta alone (null: none); of the weights themselves
    ratio, density                   full size over what an engine one version behind fetches (null: nothing);
                                     share of elements changed
    published_at, publish_seconds    seconds since the epoch; how long publishing took
    regions                          by name:
        arrived_seconds              from publishing until the region's store had it; null for the home region
        serving_seconds              … until its first engine served it
        all_serving_seconds          … until the last of the engines that have, did
        engines                      how many do
        pause_ms_max                 the longest that decoding stood still for it
        bytes                        that came into the region's store; without that event, what its engines read
        skewed                       a host's clock ran behind the trainer's: the negative time is shown as 0

Events come from files of several processes: late, twice, out of order, or never. The order of folding does not matter,
and folding an event again changes nothing. Unknown values are null. A version whose `publish` event was lost still has
a row; its publishing time is then what the engines reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollmill.types import Version

Event = Mapping[str, Any]
KINDS = frozenset({"publish", "arrive", "apply"})
_LARGEST_NUMBER = 1 << 63  # refuses NaN, infinities and integers that are no float


@dataclass
class _Region:
    arrive: Event | None = None
    applies: dict[str, Event] = field(default_factory=dict)  # by engine, the first of each
    pause_seconds: float | None = None


@dataclass
class _Row:
    publish: Event | None = None
    regions: dict[str, _Region] = field(default_factory=dict)
    written: dict[str, Any] | None = None  # as it was last returned


class Arrivals:
    """Folds events; `fold` returns the rows that they changed. Keeps the newest `keep` versions."""

    def __init__(self, keep: int = 4096) -> None:
        self._rows: dict[Version, _Row] = {}
        self._keep = keep

    def fold(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """The rows of the versions these events are about that are not as they were, in the order of publishing."""
        touched: dict[Version, _Row] = {}
        for event in events:
            version = _version(event)
            if version is not None:
                touched[version] = self._rows.setdefault(version, _Row())
                _add(touched[version], event)
        changed = []
        for version, row in touched.items():
            now = _write(version, row)
            if now != row.written:
                row.written = now
                changed.append(now)
        self._forget()
        return _in_order(changed)

    def rows(self) -> list[dict[str, Any]]:
        return _in_order([row.written for row in self._rows.values() if row.written is not None])

    def _forget(self) -> None:
        if len(self._rows) > self._keep:
            order = {(row["line"], row["version"]): place for place, row in enumerate(self.rows())}
            oldest = sorted(self._rows, key=lambda version: order[version.line, version.number])
            for version in oldest[: len(self._rows) - self._keep]:
                del self._rows[version]


def _version(event: Event) -> Version | None:
    line, number = event.get("line"), event.get("version")
    if event.get("kind") not in KINDS or not isinstance(line, str) or type(number) is not int:
        return None
    if _number(event, "at") is None:
        return None
    return Version(line, number)


def _add(row: _Row, event: Event) -> None:
    if event["kind"] == "publish":
        row.publish = _first(row.publish, event)
        return
    region = row.regions.setdefault(str(event.get("region") or "unknown"), _Region())
    if event["kind"] == "arrive":
        region.arrive = _first(region.arrive, event)
        return
    engine = str(event.get("engine") or "unknown")
    # an engine that was started again applies a version again; it served it when it did so first
    region.applies[engine] = _first(region.applies.get(engine), event)
    pause = _number(event, "pause_seconds")
    if pause is not None:
        region.pause_seconds = max(pause, region.pause_seconds or 0.0)


def _first(known: Event | None, event: Event) -> Event:
    return event if known is None or _at(event) < _at(known) else known


def _write(version: Version, row: _Row) -> dict[str, Any]:
    publish: Event = row.publish or {}
    size, delta, full = (_number(publish, key) for key in ("bytes", "delta_bytes", "full_bytes"))
    fetched = delta if delta is not None else size
    published_at = _published_at(row)
    return {
        "line": version.line,
        "version": version.number,
        "step": _number(publish, "step"),
        "digest": _digest(row),
        "encoding": publish.get("encoding"),
        "bytes": size,
        "delta_bytes": delta,
        "full_bytes": full,
        "ratio": full / fetched if full is not None and fetched else None,
        "density": _number(publish, "density"),
        "published_at": published_at,
        "publish_seconds": _number(publish, "seconds"),
        "regions": {name: _write_region(region, published_at) for name, region in sorted(row.regions.items())},
    }


def _write_region(region: _Region, published_at: float | None) -> dict[str, Any]:
    applied = [_since(event, published_at) for event in region.applies.values()]
    serving = [seconds for seconds in applied if seconds is not None]
    arrived = _since(region.arrive, published_at) if region.arrive else None
    known = [*serving, *([] if arrived is None else [arrived])]
    if region.arrive is not None:
        size = _number(region.arrive, "bytes")
    else:
        read = [_number(event, "bytes") for event in region.applies.values()]
        size = sum(one for one in read if one is not None)
    return {
        "arrived_seconds": None if arrived is None else max(arrived, 0.0),
        "serving_seconds": max(min(serving), 0.0) if serving else None,
        "all_serving_seconds": max(*serving, 0.0) if serving else None,
        "engines": len(region.applies),
        "pause_ms_max": None if region.pause_seconds is None else 1000 * region.pause_seconds,
        "bytes": size,
        "skewed": any(seconds < 0 for seconds in known),
    }


def _published_at(row: _Row) -> float | None:
    if row.publish is not None:
        return _at(row.publish)
    applies = [event for region in row.regions.values() for event in region.applies.values()]
    arrives = [region.arrive for region in row.regions.values() if region.arrive is not None]
    told = [_at(event) - since for event in (*applies, *arrives) if (since := _told_since(event)) is not None]
    return min(told) if told else None


def _since(event: Event, published_at: float | None) -> float | None:
    """Seconds after publishing, as the host that saw it says; negative when its clock runs behind the trainer's."""
    told = _told_since(event)
    if told is not None:
        return told
    return None if published_at is None else _at(event) - published_at


def _told_since(event: Event) -> float | None:
    return _number(event, "since_publish_seconds")


def _digest(row: _Row) -> str | None:
    events = [row.publish, *(event for region in row.regions.values() for event in region.applies.values())]
    found = (event["digest"] for event in events if event and isinstance(event.get("digest"), str))
    return next(found, None)


def _number(event: Event, key: str) -> Any:
    """The number an event holds; events are read back from files, so anything may stand there."""
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < _LARGEST_NUMBER else None


def _at(event: Event) -> float:
    return float(event["at"])


def _in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines by when they began, versions by number: two trainers, one after the other, may not agree on the time."""
    began: dict[str, float] = {}
    for row in rows:
        at = row["published_at"]
        began[row["line"]] = min(began.get(row["line"], math.inf), math.inf if at is None else at)
    return sorted(rows, key=lambda row: (began[row["line"]], row["line"], row["version"]))
