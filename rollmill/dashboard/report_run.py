"""The report of a run, from its stores and events."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollmill import telemetry
from rollmill.chat.tokenizer import Tokenizer
from rollmill.dashboard.conversation import Decode
from rollmill.dashboard.cycles import living_figures
from rollmill.dashboard.loans import LOANS, LoanRecord, read_loans
from rollmill.dashboard.report import example_trajectories, write_report
from rollmill.errors import StorageError
from rollmill.feedback.collect import PRODUCTION
from rollmill.runs.cycle_journal import Journal
from rollmill.runs.lock import holder
from rollmill.runs.run import RunDirectory
from rollmill.runs.shared.outbox import is_sent, send_report
from rollmill.runs.status import service_paths
from rollmill.training.stage import RolloutSettings
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.query import TrajectoryQuery
from rollmill.trajectories.steps import Commit
from rollmill.trajectories.table_rows import TrajectoryRow
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Trajectory, TrajectoryState

SECOND_ACT = "live"  # a run inside the run: what the demo learns from users
ACCEPTANCE = "acceptance.json"  # what simulated users truly thought, measured before and after


def report_run(run: RunDirectory) -> Path:
    """Write `report.html` and `report.json` into the run's directory, and into its `store` if it has one."""
    write_missing_steps(run)
    store = run.trajectories()
    living, user_conversation = read_living(run)
    report = write_report(
        run.path,
        seed=run.config.seed,
        trajectories={title: store.load(id) for title, id in example_trajectories(run.path).items()},
        decode=Tokenizer.load(run.tokenizer).decode,
        living=living,
        user_conversation=user_conversation,
        loans=loans_of(run),
    )
    try:
        share_report(run, anew=True)
    except StorageError as error:
        hint = f"`rollmill train --resume {run.path}` sends it again"
        raise StorageError(f"{report} is written, but not in the run's store: {error.message}", hint=hint) from None
    return report


def share_report(run: RunDirectory, *, anew: bool = False) -> None:
    """Write the report into the `store` of the run, if it has one: `anew`, or if there is none."""
    if run.config.store is None:
        return
    objects = run.objects()
    if anew or not is_sent(objects):
        send_report(objects, run.path)


def write_missing_steps(run: RunDirectory) -> None:
    """Write the `step` events of committed steps that have none: their trainer was killed before it wrote
    them, or its host was lost with its last events."""
    steps = [event for event in telemetry.read_events(run.events) if event["kind"] == "step"]
    written = {(event.get("stage"), event.get("step")) for event in steps}
    missing: list[dict[str, Any]] = []
    for stage in run.config.stages:
        if isinstance(stage, RolloutSettings):
            ledger = run.ledger(stage)
            commits = {commit.step: commit for commit in ledger.commits() if (stage.name, commit.step) not in written}
            named = {"stage": stage.name, "steps": stage.steps}
            missing += [{**_step_event(ledger, commit), **named} for commit in commits.values()]
    telemetry.append_events(run.events, "ledger", missing)


def _step_event(ledger: Ledger, commit: Commit) -> dict[str, Any]:
    record = ledger.step(commit.step)
    assert record is not None, "a step is recorded before it is committed"
    entered = [row for group in record.groups for row in ledger.entered(group)]
    graded = [row for row in entered if row.state == TrajectoryState.graded]
    return {
        "at": commit.created_at,
        "kind": "step",
        "step": commit.step,
        "version": commit.version.number,
        "groups": len(record.groups),
        "trajectories": len(record.trajectories),
        "reward_mean": sum(row.reward or 0.0 for row in graded) / len(graded) if graded else None,
        "solve_rate": sum(bool(row.solved) for row in graded) / len(graded) if graded else None,
        "excluded": dict(Counter(state.value for state, _ in record.excluded.values())),
        "from_ledger": True,
    }


def loans_of(run: RunDirectory) -> list[LoanRecord]:
    """The engines that services of the run lent to its training. They call themselves SERVICE-ROLE."""
    events, running = [], {}
    for path in service_paths(run):
        events += [event for event in telemetry.read_events(path / "events") if event["kind"] in LOANS]
        for lock in (path / "locks").glob("engine-*"):
            if by := holder(path, lock.name):
                running[f"{path.name}-{lock.name}"] = by.since
    return read_loans(events, running)


def read_living(run: RunDirectory) -> tuple[dict[str, Any] | None, tuple[Trajectory, Decode] | None]:
    """What users taught a run, or the run of its second act: of the two, the one whose cycle moved last. None if there
    was no cycle. And a conversation of simulated users, of the usual length."""
    inside = run.path / SECOND_ACT
    runs = [run, *([RunDirectory.open(inside)] if (inside / "run.json").exists() else [])]
    found = [(each, _cycles(Journal(each.database(), each.id))) for each in runs]
    found = [(each, cycles) for each, cycles in found if cycles]
    if not found:
        return None, None
    each, cycles = max(found, key=lambda pair: float(pair[1][-1]["moves"][-1]["at"]))
    acceptance = None
    with contextlib.suppress(OSError, ValueError):
        acceptance = json.loads((each.path / ACCEPTANCE).read_text())
    store = each.trajectories()
    rows = _conversations(each, store)
    shown = None
    if (acceptance or {}).get("users") == "simulated":
        # what real users said is no part of a report: they may come when the simulated ones have gone
        simulated = [row for row in rows if row.created_at <= (each.path / ACCEPTANCE).stat().st_mtime]
        usual = sorted(simulated, key=lambda row: (row.segments or 0, row.created_at))[len(simulated) // 2 :]
        shown = (store.load(usual[0].id), Tokenizer.load(each.tokenizer).decode) if usual else None
    return living_figures(cycles, acceptance, {**_contexts(each, rows), "second_act": each is not run}), shown


def _cycles(journal: Journal) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for move in journal.history():
        if move.number not in found:
            cycle = journal.get(move.number)
            found[move.number] = {"number": move.number, "facts": cycle.facts if cycle else {}, "moves": []}
        found[move.number]["moves"].append({"state": move.state, "reason": move.reason, "at": move.at})
    return list(found.values())


def _conversations(run: RunDirectory, store: TrajectoryStore) -> list[TrajectoryRow]:
    """Those with users that are stored."""
    found = store.find(TrajectoryQuery(run=PRODUCTION))
    return [row for row in found if row.provenance.get("run") == run.id and row.payload_key is not None]


def _contexts(run: RunDirectory, rows: Sequence[TrajectoryRow]) -> dict[str, Any]:
    """How long the conversations of users were: more than one context means that they were summarised."""
    mean = sum(row.segments or 0 for row in rows) / len(rows) if rows else None
    return {"conversations": len(rows), "contexts": mean, "window": run.config.model.max_context}
