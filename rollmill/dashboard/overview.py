"""The overview as it is now. It is made on request, and viewers share one copy.

What runs and waits is read again at most once a second. Charts and figures are made again only when there are new
events, and then take at most a twentieth of one core, however long the run is: they are kept for SHARE times as long as
it took to make them.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from markupsafe import Markup

from rollmill.dashboard.chapters import chapters
from rollmill.dashboard.costs import costs_chapter
from rollmill.dashboard.figures import Event, figures, finite
from rollmill.dashboard.loans import LOANS, loans_chapter, read_loans
from rollmill.dashboard.queries import (
    Costs,
    Queue,
    VersionTraffic,
    read_cycles,
    read_queue,
    read_recent,
    read_served,
    run_keys,
)
from rollmill.dashboard.render import render
from rollmill.dashboard.report import every_figure, incidents, lead, tiles
from rollmill.dashboard.run_source import Source
from rollmill.dashboard.run_status import Channel, read_channels, read_engines, read_processes
from rollmill.dashboard.watch import Watch
from rollmill.feedback.collect import PRODUCTION
from rollmill.runs.cycle_journal import Move
from rollmill.runs.run import RunDirectory
from rollmill.runs.status import RunState, state_of
from rollmill.training.stage import RolloutSettings
from rollmill.types import Version
from rollmill.weights.reading.weight_store import WeightStore

FRESH_S = 1.0  # a younger copy is not made again
SHARE = 20.0
USERS_S = 3.0  # conversations of production are counted again this seldom
SLOW_S = 10.0  # what has to be listed in an object store is read this seldom
MOST_RECENT = 1000  # trajectories per run of a database
SHOWN_KEYS = 50
T = TypeVar("T")
Parts = dict[str, Markup]


@dataclass(frozen=True)
class Snapshot:
    body: Markup
    etag: str
    made_at: float  # monotonic


class Live:
    """Thread-safe."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._watch = Watch(source.run) if source.run is not None else None
        self._costs: dict[str, Costs] = {}
        self._seldom: dict[str, tuple[float, object]] = {}
        self._lock = threading.Lock()
        self._made: Snapshot | None = None
        self._drawn: Parts = {}  # charts and figures
        self._undrawn, self._draw_at = True, 0.0

    def snapshot(self) -> Snapshot:
        with self._lock:  # others wait for the one that makes it
            now = time.monotonic()
            if self._made is None or now - self._made.made_at >= FRESH_S:
                body = self._of_database() if self._watch is None else self._of_run(self._watch)
                etag = f'"{hashlib.sha256(body.encode()).hexdigest()[:32]}"'
                self._made = Snapshot(body, etag, time.monotonic())
            return self._made

    def _of_database(self) -> Markup:
        source = self._source
        keys = run_keys(source.database, source.only)
        found = read_recent(source.database, keys[-SHOWN_KEYS:], MOST_RECENT)
        return _part(
            "body",
            {
                "head": _part("of_database", source.name, len(keys)),
                "cycle": _part("cycles", self._cycles()),
                "runs": _part("recent", found, MOST_RECENT) if found else Markup(""),
                "regions": _part("regions", [], self._channels(), [], {}),
            },
        )

    def _of_run(self, watch: Watch) -> Markup:
        run = self._source.run
        assert run is not None
        self._undrawn |= watch.poll()
        processes = read_processes(run, watch.all("restart"))
        engines = read_engines(watch.all("apply", "engine"), processes, time.time())
        running = {process.name: process.since for process in processes if process.since is not None}
        loans = read_loans(watch.all(*LOANS), running)
        lent = {loan.engine: loan.line for loan in loans if loan.until is None}
        state = self._now_and_then("state", lambda: state_of(run), 2 * FRESH_S)
        stage, queue, costs = self._work(run, state)
        if self._undrawn and time.monotonic() >= self._draw_at:
            started = time.thread_time()
            self._drawn = self._draw(run, watch, stage, costs)
            self._undrawn, self._draw_at = False, time.monotonic() + SHARE * (time.thread_time() - started)
        drawn = dict(self._drawn)
        evaluation = _unfinished(next(reversed([*watch.all("eval_progress")]), {}))
        resume = f"rollmill train --resume {run.path}"
        served = f"/trajectories?run={PRODUCTION}"
        return _part(
            "body",
            {
                "head": _part(
                    "of_run", run.config.name, state, evaluation, resume, drawn.pop("lead"), drawn.pop("tiles")
                ),
                "cycle": _part("cycles", self._cycles()),
                "users": _part("users", self._served(run), MOST_RECENT, served),
                "learning": drawn.pop("learning"),
                "solving": drawn.pop("solving"),
                "queue": _part("queue", stage, queue, engines),
                "loans": loans_chapter(loans),
                "processes": _part("processes", processes),
                "costs": drawn.pop("costs"),
                "regions": _part("regions", engines, self._channels(), self._heads(run), lent),
                **drawn,
            },
        )

    def _draw(self, run: RunDirectory, watch: Watch, stage: str, costs: Costs | None) -> Parts:
        events = watch.events()
        summary = figures(events, name=run.config.name, seed=run.config.seed)
        begun = [event["at"] for event in watch.all("phase") if (event["phase"], event["state"]) == (stage, "start")]
        trained = {int(event["step"]): event["at"] for event in watch.all("step") if event.get("stage") == stage}
        trained |= {0: begun[0]} if begun else {}
        return {
            "lead": lead(summary) if summary["gain"] is not None else Markup(""),
            "tiles": tiles(summary),
            "costs": costs_chapter(costs.steps, trained, watch.all("busy")) if costs is not None else Markup(""),
            **chapters(events, summary),
            "incidents": incidents(events),
            "figures": every_figure(summary),
        }

    def _work(self, run: RunDirectory, state: RunState) -> tuple[str, Queue | None, Costs | None]:
        """The queue and the costs of the stage that is trained now, or of the last one that learns from rollouts."""
        playing = [stage for stage in run.config.stages if isinstance(stage, RolloutSettings)]
        stage = next((stage for stage in playing if stage.name == state.stage), playing[-1] if playing else None)
        if stage is None or not self._source.exists:
            return (stage.name if stage else ""), None, None
        key = run.stage_key(stage)
        costs = self._costs.setdefault(key, Costs(key))
        costs.read(self._source.database)
        assert isinstance(stage, RolloutSettings)
        return stage.name, read_queue(self._source.database, key, stage.pace(stage.steps)), costs

    def _cycles(self) -> dict[int, list[Move]]:
        only = self._source.only
        return read_cycles(self._source.database, only) if only is not None and self._source.exists else {}

    def _served(self, run: RunDirectory) -> dict[str, VersionTraffic]:
        if not self._source.exists:
            return {}
        return self._now_and_then("users", lambda: read_served(self._source.database, run.id, MOST_RECENT), USERS_S)

    def _channels(self) -> list[Channel]:
        objects = self._source.objects
        return self._now_and_then("channels", lambda: read_channels(objects), SLOW_S) if objects is not None else []

    def _heads(self, run: RunDirectory) -> list[Version]:
        objects = self._source.objects
        if objects is None:
            return []
        store, form = WeightStore(objects), run.config.form

        def read() -> list[Version]:
            lines = [run.config.checkpoint_line, *(stage.name for stage in run.config.stages)]
            heads = ((line, store.head(line, form)) for line in lines)
            return [Version(line, number) for line, number in heads if number is not None]

        return self._now_and_then("heads", read, SLOW_S)

    def _now_and_then(self, name: str, read: Callable[[], T], seconds: float) -> T:
        """What `read` returned last, if that is no older than `seconds`."""
        at, value = self._seldom.get(name, (-1e9, None))
        if time.monotonic() - at > seconds:
            value = read()
            self._seldom[name] = (time.monotonic(), value)
        return value  # type: ignore[return-value]


def _part(name: str, *arguments: object) -> Markup:
    return render("overview", name, *arguments)


def _unfinished(evaluation: Event) -> dict[str, object] | None:
    """Attempts done and in all of an evaluation; None if none are left."""
    done, total = (int(finite(evaluation.get(key), 0.0)) for key in ("done", "total"))
    return {"label": str(evaluation.get("label")), "done": done, "total": total} if total > done else None
