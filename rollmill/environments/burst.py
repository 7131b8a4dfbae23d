"""A SIMULATION of many machines asked for at once: the real placement code, and hosts that exist only as numbers.

What is real: `placement.Placement` decides every place, with its limits, its refusals and its pauses for hosts that
failed. What is simulated: the hosts and the clock. The time of a start is drawn from starts that were measured on a
real host (`python -m benchmarks.record_machine_starts`). Assumed, not measured:

- A host with n times the cores of the measured one starts n times as many machines at once, each in the same time.
- Hosts do not slow each other down, and a request reaches a host in `request_s`.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, Field

from rollmill.errors import NoCapacity
from rollmill.machines.host_choice import Place, Placement


class MeasuredStarts(BaseModel):
    """Seconds from request to first command, of one kind of machine on one host."""

    cores: int = Field(ge=1)
    first_s: list[float] = Field(min_length=1)  # of the first machine of an image: its template is made
    start_s: dict[int, list[float]] = Field(min_length=1)  # by how many were started at once

    def draw(self, at_once: float, chance: random.Random) -> float:
        """A start while `at_once` machines are being started on as many cores as were measured."""
        level = min(self.start_s, key=lambda measured: (abs(measured - at_once), measured))
        return chance.choice(self.start_s[level])


class Recording(BaseModel):
    """machine_starts.json"""

    what: str
    host: dict[str, Any]
    kinds: dict[str, MeasuredStarts]


@dataclass(frozen=True)
class Burst:
    """What is asked for, and of which hosts."""

    machines: int = 100_000
    hosts: int = 500
    cores: int = 64  # per host
    capacity: int = 256  # machines that a host holds
    starts_per_core: float = 2.0  # machines that a host starts at once
    images: int = 20
    failing: float = 0.001  # share of starts that fail and are tried again
    lost_hosts: int = 5  # hosts that die during the burst, with their machines
    request_s: float = 0.002
    seed: int = 0


@dataclass
class Outcome:
    seconds: float = 0.0  # simulated, until all machines ran at once
    running: int = 0
    starts: int = 0  # that ended well, those of machines lost later included
    failed: int = 0  # starts that failed
    lost: int = 0  # machines that ran or started on a host that died
    refused: int = 0  # NoCapacity
    templates: int = 0  # that were made: one per image and host
    utilisation: float = 0.0  # busy share of all places for starts, over the whole burst
    decision_us: float = 0.0  # real microseconds of the placement code per machine
    waits: list[float] = field(default_factory=list)  # per machine, from the burst's beginning until it ran
    by_second: list[int] = field(default_factory=list)  # machines that had started in each second

    @property
    def starts_per_s(self) -> float:
        return self.starts / self.seconds if self.seconds else 0.0

    def wait(self, share: float) -> float:
        ordered = sorted(self.waits)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class _Host:
    """What a simulated host has: machines, and whether it is alive."""

    def __init__(self) -> None:
        self.alive = True
        self.running: set[int] = set()
        self.starting: set[int] = set()
        self.templates: dict[str, float] = {}  # image → when it is there


class Simulation:
    def __init__(self, burst: Burst, measured: MeasuredStarts) -> None:
        self._burst, self._measured = burst, measured
        self._random = random.Random(burst.seed)
        starts = max(1, round(burst.cores * burst.starts_per_core))
        places = [Place(str(number), burst.capacity, starts) for number in range(burst.hosts)]
        self._placement = Placement(places, seed=burst.seed)
        self._hosts = {place.name: _Host() for place in places}
        self._waiting = deque(range(burst.machines))
        self._events: list[tuple[float, int, str, Place | None, int]] = []  # time, order, what, place, machine
        self._order = 0
        self._seconds: dict[int, float] = {}  # that the latest start of a machine takes
        self._busy_s = 0.0  # of all places for starts
        self._deciding_s = 0.0
        self.outcome = Outcome()

    def run(self) -> Outcome:
        burst, outcome = self._burst, self.outcome
        for dying in self._random.sample(self._placement.places, min(burst.lost_hosts, burst.hosts)):
            self._at(self._random.uniform(0.5, 5.0), "dies", dying)
        now = 0.0
        self._place(now)
        while outcome.running < burst.machines and self._events:
            now, _, what, place, machine = heapq.heappop(self._events)
            if what == "dies":
                assert place is not None
                self._lose(place, now)
            elif what == "started" and place is not None:
                self._finish(place, machine, now)
            elif what == "failed" and place is not None:
                self._fail(place, machine, now)
            self._place(now)
        outcome.seconds = now
        slots = sum(place.starts for place in self._placement.places) * now
        outcome.utilisation = self._busy_s / slots if slots else 0.0
        outcome.decision_us = 1e6 * self._deciding_s / max(outcome.starts + outcome.failed, 1)
        return outcome

    def _at(self, moment: float, what: str, place: Place | None = None, machine: int = -1) -> None:
        self._order += 1
        heapq.heappush(self._events, (moment, self._order, what, place, machine))

    def _image(self, machine: int) -> str:
        return str(machine % self._burst.images)

    def _place(self, now: float) -> None:
        """Place machines until none waits or no host has room. What is left waits for the next event."""
        while self._waiting and (self._placement.has_room(now) or not self._events):
            image = self._image(self._waiting[0])
            began = time.perf_counter()
            try:
                place = self._placement.take(image, now)
            except NoCapacity as error:
                self.outcome.refused += 1
                return self._at(now + max(error.retry_after_s, 0.01), "again")
            finally:
                self._deciding_s += time.perf_counter() - began
            self._start(place, self._waiting.popleft(), image, now)

    def _start(self, place: Place, machine: int, image: str, now: float) -> None:
        host = self._hosts[place.name]
        host.starting.add(machine)
        if not host.alive:
            return self._at(now + 1.0, "failed", place, machine)  # nobody answers
        at_once = place.starting * self._measured.cores / self._burst.cores
        seconds = self._burst.request_s + self._measured.draw(at_once, self._random)
        if image not in host.templates:  # those that follow meanwhile wait for it
            host.templates[image] = now + self._random.choice(self._measured.first_s)
            self.outcome.templates += 1
        seconds += max(host.templates[image] - now, 0.0)
        fails = self._random.random() < self._burst.failing
        self._busy_s += seconds
        self._seconds[machine] = seconds
        self._at(now + seconds, "failed" if fails else "started", place, machine)

    def _finish(self, place: Place, machine: int, now: float) -> None:
        host = self._hosts[place.name]
        if machine not in host.starting:
            return  # the host died meanwhile
        host.starting.remove(machine)
        host.running.add(machine)
        outcome = self.outcome
        self._placement.started(place, self._seconds.pop(machine))
        outcome.starts += 1
        outcome.running += 1
        outcome.waits.append(now)
        outcome.by_second += [0] * (int(now) + 1 - len(outcome.by_second))
        outcome.by_second[int(now)] += 1

    def _fail(self, place: Place, machine: int, now: float) -> None:
        host = self._hosts[place.name]
        if machine not in host.starting:
            return
        host.starting.remove(machine)
        self.outcome.failed += 1
        self._placement.failed(place, now, host_is_down=not host.alive)
        self._waiting.append(machine)

    def _lose(self, place: Place, now: float) -> None:
        """A host dies: its machines wait again. Placement learns of it once, as from a connection that breaks."""
        host = self._hosts[place.name]
        host.alive = False
        self.outcome.lost += len(host.running) + len(host.starting)
        self.outcome.running -= len(host.running)
        self._waiting.extend([*host.running, *host.starting])
        for _ in host.running:
            self._placement.ended(place)
        for _ in host.starting:
            self._placement.failed(place, now, host_is_down=False)
        host.running.clear()
        host.starting.clear()
        self._placement.lost(place, now)
