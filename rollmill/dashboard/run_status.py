"""What runs and what serves: processes from the locks of a run, engines from its events, channels from its store."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollmill.dashboard.figures import Event, finite
from rollmill.errors import RollmillError
from rollmill.runs.lock import holder
from rollmill.runs.run import RunDirectory
from rollmill.runs.status import service_paths
from rollmill.storage.objects import Objects
from rollmill.weights.reading.channels import ChannelEntry, Channels

SILENT_S = 10.0  # an engine reports about once a second while it works
MOST_ENTRIES = 20  # of a channel's history
ORDER = ("supervisor", "trainer", "dispatcher", "gateway", "store", "engine")


@dataclass(frozen=True)
class Process:
    name: str
    pid: int | None  # None: it does not run
    since: float | None  # seconds since the epoch
    restarts: int


@dataclass(frozen=True)
class ServingEngine:
    name: str
    region: str
    version: str
    since: float | None  # when it switched to the version
    running: int
    waiting: int
    alive: bool


@dataclass(frozen=True)
class Channel:
    name: str
    entries: Sequence[ChannelEntry]  # the newest first


def read_processes(run: RunDirectory, restarts: Iterable[Event]) -> list[Process]:
    """Every role that the run or a service of it has had on this machine."""
    counts = Counter(str(event.get("target")) for event in restarts)
    found = [*_locked(run.path, "", counts)]
    for path in service_paths(run):
        service = [*_locked(path, f"{path.name}/", counts)]
        found += service if any(process.pid is not None for process in service) else []
    return found


def _locked(directory: Path, prefix: str, restarts: Counter[str]) -> Iterator[Process]:
    def rank(name: str) -> tuple[int, str]:
        return next((place for place, role in enumerate(ORDER) if name.startswith(role)), len(ORDER)), name

    for name in sorted((path.name for path in (directory / "locks").glob("*")), key=rank):
        by = holder(directory, name)
        count = restarts[f"{prefix}{name}"]
        yield Process(f"{prefix}{name}", by.pid if by else None, by.since if by else None, count)


def read_engines(events: Iterable[Event], processes: Sequence[Process], now: float) -> list[ServingEngine]:
    """The version that each engine switched to last, and how busy it is. `now`: seconds since the epoch."""
    applies: dict[str, Event] = {}
    reports: dict[str, Event] = {}
    for event in events:
        name = str(event.get("engine"))
        if event["kind"] == "apply":
            applies[name] = event
        elif event["kind"] == "engine":
            reports[name] = event
    alive = {process.name for process in processes if process.pid is not None}
    found = []
    for name, event in sorted(applies.items()):
        if "/" in name and name not in alive:
            continue  # of a service that has ended
        report = reports.get(name, {})
        fresh = name in alive and now - finite(report.get("at"), 0.0) < SILENT_S
        running, waiting = (int(finite(report.get(key), 0.0)) if fresh else 0 for key in ("running", "waiting"))
        version = f"{event.get('line')}@{event.get('version')}"
        region = str(event.get("region") or "–")
        found.append(ServingEngine(name, region, version, event["at"], running, waiting, name in alive))
    return found


def read_channels(objects: Objects) -> list[Channel]:
    """The newest entries of every channel. A damaged one is left out: `rollmill weights channel history` says why."""
    channels, found = Channels(objects), []
    for name in channels.names():
        with contextlib.suppress(RollmillError):
            found.append(Channel(name, channels.history(name, MOST_ENTRIES)[::-1]))
    return found
