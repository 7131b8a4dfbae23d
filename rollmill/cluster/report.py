"""The report of a run, from its stores and events."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from rollmill.chat.tokenizer import Tokenizer
from rollmill.cluster.outbox import send_report
from rollmill.cluster.run import RunDirectory
from rollmill.evals.report import example_trajectories, write_report
from rollmill.evals.report.living import living_figures
from rollmill.realtime.collect import PRODUCTION
from rollmill.realtime.journal import Journal
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.query import TrajectoryQuery
from rollmill.trajectories.store import TrajectoryStore

SECOND_ACT = "live"  # a run inside the run: what the demo learns from users
ACCEPTANCE = "acceptance.json"  # what simulated users truly thought, measured before and after


def report_run(run: RunDirectory) -> Path:
    """Write `report.html` and `report.json` into the run's directory, and into its `store` if it has one."""
    objects = Objects.open(run.home_store)
    store = TrajectoryStore(open_database(run.database_url), objects)
    report = write_report(
        run.path,
        seed=run.config.seed,
        trajectories={title: store.load(id) for title, id in example_trajectories(run.path).items()},
        decode=Tokenizer.load(run.tokenizer).decode,
        living=_living(run),
    )
    if run.config.store is not None:
        send_report(objects, run.path)
    return report


def _living(run: RunDirectory) -> dict[str, Any] | None:
    """What users taught a run, or the run of its second act; None if there was no cycle."""
    inside = run.path / SECOND_ACT
    for each in (run, *([RunDirectory.open(inside)] if (inside / "run.json").exists() else [])):
        engine = open_database(each.database_url)
        if cycles := _cycles(Journal(engine, each.id)):
            acceptance = None
            with contextlib.suppress(OSError, ValueError):
                acceptance = json.loads((each.path / ACCEPTANCE).read_text())
            return living_figures(cycles, acceptance, _contexts(each, engine))
    return None


def _cycles(journal: Journal) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for move in journal.history():
        if move.number not in found:
            cycle = journal.get(move.number)
            found[move.number] = {"number": move.number, "facts": cycle.facts if cycle else {}, "moves": []}
        found[move.number]["moves"].append({"state": move.state, "reason": move.reason, "at": move.at})
    return list(found.values())


def _contexts(run: RunDirectory, engine: sa.Engine) -> dict[str, Any]:
    """How long the conversations of users were: more than one context means that they were summarised."""
    store = TrajectoryStore(engine, Objects.open(run.home_store))
    rows = [
        row
        for row in store.find(TrajectoryQuery(run=PRODUCTION))
        if row.provenance.get("run") == run.id and row.segments is not None
    ]
    mean = sum(row.segments or 0 for row in rows) / len(rows) if rows else None
    return {"conversations": len(rows), "contexts": mean, "window": run.config.model.max_context}
