"""Placement: which host gets the next machine. By image, then by load; NoCapacity instead of a host that collapses.

    the host has started this image before     its template is there, or being made: no other fetch, no other boot
    load                                       (running + starting) / capacity; the least loaded of a few that are drawn
    starting                                   each host starts at most `starts` machines at once; the rest waits
    a host that failed                         gets nothing until its pause is over; pauses double up to a minute

A few hosts are drawn among those with room, and compared: with thousands of hosts the choice takes as long as with ten.
Nothing here waits or talks.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from rollmill.errors import NoCapacity

_DRAWN = 4  # hosts that are compared; two would already spread the load well
_WARM_MARGIN = 0.25  # a warm host may be fuller than a cold one by this share of its capacity
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_START_S = 0.5  # a guess for retry-after before any start has been measured


@dataclass(eq=False)
class Place:
    """One host as placement sees it."""

    name: str
    capacity: int  # machines that it holds
    starts: int = 8  # machines that it starts at once
    running: int = 0
    starting: int = 0
    images: set[str] = field(default_factory=set)  # of machines that were placed here
    down_until: float | None = None  # by the caller's clock; None: it answers
    failures: int = 0  # in a row
    position: int = -1  # in the placement's list of hosts with room; -1: it has none

    @property
    def load(self) -> float:
        return (self.running + self.starting) / max(self.capacity, 1)

    @property
    def has_room(self) -> bool:
        free = self.starting < self.starts and self.running + self.starting < self.capacity
        return free and self.down_until is None


class Placement:
    """Not for several threads. The caller says what became of every place it was given: `started` or `failed`."""

    def __init__(self, places: Iterable[Place], *, seed: int = 0) -> None:
        self.places = list(places)
        self._open: list[Place] = []  # those with room
        self._down: list[Place] = []
        for place in self.places:
            self._list(place)
        self._warm: dict[str, list[Place]] = {}
        self._random = random.Random(seed)
        self._start_s = _START_S  # of recent starts, averaged

    def add(self, place: Place) -> None:
        self.places.append(place)
        self._list(place)

    def has_room(self, now: float) -> bool:
        """Whether `take` will succeed. A cheap question: whoever waits asks it first."""
        for place in [place for place in self._down if place.down_until is not None and now >= place.down_until]:
            self._down.remove(place)
            place.down_until = None  # the next start shows whether it answers
            self._list(place)
        return bool(self._open)

    def take(self, image: str, now: float) -> Place:
        """The place for a machine of `image`; it counts as starting. NoCapacity says when to ask again."""
        if not self.has_room(now):
            raise self._no_capacity(now)
        place = self._choose(image)
        place.starting += 1
        self._list(place)
        if image not in place.images:
            place.images.add(image)
            self._warm.setdefault(image, []).append(place)
        return place

    def started(self, place: Place, seconds: float) -> None:
        place.starting -= 1
        place.running += 1
        place.failures = 0
        self._list(place)
        self._start_s += 0.05 * (seconds - self._start_s)

    def failed(self, place: Place, now: float, *, host_is_down: bool) -> None:
        """A start failed. A host that is down gets nothing for a while, and has lost its machines and templates."""
        place.starting -= 1
        self._list(place)
        if host_is_down:
            self.lost(place, now)

    def ended(self, place: Place) -> None:
        place.running = max(place.running - 1, 0)
        self._list(place)

    def learn(self, place: Place, *, capacity: int, starts: int, running: int) -> None:
        """What the host itself says. Others may use it too."""
        place.capacity, place.starts, place.running = capacity, starts, running
        self._list(place)

    def lost(self, place: Place, now: float) -> None:
        """The host does not answer. Its machines end with `ended` as their owners notice."""
        if place.down_until is None:
            self._down.append(place)
        place.down_until = now + min(_FIRST_PAUSE_S * 2**place.failures, _LONGEST_PAUSE_S)
        self._list(place)
        place.failures = min(place.failures + 1, 16)
        for image in place.images:
            self._warm[image].remove(place)
        place.images.clear()

    def _choose(self, image: str) -> Place:
        cold = min(self._draw(self._open), key=_load)
        warm = min(
            (place for place in self._draw(self._warm.get(image, [])) if place.has_room), key=_load, default=cold
        )
        return warm if warm.load <= cold.load + _WARM_MARGIN else cold

    def _draw(self, among: list[Place]) -> list[Place]:
        return self._random.sample(among, _DRAWN) if len(among) > _DRAWN else among

    def _list(self, place: Place) -> None:
        """Put a place into the list of those with room, or take it out, in constant time."""
        if place.has_room and place.position < 0:
            place.position = len(self._open)
            self._open.append(place)
        elif not place.has_room and place.position >= 0:
            last = self._open.pop()
            if last is not place:
                self._open[place.position] = last
                last.position = place.position
            place.position = -1

    def _no_capacity(self, now: float) -> NoCapacity:
        up = [place for place in self.places if place.down_until is None]
        if not up:
            wait = min((place.down_until - now for place in self._down if place.down_until), default=_LONGEST_PAUSE_S)
            return NoCapacity(f"none of {len(self.places)} hosts answers", retry_after_s=wait)
        starting = sum(place.starting for place in up)
        full = sum(place.running + place.starting >= place.capacity for place in up)
        return NoCapacity(
            f"{full} of {len(up)} hosts are full, and {starting} machines are being started",
            retry_after_s=self._start_s,
            hint="add hosts, or ask for fewer machines at once",
        )


def _load(place: Place) -> float:
    return place.load
