"""Admission in SQL: what the database knows about groups that want to enter a ledger, and their rows.

Functions over an open connection; `Ledger.admit` wraps them in a transaction that holds the run's lock. Each sends as
many statements for ten thousand groups as for one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import bindparam

from rollmill.storage.database import among
from rollmill.storage.tables import groups, ledger, trajectories
from rollmill.trajectories.admission import Experience, Room, Verdict
from rollmill.trajectories.changes import add_rewards, reward_row
from rollmill.trajectories.storable import to_text
from rollmill.types import GroupState, LedgerState, TrajectoryState

# a parameter must not have the name of a column: SQLAlchemy would set that column to it
_of_run: sa.BindParameter[str] = bindparam("of_run")
_ENTRIES = sa.select(ledger.c.trajectory, ledger.c.state).where(
    ledger.c.run == _of_run, among(ledger.c.trajectory, "named")
)
_GROUPS = sa.select(groups.c.id).where(groups.c.run == _of_run, among(groups.c.id, "named"))
_STATES = sa.select(trajectories.c.id, trajectories.c.state).where(among(trajectories.c.id, "named")).with_for_update()
_HAS_PAYLOAD = (
    trajectories.update()
    .where(trajectories.c.id == bindparam("known"), trajectories.c.payload_key.is_(None))
    .values(payload_key=bindparam("key"))
)


@dataclass(frozen=True)
class There:
    """What the database has of some groups already."""

    entries: dict[str, str]  # trajectory -> its state in the ledger
    groups: set[str]  # in the ledger
    states: dict[str, str]  # of trajectories


def look(connection: sa.Connection, run: str, found: Sequence[Experience]) -> There:
    ids = [id for group in found for id in group.ids]
    entries = connection.execute(_ENTRIES, {"of_run": run, "named": ids})
    known = connection.execute(_GROUPS, {"of_run": run, "named": [group.group_id for group in found]})
    states = connection.execute(_STATES, {"named": ids})
    return There(
        {row.trajectory: row.state for row in entries}, set(known.scalars()), {row.id: row.state for row in states}
    )


def judge(found: Sequence[Experience], there: There, room: Room) -> list[Verdict]:
    """One verdict per group, in order: each takes the room that those before it have left."""
    entries, names, verdicts = dict(there.entries), set(there.groups), list[Verdict]()
    for group in found:
        refusal = _refusal(group, entries, names, there.states)
        verdict = Verdict(group.group_id, group.ids, *(("refused", refusal) if refusal else room.judge(group)))
        verdicts.append(verdict)
        if verdict.decision in ("admitted", "stale"):
            entries |= dict.fromkeys(group.ids, verdict.decision)
            names.add(group.group_id)
        if verdict.decision == "admitted":
            room = room.with_group(group)
    return verdicts


def _refusal(group: Experience, entries: dict[str, str], names: set[str], states: dict[str, str]) -> str:
    for id in group.ids:
        if id in entries:
            return f"in the ledger already: {entries[id]}"
    if group.group_id in names:
        return "other trajectories of its group are in the ledger"
    wrong = (id for id in group.ids if states.get(id, TrajectoryState.graded) != TrajectoryState.graded)
    return next((f"{id} is {states[id]}" for id in wrong), "")


def enter(
    connection: sa.Connection, run: str, judged: Iterable[tuple[Experience, Verdict]], there: There, change: int
) -> bool:
    """Write the groups that are admitted, as waiting, and those that are stale, as final. Returns whether there are
    any. `change`: the number of this change of the run's groups."""
    entering = [(group, verdict) for group, verdict in judged if verdict.decision in ("admitted", "stale")]
    if not entering:
        return False
    now = time.time()
    new, rewards, payloads, rows, entries = [], [], [], [], []
    for group, verdict in entering:
        stale = verdict.decision == "stale"
        for member in group.members:
            key = None if stale else member.row.get("payload_key")  # nobody reads the payload of a stale one
            if member.id not in there.states:
                new.append({**member.row, "payload_key": key})
                rewards.append(reward_row(member.id, member.reward))
            elif key is not None:  # it was stale for another stage, so its payload was not copied then
                payloads.append({"known": member.id, "key": key})
        row = {"run": run, "id": group.group_id, "task_id": group.task_id, "size": len(group.members)}
        state = {"state": (GroupState.final if stale else GroupState.waiting).value, "created_at": now, "ready_at": now}
        rows.append(row | state | {"min_version": group.oldest, "origin": to_text(group.origin), "changed": change})
        entry = {"run": run, "group_id": group.group_id, "reason": to_text(verdict.reason) if stale else None}
        decided = (LedgerState.stale if stale else LedgerState.admitted).value
        entries += [{**entry, "trajectory": id, "state": decided} for id in group.ids]
    if new:
        connection.execute(trajectories.insert(), new)
        add_rewards(connection, rewards)
    if payloads:
        connection.execute(_HAS_PAYLOAD, payloads)
    connection.execute(groups.insert(), rows)
    connection.execute(ledger.insert(), entries)
    return True
